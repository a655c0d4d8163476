//! Tests with a disk that prepares a reactor only when the test allows it: meanwhile queues wait with their start or move, and
//! running queues continue.

use super::{settings, setup};
use crate::controller::Blk;
use crate::queue::Queue;
use aryk_bdev::{
    Access, Blocks, BoxFuture, Channel, Completion, Device as Disk, Event, Geometry, Identity, Io, Limits,
    OpSet, OpenError, Outbox, Registry, Status, Tag,
};
use aryk_reactor::{CoreSet, Cx, Handle, MOVE_PATIENCE, MoveError, Options, Order, Reactors, RootId};
use aryk_vhost_device::{Controller, DeviceQueue};
use aryk_vhost_user::{Device, SessionHandle};
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::LocalSet;
use tokio::time::timeout;

/// Controls of the test's disk.
#[derive(Default)]
struct Gate {
    is_open: AtomicBool,
    opened: Notify,
    fails: AtomicBool,
    /// Preparations in progress: begun, and neither ended nor cancelled.
    preparing: AtomicU32,
    /// Cores whose reactors are prepared.
    ready: Mutex<Vec<u16>>,
}

impl Gate {
    fn open(&self) {
        self.is_open.store(true, Ordering::Relaxed);
        self.opened.notify_waiters();
    }

    fn close(&self) {
        self.is_open.store(false, Ordering::Relaxed);
    }
}

struct Preparing<'a>(&'a AtomicU32);

impl Drop for Preparing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Remote(Arc<Gate>);

impl Disk for Remote {
    fn product(&self) -> &'static str {
        "remote"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(512, Blocks(8))
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        let core = reactor.core();
        Box::pin(async move {
            self.0.preparing.fetch_add(1, Ordering::Relaxed);
            let _preparing = Preparing(&self.0.preparing);
            if self.0.fails.load(Ordering::Relaxed) {
                return Err(OpenError::Unavailable("the target does not answer".to_owned()));
            }
            while !self.0.is_open.load(Ordering::Relaxed) {
                self.0.opened.notified().await;
            }
            self.0.ready.lock().unwrap().push(core);
            Ok(())
        })
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        assert!(
            self.0.ready.lock().unwrap().contains(&cx.handle().core()),
            "open_channel before prepare has ended"
        );
        Ok(Box::new(Done(Outbox::new(root))))
    }
}

/// Completes requests at once.
struct Done(Outbox);

impl Channel for Done {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.0.push(io.tag, Status::Ok, cx);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.0.take(out);
    }
}

struct Rig {
    gate: Arc<Gate>,
    registry: Registry,
    reactors: Rc<Reactors>,
    controller: Rc<Controller<Blk>>,
    session: SessionHandle,
}

/// Runs `test` with reactors on all cores and a controller of a disk whose gate is closed.
fn run(test: impl AsyncFnOnce(&Rig)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async {
        let (gate, registry) = (Arc::<Gate>::default(), Registry::new());
        registry.register(Identity::named("disk"), Arc::new(Remote(Arc::clone(&gate)))).unwrap();
        let options = Options { cores: CoreSet::allowed(), ..Options::default() };
        let reactors = Rc::new(Reactors::start(&options).unwrap());
        let disk = registry.open("disk", Access::Shared, "test", |_| ()).unwrap();
        let (memory, blk) = (registry.memory().clone(), Blk::new(disk, false, 1));
        let controller = Rc::new(Controller::new(settings(), blk, memory, Rc::clone(&reactors)));
        let session = SessionHandle::default();
        controller.connected(session.clone());
        let rig = Rig { gate, registry, reactors, controller, session };
        timeout(Duration::from_secs(60), test(&rig)).await.expect("the test takes too long");
        if rig.controller.queues().get(0).is_some() {
            rig.controller.stop_queue(0).await;
        }
    });
}

impl Rig {
    /// Waits until the disk prepares a reactor.
    async fn until_preparing(&self) {
        while self.gate.preparing.load(Ordering::Relaxed) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

#[test]
fn a_queue_starts_when_its_disk_is_ready() {
    run(async |rig: &Rig| {
        let mut start = pin!(rig.controller.start_queue(0, setup()));
        tokio::select! {
            _ = &mut start => panic!("the call waits for the disk"),
            () = rig.until_preparing() => {}
        }
        assert!(timeout(Duration::from_millis(30), &mut start).await.is_err(), "the call waits for the disk");
        assert_eq!(rig.gate.preparing.load(Ordering::Relaxed), 1);
        // Calls to running queues do not wait for the preparation.
        timeout(Duration::from_secs(5), rig.controller.revoke_memory()).await.expect("running queues answer");
        rig.gate.open();
        start.await.unwrap();
    });
}

#[test]
fn a_session_that_ends_cancels_the_start_of_a_queue() {
    run(async |rig: &Rig| {
        let (started, ()) = tokio::join!(rig.controller.start_queue(0, setup()), async {
            rig.until_preparing().await;
            rig.session.end("the test says so");
        });
        assert_eq!(started.unwrap_err().to_string(), "the session ended before the disks were ready");
        assert_eq!(rig.gate.preparing.load(Ordering::Relaxed), 0, "cancelled");
    });
}

#[test]
fn a_front_end_that_stops_a_queue_cancels_its_start() {
    run(async |rig: &Rig| {
        for _ in 0..2 {
            let (started, ()) = tokio::join!(rig.controller.start_queue(0, setup()), async {
                rig.until_preparing().await;
                rig.controller.cancel_start(0);
            });
            let why = started.unwrap_err().to_string();
            assert_eq!(why, "the front-end stopped the queue before the disks were ready");
            assert_eq!(rig.gate.preparing.load(Ordering::Relaxed), 0, "cancelled");
        }
        rig.gate.open();
        rig.controller.start_queue(0, setup()).await.unwrap();
        rig.controller.cancel_start(0);
        assert!(rig.controller.queues().get(0).is_some(), "the queue runs");
    });
}

#[test]
fn a_failed_prepare_fails_the_start_of_the_queue() {
    run(async |rig: &Rig| {
        rig.gate.fails.store(true, Ordering::Relaxed);
        let why = rig.controller.start_queue(0, setup()).await.unwrap_err().to_string();
        assert_eq!(why, "cannot open the disk for a queue: the target does not answer");
    });
}

#[test]
fn a_removal_cancels_prepare_and_the_queue_starts_without_a_disk() {
    run(async |rig: &Rig| {
        let removal = async {
            rig.until_preparing().await;
            tokio::join!(rig.registry.remove("disk"), Blk::disk_event(&rig.controller, Event::Removed))
        };
        let (started, (removed, ())) = tokio::join!(rig.controller.start_queue(0, setup()), removal);
        started.unwrap();
        removed.unwrap();
        assert_eq!(rig.gate.preparing.load(Ordering::Relaxed), 0, "cancelled");
        assert!(rig.gate.ready.lock().unwrap().is_empty());
    });
}

#[test]
fn a_queue_moves_after_prepare_has_succeeded_and_stays_if_it_fails() {
    run(async |rig: &Rig| {
        rig.gate.open();
        rig.controller.start_queue(0, setup()).await.unwrap();
        rig.gate.close();
        let queue = rig.controller.queues().get(0).unwrap();
        let home = queue.handle().clone();
        let Some(other) = rig.reactors.handles().into_iter().find(|handle| *handle != home) else {
            eprintln!("one core only: skipping the move of a queue");
            return;
        };
        let thread =
            queue.call(|queue: &mut Queue, cx| cx.thread_number(queue.guest().thread())).await.unwrap();
        let go = || {
            let to = rig.reactors.hold(&other).unwrap();
            let order = Order::Move(to, MOVE_PATIENCE);
            async { rig.controller.order(thread, order).unwrap().await.unwrap() }
        };
        rig.gate.fails.store(true, Ordering::Relaxed);
        assert_eq!(go().await, Err(MoveError::Open("the target does not answer".to_owned())));
        rig.gate.fails.store(false, Ordering::Relaxed);

        let mut going = pin!(go());
        assert!(timeout(Duration::from_millis(30), &mut going).await.is_err(), "the call waits for the disk");
        let running = rig.controller.queues().get(0).unwrap();
        assert_eq!(*running.handle(), home);
        let has_begun = running.call(|queue: &mut Queue, _| queue.order.is_some()).await.unwrap();
        assert!(!has_begun, "the queue takes requests while its disk prepares the other reactor");
        rig.gate.open();
        going.await.unwrap();
        assert_eq!(*rig.controller.queues().get(0).unwrap().handle(), other);
    });
}
