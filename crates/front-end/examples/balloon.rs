//! A VM that returns pages of its memory to the host, as a balloon does, and then does I/O in the same place.
//!
//!     cargo run -p aryk-front-end --example balloon -- /run/aryk/vhost/vm1 [huge]
//!
//! The program overwrites the first 4 MiB of the disk. It prints what a read found and what a write has written: before pages
//! were returned, and after. `huge`: the memory consists of huge pages.

use aryk_front_end::blk::Requests;
use aryk_front_end::{
    Format, HUGE_PAGE, Layout, Memory, Operation, Queue, Session, Shape, Wanted, feature, protocol,
};
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes of a request: they contain a whole huge page.
const LEN: u32 = 4 << 20;
/// The timeout of a request.
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let (socket, is_huge) = match words[..] {
        [socket] => (socket, false),
        [socket, "huge"] => (socket, true),
        _ => return Err("usage: balloon SOCKET [huge]".into()),
    };
    let wanted = Wanted {
        features: feature::VERSION_1 | feature::PROTOCOL,
        optional: 0,
        protocol: protocol::CONFIG,
        optional_protocol: protocol::REPLY_ACK,
        queues: 1,
        patience: PATIENCE,
    };
    let session = Session::connect(Path::new(socket), &wanted)?;
    let shape = Shape { format: Format::Split, size: 64, event_idx: false };
    let layout = Layout { shape, slots: 2, len: LEN, indirect: false };
    let len = layout.space::<Requests>();
    let memory = if is_huge { Memory::of_huge_pages(len)? } else { Memory::new(len)? };
    let queue = Queue::new(Requests, &memory, 0, 0, layout)?;
    session.set_features()?;
    session.share(&memory)?;
    session.start(&queue.announced())?;
    session.enable(1)?;

    let mut vm = Vm { memory, queue };
    // All pages are there, and the disk has what is expected.
    [0, 1].into_iter().for_each(|slot| vm.fill(slot, 0));
    vm.io(0, Operation::Write)?;
    vm.report("before", 1)?;
    let at = vm.queue.place(0).data.next_multiple_of(HUGE_PAGE);
    vm.memory.discard(at, HUGE_PAGE)?;
    vm.report("after", 2)?;
    session.stop(0)?;
    Ok(())
}

struct Vm {
    memory: Memory,
    /// Slot 0 has the pages that are returned, slot 1 none of them.
    queue: Queue<Requests>,
}

impl Vm {
    /// Reads and writes by slot 0, and checks both by slot 1.
    fn report(&mut self, when: &str, seed: u64) -> Result<(), Box<dyn Error>> {
        self.fill(1, seed);
        self.io(1, Operation::Write)?;
        // The VM accesses its pages before the device does.
        self.fill(0, 100);
        self.io(0, Operation::Read)?;
        let read = self.check(0, seed);
        self.fill(0, 200 + seed);
        self.io(0, Operation::Write)?;
        self.io(1, Operation::Read)?;
        let written = self.check(1, 200 + seed);
        println!("{when}: read {read}, written {written}");
        Ok(())
    }

    #[expect(clippy::disallowed_methods, reason = "a program without a reactor has the system's clock")]
    fn io(&mut self, slot: u16, operation: Operation) -> Result<(), Box<dyn Error>> {
        let end = Instant::now() + PATIENCE;
        self.queue.submit(slot, operation, 0);
        self.queue.publish();
        while self.queue.take()?.is_none() {
            if Instant::now() > end {
                return Err("a request was not completed in time".into());
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Offsets of the slot's words in the memory.
    fn words(&self, slot: u16) -> impl Iterator<Item = (usize, u64)> + use<> {
        let at = self.queue.place(slot).data as usize;
        (0..u64::from(LEN)).step_by(8).map(move |offset| (at + offset as usize, offset))
    }

    fn fill(&self, slot: u16, seed: u64) {
        self.words(slot).for_each(|(at, offset)| self.memory.whole().write(at, &content(seed, offset)));
    }

    fn check(&self, slot: u16, seed: u64) -> String {
        let is_wrong =
            |(at, offset): &(usize, u64)| self.memory.whole().read::<u64>(*at) != content(seed, *offset);
        match self.words(slot).filter(is_wrong).count() {
            0 => "right".to_owned(),
            words => format!("{} KiB wrong", words * 8 / 1024),
        }
    }
}

const fn content(seed: u64, offset: u64) -> u64 {
    (seed << 32) + offset + 1
}
