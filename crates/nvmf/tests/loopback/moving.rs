//! Queues that move from one reactor to another while their hosts use them.
#![expect(clippy::disallowed_methods, reason = "a test waits for other threads")]

use crate::host::{Connection, Options};
use crate::raw::{Raw, capsule, capsule_with, command, pdu};
use crate::stuck::{self, StuckDisk};
use crate::target::{BLOCK, BLOCKS, Running, SUBSYSTEM, until};
use crate::{VARIANTS, pattern, tls};
use aryk_bdev::{Blocks, BoxFuture, Channel, Device, Geometry, Identity, Limits, OpSet, OpenError};
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::nqn::Nqn;
use aryk_nvme_fabrics::tcp::{H2cData, Header};
use aryk_nvmf::{Address, NewNamespace};
use aryk_reactor::{CoreSet, Cx, Handle, MoveError, Order, RootId, ThreadStats};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(10);

impl Running {
    /// The thread of the I/O queue with this name, with its core. `None`: there is none.
    fn stats(&self, name: &'static str) -> Option<(ThreadStats, u16)> {
        let handles = self.reactors().handles();
        self.run(async move |_| {
            for handle in handles {
                let all = handle.call(|cx| cx.thread_stats()).await.unwrap();
                if let Some(found) = all.into_iter().find(|thread| thread.name == name) {
                    return Some((found, handle.core()));
                }
            }
            None
        })
    }

    /// The number of that thread, and its core.
    fn queue_thread(&self, name: &'static str) -> Option<(u64, u16)> {
        self.stats(name).map(|(stats, core)| (stats.id, core))
    }

    /// The two cores.
    fn cores(&self) -> [u16; 2] {
        let cores: Vec<u16> = self.reactors().handles().iter().map(Handle::core).collect();
        cores.try_into().unwrap()
    }

    fn order(&self, thread: u64, order: Order) -> Option<Result<(), MoveError>> {
        let (sender, result) = std::sync::mpsc::channel();
        // The target's other calls do not wait for the move.
        self.run(async move |target| {
            drop(tokio::task::spawn_local(async move { sender.send(target.order(thread, order).await) }));
        });
        result.recv().unwrap()
    }

    /// Moves a queue to the other reactor.
    fn move_queue(&self, name: &'static str, patience: Duration) -> Option<Result<(), MoveError>> {
        let (thread, from) = self.queue_thread(name)?;
        let to = self.cores().into_iter().find(|core| *core != from).unwrap();
        let to = self.reactors().hold_for_arrival(to).unwrap();
        self.order(thread, Order::Move(to, patience))
    }
}

const QUEUE: &str = "nqn.2016-06.io.spdk:host1 queue 1";

/// Writes and reads until it is told to stop: several commands at once, in capsules and by R2T. Returns how many.
fn load(address: SocketAddr, options: Options, id: u16, stop: &AtomicBool) -> usize {
    let mut queue = Connection::io(address, options, id, 1, 1).unwrap();
    let mut round = 0;
    while !stop.load(Relaxed) {
        for (lba, blocks) in [(0, 1), (1, 2), (3, 8), (11, 32)] {
            queue.submit_write(lba, &pattern(blocks, lba as usize + round));
        }
        queue.finish(4);
        for (lba, blocks) in [(0, 1), (1, 2), (3, 8), (11, 32)] {
            queue.start(io::READ, lba, blocks);
        }
        let mut done = queue.finish(4);
        done.sort();
        for ((lba, blocks), (_, data)) in [(0, 1), (1, 2), (3, 8), (11, 32)].into_iter().zip(done) {
            assert!(data == pattern(blocks, lba + round), "block {lba} of round {round}");
        }
        round += 1;
    }
    round * 8
}

fn move_under_load(target: &Running, address: SocketAddr, options: Options) {
    let (_admin_queue, id) = Connection::admin(address, options, SUBSYSTEM, 1);
    let stop = Arc::<AtomicBool>::default();
    let of_load = Arc::clone(&stop);
    let load = std::thread::spawn(move || load(address, options, id, &of_load));
    until(|| target.queues() == 1);
    let began = target.run(async |target| target.began());
    for _ in 0..50 {
        let (thread, from) = target.queue_thread(QUEUE).unwrap();
        assert_eq!(target.move_queue(QUEUE, PATIENCE), Some(Ok(())));
        let (same, to) = target.queue_thread(QUEUE).unwrap();
        assert!(thread == same && from != to);
        assert_eq!(target.list()[0].controllers[0].queues[&1], to);
    }
    stop.store(true, Relaxed);
    let commands = load.join().unwrap();
    assert_eq!(target.run(async |target| target.began()), began, "it is the same queue");
    let traffic = target.list()[0].controllers[0].traffic.clone();
    assert_eq!(
        traffic.reads.requests + traffic.writes.requests,
        commands as u64,
        "each command is counted once"
    );
}

#[test]
fn a_queue_moves_while_its_host_writes_and_reads() {
    for (header_digest, data_digest, disables_flow_control) in VARIANTS {
        let target = Running::start_on(2);
        let options = Options { header_digest, data_digest, disables_flow_control, alignment: 3 };
        move_under_load(&target, target.address, options);
        target.stop();
    }
}

#[test]
fn a_queue_with_tls_moves_while_its_host_writes_and_reads() {
    let target = Running::start_on(2);
    let address = tls::secure(&target);
    move_under_load(&target, address, Options::default());
    target.stop();
}

#[test]
fn a_queue_waits_for_its_disk_and_its_host_before_it_moves() {
    let (target, stuck) = stuck::start(2);
    let (_admin_queue, id) = Raw::admin(target.address);
    let mut queue = Raw::io(target.address, id, 1, 16);
    let (_, home) = target.queue_thread(QUEUE).unwrap();
    // The disk keeps a write, and a read that comes during the attempt waits for its end.
    stuck.is_stuck.store(true, Relaxed);
    queue.send(&capsule_with(command(1, io::WRITE, 0, 1, 0), &[1; BLOCK]));
    until(|| stuck.writes.load(Relaxed) == 1);
    std::thread::scope(|scope| {
        let moved = scope.spawn(|| target.move_queue(QUEUE, Duration::from_millis(300)));
        std::thread::sleep(Duration::from_millis(100));
        let read = queue.run(command(2, io::READ, 0, 1, BLOCK as u32));
        assert_eq!((read.0, moved.join().unwrap()), (Code::SUCCESS, Some(Err(MoveError::TooSlow))));
    });
    stuck.is_stuck.store(false, Relaxed);
    assert!(queue.completion().unwrap().status().is_success());
    // The host keeps the data of a write back. One that comes during the attempt waits for its end, and is made once.
    queue.send(&capsule(command(3, io::WRITE, 2, 4, 4 * BLOCK as u32)));
    let Some((Header::R2t(r2t), _)) = queue.receive() else { panic!("the target asks for the data") };
    std::thread::scope(|scope| {
        let moved = scope.spawn(|| target.move_queue(QUEUE, Duration::from_millis(300)));
        std::thread::sleep(Duration::from_millis(100));
        queue.send(&capsule_with(command(4, io::WRITE, 7, 1, 0), &[4; BLOCK]));
        assert_eq!(moved.join().unwrap(), Some(Err(MoveError::TooSlow)));
    });
    assert_eq!(queue.completion().unwrap().cid(), 4);
    assert_eq!((stuck.writes.load(Relaxed), target.queue_thread(QUEUE).unwrap().1), (2, home));
    // With the data comes the move.
    std::thread::scope(|scope| {
        let moved = scope.spawn(|| target.move_queue(QUEUE, PATIENCE));
        std::thread::sleep(Duration::from_millis(50));
        let data = H2cData { cid: 3, tag: r2t.tag, offset: 0, len: r2t.len, is_last: true };
        queue.send(&pdu(&Header::H2cData(data), &[3; 4 * BLOCK]));
        assert_eq!(moved.join().unwrap(), Some(Ok(())));
    });
    assert_eq!(queue.completion().unwrap().cid(), 3);
    assert_ne!(target.queue_thread(QUEUE).unwrap().1, home);
    target.stop();
}

#[test]
fn a_command_whose_capsule_has_come_in_part_moves_with_its_queue() {
    let target = Running::start_on(2);
    let (_admin_queue, id) = Raw::admin(target.address);
    let mut queue = Raw::io(target.address, id, 1, 16);
    let bytes = capsule_with(command(1, io::WRITE, 5, 2, 0), &pattern(2, 9));
    for piece in bytes.chunks(1 + bytes.len() / 9) {
        queue.send(piece);
        assert_eq!(target.move_queue(QUEUE, PATIENCE), Some(Ok(())));
    }
    assert!(queue.completion().unwrap().status().is_success());
    let read = queue.run(command(2, io::READ, 5, 2, 2 * BLOCK as u32));
    assert!(read == (Code::SUCCESS, pattern(2, 9)));
    target.stop();
}

/// A disk that one reactor cannot open: twice the core for one that it cannot prepare, and one more for one where channels fail.
struct Elsewhere(Arc<AtomicU32>, Arc<dyn Device>);

impl Elsewhere {
    fn refuse(&self, core: u16, prepares: u32) -> Result<(), OpenError> {
        match 2 * u32::from(core) + prepares == self.0.load(Relaxed) {
            true => Err(OpenError::Unavailable("here".to_owned())),
            false => Ok(()),
        }
    }
}

impl Device for Elsewhere {
    fn product(&self) -> &'static str {
        "elsewhere"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(BLOCK as u32, Blocks(8))
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        let refused = self.refuse(reactor.core(), 0);
        Box::pin(async move { refused })
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        self.refuse(cx.handle().core(), 1)?;
        self.1.open_channel(root, cx)
    }
}

#[test]
fn a_queue_stays_where_its_disks_can_be_opened() {
    let target = Running::start_on(2);
    let refusing = Arc::new(AtomicU32::new(u32::MAX));
    let disk = Arc::new(Elsewhere(Arc::clone(&refusing), Arc::new(StuckDisk(Arc::default()))));
    target.env().registry().register(Identity::named("elsewhere"), disk).unwrap();
    target.run(async |target| {
        target.add_namespace(SUBSYSTEM, "elsewhere", NewNamespace::default()).await.unwrap();
    });
    let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut queue = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    let (thread, home) = target.queue_thread(QUEUE).unwrap();
    let other = target.cores().into_iter().find(|core| *core != home).unwrap();
    for step in 0..4 {
        // At the preparation, and at the opening.
        refusing.store(2 * u32::from(other) + step % 2, Relaxed);
        let moved = target.move_queue(QUEUE, PATIENCE);
        assert!(matches!(moved, Some(Err(MoveError::Open(_)))), "{moved:?}");
        queue.write(3, &pattern(8, 3)).unwrap();
        assert!(queue.read(3, 8).unwrap() == pattern(8, 3));
        assert!(
            queue.run(SubmissionEntry::new(io::FLUSH, 2), &[], 0).is_ok(),
            "the queue has that namespace"
        );
    }
    assert_eq!(target.queue_thread(QUEUE), Some((thread, home)));
    refusing.store(u32::MAX, Relaxed);
    // An order to run on certain cores holds from then on.
    let beyond = CoreSet::from_iter([4095]);
    assert_eq!(target.order(thread, Order::Stay(beyond.clone())), Some(Err(MoveError::Cores(beyond))));
    for core in [other, home, home] {
        assert_eq!(target.order(thread, Order::Stay(CoreSet::from_iter([core]))), Some(Ok(())));
        assert_eq!(target.queue_thread(QUEUE), Some((thread, core)));
        assert_eq!(target.stats(QUEUE).unwrap().0.cores, CoreSet::from_iter([core]));
    }
    assert_eq!(target.order(thread + 1000, Order::Stay(CoreSet::from_iter([home]))), None);
    queue.write(3, &pattern(8, 4)).unwrap();
    target.stop();
}

#[test]
fn queues_run_on_the_cores_of_their_listener() {
    let target = Running::start_on(2);
    for core in target.cores() {
        let cores = CoreSet::from_iter([core]);
        let (address, of_listener) = (Address::tcp(target.address), cores.clone());
        target.run(async move |target| {
            target.place_queues(SUBSYSTEM, address, Some(of_listener)).unwrap();
            assert!(target.find(SUBSYSTEM).unwrap().listeners[&address].cores.is_some());
        });
        let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
        let open = |qid| Connection::io(target.address, Options::default(), id, qid, 1).unwrap();
        let _queues = [1, 2, 3, 4].map(open);
        let found = &target.list()[0].controllers[0].queues;
        assert!(found.len() == 4 && found.values().all(|of| *of == core), "{found:?}");
        // The scheduler moves a thread to its cores only. An earlier queue of this name may leave its reactor a moment later.
        until(|| target.stats(QUEUE).is_some_and(|(stats, _)| stats.cores == cores));
    }
    let (address, nowhere) = (Address::tcp(target.address), CoreSet::from_iter([4095]));
    target.run(async move |target| target.place_queues(SUBSYSTEM, address, Some(nowhere)).unwrap());
    let (_admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, 1);
    let mut queue = Connection::io(target.address, Options::default(), id, 1, 1).unwrap();
    queue.write(0, &pattern(1, 1)).unwrap();
    target.stop();
}

#[test]
fn namespaces_come_and_go_while_a_queue_moves() {
    let target = Running::start_on(2);
    let (_admin_queue, id) = Raw::admin(target.address);
    let mut queue = Raw::io(target.address, id, 1, 16);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let moves = scope.spawn(|| {
            let mut moves = 0;
            while !stop.load(Relaxed) {
                moves += u32::from(target.move_queue(QUEUE, PATIENCE) == Some(Ok(())));
            }
            moves
        });
        for round in 0..100_u8 {
            target.run(async |target| target.remove_namespace(SUBSYSTEM, 1).await.unwrap());
            let gone = queue.run(command(1, io::READ, 0, 1, BLOCK as u32));
            assert_eq!(gone.0, Code::INVALID_NAMESPACE_OR_FORMAT, "round {round}");
            target.run(async |target| {
                target.add_namespace(SUBSYSTEM, "disk", NewNamespace::default()).await.unwrap();
            });
            // The queue learns of it after its move, before its next command.
            queue.send(&capsule_with(
                command(2, io::WRITE, u64::from(round) % BLOCKS as u64, 1, 0),
                &[round; BLOCK],
            ));
            assert!(queue.completion().unwrap().status().is_success(), "round {round}");
        }
        stop.store(true, Relaxed);
        assert!(moves.join().unwrap() > 10);
    });
    target.stop();
}

#[test]
fn hosts_that_go_while_their_queues_move_leave_nothing() {
    let target = Running::start_on(2);
    for round in 0..30 {
        let (admin_queue, id) = Raw::admin(target.address);
        let mut queue = Raw::io(target.address, id, 1, 16);
        let write = capsule_with(command(1, io::WRITE, 0, 1, 0), &[1; BLOCK]);
        queue.send(&write);
        std::thread::scope(|scope| {
            let moved = scope.spawn(|| target.move_queue(QUEUE, PATIENCE));
            match round % 3 {
                0 => drop(queue),
                1 => drop(admin_queue),
                _ => target.run(async |target| {
                    let host = "nqn.2016-06.io.spdk:host1".parse::<Nqn>().unwrap();
                    target.remove_host(SUBSYSTEM, &host).await.unwrap();
                    target.add_host(SUBSYSTEM, host, None).unwrap();
                }),
            }
            let _ = moved.join().unwrap();
        });
        until(|| target.list()[0].controllers.iter().all(|host| host.queues.is_empty()));
        until(|| target.queue_thread(QUEUE).is_none());
    }
    until(|| target.list()[0].controllers.is_empty());
    target.stop();
}
