//! Measures the cost of a reactor's own work, in nanoseconds: the best of many short runs, since other programs run too.
//!
//! `cargo run --release -p aryk-reactor --example turn_cost`

use aryk_reactor::{Clock, CoreSet, Cx, Engine, Layer, Point, Reactor, Root, RootRef, SleepPolicy, Traced};
use std::convert::Infallible;

const RUNS: usize = 200;
const STEPS: u64 = 2000;

struct Queue {
    has_work: bool,
}

impl Root for Queue {
    fn poll(&mut self, _: &mut Cx) -> bool {
        self.has_work
    }
}

fn measure(what: &str, mut step: impl FnMut()) {
    let clock = Clock::Monotonic;
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let start = clock.now();
        (0..STEPS).for_each(|_| step());
        best = best.min(clock.now().since(start).as_nanos() as f64 / STEPS as f64);
    }
    println!("{what:<44} {best:>8.1}");
}

fn queue(cx: &mut Cx, has_work: bool) -> RootRef<Queue> {
    let thread = cx.add_thread("t", CoreSet::allowed());
    let Ok(root) = cx.add_root(thread, "q", |_, _| Ok::<_, Infallible>(Queue { has_work }));
    root
}

fn main() -> std::io::Result<()> {
    let clock = Clock::Monotonic;
    measure("a reading of the clock", || {
        std::hint::black_box(clock.now());
    });
    for engine in [Engine::IoUring, Engine::Epoll] {
        println!("{engine:?}");
        let mut reactor = Reactor::new(0, SleepPolicy::Poll, engine, Clock::Monotonic)?;
        measure("  an empty turn", || {
            reactor.turn();
        });
        measure("  an empty step", || {
            reactor.step();
        });
        let cx = reactor.cx();
        measure("  a trace record", || cx.trace(Traced::new(Layer::Bdev, 1), Point::Submit, 2));
        let woken = queue(cx, true);
        measure("  a turn with one woken root", || {
            reactor.cx().wake(woken.id());
            reactor.turn();
        });
        let handle = reactor.handle().clone();
        measure("  a turn with a message to itself", || {
            reactor.cx().post(&handle, |_| ());
            reactor.turn();
        });
        let busy = queue(reactor.cx(), true);
        reactor.cx().kick(busy.id());
        measure("  a turn with one promoted root with work", || {
            reactor.turn();
        });
        for _ in 0..15 {
            let more = queue(reactor.cx(), true);
            reactor.cx().kick(more.id());
        }
        measure("  a turn with 16 of them, of 16 threads", || {
            reactor.turn();
        });
    }
    Ok(())
}
