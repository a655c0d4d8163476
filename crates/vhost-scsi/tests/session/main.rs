//! Controllers as guests find them: over a socket, with rings of both formats, while disks come and go.

mod deaf;
mod guest;
mod registered;
mod remote;

use aryk_bdev::{Env, Identity, Op, OpSet, OpenError};
use aryk_bdev_error::{Fault, Injection};
use aryk_bdev_malloc as malloc;
use aryk_front_end::{Format, Memory};
use aryk_reactor::{CoreSet, Engine, Options as ReactorOptions, Reactors, SleepPolicy};
use aryk_vhost_device::{Controllers, Error as ControllerError, Link, Options};
use aryk_vhost_scsi::{Error, ScsiControllers};
use aryk_vhost_user::SocketOptions;
use guest::{ANSWER, ANSWER_AT, CONTROL, DATA_AT, EVENT, Guest, REQUEST};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

const BLOCKS: u64 = 2048;
/// Long enough for what is to come, and for what is not to come.
const SOON: Duration = Duration::from_secs(10);
const NEVER: Duration = Duration::from_millis(100);
/// After a second of use, memory that was taken away is given up.
const REVOKED: Duration = Duration::from_secs(4);

/// Unit 0 of a target.
const fn unit(target: u8) -> [u8; 8] {
    [1, target, 0x40, 0, 0, 0, 0, 0]
}

fn cdb_16(opcode: u8, lba: u64, blocks: u32) -> Vec<u8> {
    [&[opcode, 0][..], &lba.to_be_bytes(), &blocks.to_be_bytes(), &[0, 0]].concat()
}

/// The daemon's side.
struct Host {
    directory: tempfile::TempDir,
    env: Env,
    controllers: Rc<Controllers>,
    scsi: ScsiControllers,
    /// The last to go.
    _reactors: Rc<Reactors>,
}

impl Host {
    /// With disks `m0`, `m1` and so on in memory.
    fn new(disks: u32) -> Self {
        aryk_dma::install_fault_handler();
        let env = Env::default();
        for i in 0..disks {
            let identity = Identity::named(format!("m{i}"));
            let (block_size, physical_block_size) = (512, 512);
            let config = malloc::Config {
                identity,
                block_size,
                physical_block_size,
                blocks: BLOCKS,
                optimal_io_blocks: 0,
            };
            malloc::create(&env, config).expect("a host of ours");
        }
        let options = ReactorOptions {
            cores: "0x3".parse::<CoreSet>().expect("a host of ours"),
            policy: SleepPolicy::Adaptive,
            engine: Engine::Auto,
            watchdog: Duration::from_secs(60),
        };
        let reactors = Rc::new(Reactors::start(&options).expect("a host of ours"));
        let directory = tempfile::tempdir().expect("a host of ours");
        let (registry, memory) = (Arc::clone(env.registry()), env.registry().memory().clone());
        let controllers = Rc::new(Controllers::new(directory.path(), 1024, memory, Rc::clone(&reactors)));
        let scsi = ScsiControllers::new(Rc::clone(&controllers), registry);
        Self { directory, env, controllers, scsi, _reactors: reactors }
    }

    fn create(&self, name: &str, delay: bool) -> Result<(), ControllerError> {
        let link = Link::Listen(SocketOptions::default());
        self.scsi.create(Options { name: name.to_owned(), cores: None, queues: 4, link, delay }, None)
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    async fn guest(&self, name: &str, format: Format) -> Guest {
        let socket = self.socket(name);
        apart(move || Guest::connect(&socket, format, false)).await
    }
}

/// Runs what blocks on a thread of its own, as a guest is on one.
async fn apart<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = oneshot::channel();
    let thread = std::thread::spawn(move || drop(sender.send(f())));
    let result = receiver.await;
    let ended = thread.join();
    result.unwrap_or_else(|_| std::panic::resume_unwind(ended.expect_err("it has ended without a result")))
}

/// Runs what a guest does, and gives the guest back.
async fn with<T: Send + 'static>(
    mut guest: Guest,
    f: impl FnOnce(&mut Guest) -> T + Send + 'static,
) -> (Guest, T) {
    apart(move || {
        let result = f(&mut guest);
        (guest, result)
    })
    .await
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a host of ours");
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

/// The unit is new: that is what the first command is told.
fn greet(guest: &mut Guest, target: u8) {
    let first = guest.command(unit(target), &[0; 6], &[], 0);
    assert_eq!((first.response, first.status, first.key_and_code()), (0, 2, (6, 0x29, 0)));
    assert_eq!(first.written, 108);
    let second = guest.command(unit(target), &[0; 6], &[], 0);
    assert_eq!((second.response, second.status, second.sense.len()), (0, 0, 0));
}

#[test]
fn commands_go_to_their_targets_in_both_formats() {
    for format in [Format::Split, Format::Packed] {
        run(async move {
            let host = Host::new(2);
            host.create("vm", false).unwrap();
            assert_eq!(host.scsi.add_target("vm", Some(0), "m0").await.unwrap(), 0);
            assert_eq!(host.scsi.add_target("vm", Some(5), "m1").await.unwrap(), 5);
            let guest = host.guest("vm", format).await;
            let (guest, ()) = with(guest, |guest| {
                let config = guest.config();
                assert_eq!((config[0], config[20], config[24], config[30]), (4, 96, 32, 7));
                [0, 5].into_iter().for_each(|target| greet(guest, target));
                let data: Vec<u8> = (0..8192).map(|i| (i / 512 + i % 253) as u8).collect();
                let write = guest.command(unit(5), &cdb_16(0x8a, 100, 16), &data, 0);
                assert_eq!((write.response, write.status, write.residual, write.written), (0, 0, 0, 108));
                let read = guest.command(unit(5), &cdb_16(0x88, 100, 16), &[], 8192);
                assert_eq!((read.response, read.status, read.written), (0, 0, 108 + 8192));
                assert_eq!(read.data, data);
                let other = guest.command(unit(0), &cdb_16(0x88, 100, 16), &[], 8192);
                assert_eq!(other.data, [0; 8192]);
                // More room than data; fewer data than blocks.
                let read = guest.command(unit(5), &cdb_16(0x88, 100, 1), &[], 1000);
                assert_eq!((read.status, read.residual, read.written), (0, 488, 108 + 512));
                let short = guest.command(unit(5), &cdb_16(0x8a, 100, 2), &data[..600], 0);
                assert_eq!((short.response, short.residual), (1, 600));
                let beyond = guest.command(unit(5), &cdb_16(0x88, BLOCKS, 1), &[], 512);
                assert_eq!((beyond.response, beyond.status, beyond.key_and_code()), (0, 2, (5, 0x21, 0)));
                assert_eq!(beyond.residual, 512);
            })
            .await;
            assert_eq!(host.controllers.list()[0].running.len(), 3);
            apart(move || drop(guest)).await;
            host.controllers.delete_all().await;
        });
    }
}

#[test]
fn what_is_not_there_answers_so() {
    run(async {
        let host = Host::new(1);
        host.create("vm", false).unwrap();
        host.scsi.add_target("vm", None, "m0").await.unwrap();
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, |guest| {
            for address in [unit(1), unit(8), [0; 8], [2, 0, 0, 0, 0, 0, 0, 0], [0xc1, 1, 0, 0, 0, 0, 0, 0]] {
                let answer = guest.command(address, &[0x12, 0, 0, 0, 36, 0], &[], 36);
                assert_eq!((answer.response, answer.residual), (3, 36), "{address:?}");
            }
            let other_unit = [1, 0, 0x40, 1, 0, 0, 0, 0];
            let inquiry = guest.command(other_unit, &[0x12, 0, 0, 0, 36, 0], &[], 36);
            assert_eq!((inquiry.response, inquiry.status, inquiry.data[0]), (0, 0, 0x7f));
            let ready = guest.command(other_unit, &[0; 6], &[], 0);
            assert_eq!((ready.status, ready.key_and_code()), (2, (5, 0x25, 0)));
            assert_eq!(guest.manage(5, other_unit, 0), 12);
            assert_eq!(guest.manage(5, unit(3), 0), 3);
            assert_eq!(guest.manage(99, unit(0), 0), 11);
            assert_eq!(guest.manage(0, unit(0), 12345), 0, "what is not there is aborted");
            // No place for an answer; then it goes on.
            guest.offer(REQUEST, 3, &[(0, 51, false), (512, 107, true)]);
            assert_eq!(guest.take(REQUEST, SOON), Some((3, 0)));
            guest.offer(REQUEST, 3, &[(0, 50, false), (512, 108, true)]);
            assert_eq!(guest.take(REQUEST, SOON), Some((3, 108)));
            greet(guest, 0);
        })
        .await;
        assert_eq!(host.controllers.list()[0].unanswerable, 1);
        drop(guest);
        host.controllers.delete_all().await;
    });
}

#[test]
fn disks_come_and_go_and_grow() {
    run(async {
        let host = Host::new(2);
        host.create("vm", false).unwrap();
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, |guest| {
            (0..4).for_each(|slot| guest.refill(slot));
            assert_eq!(guest.command(unit(2), &[0; 6], &[], 0).response, 3);
        })
        .await;
        host.scsi.add_target("vm", Some(2), "m0").await.unwrap();
        assert!(matches!(host.scsi.add_target("vm", Some(2), "m1").await, Err(Error::Taken(2))));
        let (guest, ()) = with(guest, |guest| {
            assert_eq!(guest.event(SOON), Some((1, [1, 2, 0, 0, 0, 0, 0, 0], 1)), "rescan");
            greet(guest, 2);
        })
        .await;
        host.env.registry().resized("m0", BLOCKS / 2).unwrap();
        let (guest, ()) = with(guest, |guest| {
            assert_eq!(guest.event(SOON), Some((3, [1, 2, 0, 0, 0, 0, 0, 0], 0x092a)), "its capacity");
            let told = guest.command(unit(2), &cdb_16(0x88, 0, 1), &[], 512);
            assert_eq!((told.status, told.key_and_code()), (2, (6, 0x2a, 9)));
            let capacity = guest.command(unit(2), &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8);
            assert_eq!(capacity.data[..4], (BLOCKS as u32 / 2 - 1).to_be_bytes());
            guest.refill(0);
        })
        .await;
        host.env.registry().changed("m0").await.unwrap();
        let (guest, ()) = with(guest, |guest| {
            assert_eq!(guest.event(SOON), Some((3, [1, 2, 0, 0, 0, 0, 0, 0], 0x012a)), "its mode parameters");
            let told = guest.command(unit(2), &cdb_16(0x88, 0, 1), &[], 512);
            assert_eq!((told.status, told.key_and_code()), (2, (6, 0x2a, 1)));
        })
        .await;
        host.scsi.remove_target("vm", 2).await.unwrap();
        assert!(matches!(host.scsi.remove_target("vm", 2).await, Err(Error::Empty(2))));
        let (guest, ()) = with(guest, |guest| {
            assert_eq!(guest.event(SOON), Some((1, [1, 2, 0, 0, 0, 0, 0, 0], 2)), "removed");
            assert_eq!(guest.command(unit(2), &[0; 6], &[], 0).response, 3);
        })
        .await;
        // It is another disk's place then, and a disk that is deleted leaves its own.
        host.scsi.add_target("vm", Some(2), "m1").await.unwrap();
        host.env.registry().remove("m1").await.unwrap();
        let (guest, ()) = with(guest, |guest| {
            assert_eq!(guest.event(SOON).map(|e| e.2), Some(1));
            guest.refill(0);
            assert_eq!(guest.event(SOON).map(|e| e.2), Some(2));
        })
        .await;
        assert!(host.controllers.list()[0].disks.is_empty());
        drop(guest);
        host.controllers.delete_all().await;
    });
}

/// A disk that takes its time to prepare a reactor is attached when it is ready. Until then it is nobody's, and holds nothing up.
#[test]
fn a_disk_that_prepares_holds_nothing_up() {
    run(async {
        let host = Host::new(1);
        let ready = remote::create(&host.env, "remote", BLOCKS);
        remote::create(&host.env, "lost", BLOCKS);
        host.create("vm", false).unwrap();
        let guest = host.guest("vm", Format::Split).await;
        let attaching = async {
            let attached = host.scsi.add_target("vm", None, "remote").await.unwrap();
            assert!(*ready.borrow(), "it was not ready");
            attached
        };
        let meanwhile = async {
            tokio::time::sleep(NEVER).await;
            assert!(matches!(host.scsi.add_target("vm", Some(0), "m0").await, Err(Error::Taken(0))));
            assert_eq!(host.scsi.add_target("vm", None, "m0").await.unwrap(), 1);
            let (guest, ()) = with(guest, |guest| {
                greet(guest, 1);
                assert_eq!(guest.command(unit(0), &[0; 6], &[], 0).response, 3);
            })
            .await;
            ready.send_replace(true);
            guest
        };
        let (target, guest) = tokio::join!(attaching, meanwhile);
        assert_eq!(target, 0);
        let (guest, ()) = with(guest, |guest| greet(guest, 0)).await;
        // One that is removed before it is ready is not attached.
        let removing = async {
            tokio::time::sleep(NEVER).await;
            host.env.registry().remove("lost").await
        };
        let (lost, removed) = tokio::join!(host.scsi.add_target("vm", None, "lost"), removing);
        assert!(matches!(lost, Err(Error::Open(OpenError::Removed))), "{lost:?}");
        removed.unwrap();
        assert_eq!(host.controllers.list()[0].disks.len(), 2);
        apart(move || drop(guest)).await;
        host.controllers.delete_all().await;
    });
}

/// Its event queue is never refilled while disks come and go 100 times, beside one that it goes on reading. It is told how
/// things are when it listens again, and nothing else.
#[test]
fn a_guest_that_does_not_listen_is_told_later_how_things_are() {
    run(async {
        let host = Host::new(3);
        host.create("vm", false).unwrap();
        host.scsi.add_target("vm", Some(7), "m2").await.unwrap();
        let guest = host.guest("vm", Format::Split).await;
        let (mut guest, ()) = with(guest, |guest| greet(guest, 7)).await;
        for round in 0..100 {
            host.scsi.add_target("vm", Some(1), "m0").await.unwrap();
            let reading;
            (guest, reading) = with(guest, move |guest| {
                if round == 0 {
                    assert_eq!(guest.command(unit(1), &[0; 6], &[], 0).key_and_code(), (6, 0x29, 0));
                }
                guest.command(unit(7), &cdb_16(0x88, round, 8), &[], 4096)
            })
            .await;
            assert_eq!((reading.response, reading.status, reading.residual), (0, 0, 0));
            host.scsi.remove_target("vm", 1).await.unwrap();
        }
        host.scsi.add_target("vm", Some(3), "m1").await.unwrap();
        host.env.registry().resized("m2", BLOCKS / 2).unwrap();
        let (guest, ()) = with(guest, |guest| {
            // Too small, which is no place for an event.
            guest.offer(EVENT, 9, &[(0, 8, true)]);
            assert_eq!(guest.take(EVENT, SOON), Some((9, 0)));
            let expected = [(1, 1, 2), (1, 3, 1), (3, 7, 0x092a)];
            for (event, target, reason) in expected {
                guest.refill(0);
                assert_eq!(guest.event(SOON), Some((event, [1, target, 0, 0, 0, 0, 0, 0], reason)));
            }
            guest.refill(0);
            assert_eq!(guest.event(NEVER), None);
        })
        .await;
        drop(guest);
        host.controllers.delete_all().await;
    });
}

/// A front-end that stops a VM stops its queues. The VM receives the events of that time when it continues. A driver that starts
/// again receives none of them.
#[test]
fn a_vm_that_was_stopped_is_told_what_has_happened() {
    for format in [Format::Split, Format::Packed] {
        run(async move {
            let host = Host::new(2);
            host.create("vm", false).unwrap();
            host.scsi.add_target("vm", Some(2), "m0").await.unwrap();
            let guest = host.guest("vm", format).await;
            let (guest, ()) = with(guest, |guest| {
                guest.stop(EVENT);
                guest.resume(EVENT);
                assert_eq!(guest.event(NEVER), None, "it looks for itself when it begins");
                (0..4).for_each(|slot| guest.refill(slot));
                guest.stop(EVENT);
            })
            .await;
            host.scsi.remove_target("vm", 2).await.unwrap();
            host.scsi.add_target("vm", Some(2), "m1").await.unwrap();
            host.scsi.add_target("vm", Some(6), "m0").await.unwrap();
            host.env.registry().resized("m0", BLOCKS / 2).unwrap();
            host.scsi.remove_target("vm", 6).await.unwrap();
            let (guest, ()) = with(guest, |guest| {
                guest.resume(EVENT);
                for (target, reason) in [(2, 2), (2, 1), (6, 2)] {
                    assert_eq!(guest.event(SOON), Some((1, [1, target, 0, 0, 0, 0, 0, 0], reason)));
                }
                assert_eq!(guest.event(NEVER), None);
            })
            .await;
            drop(guest);
            host.controllers.delete_all().await;
        });
    }
}

/// A host whose target 0 is a disk that never reads.
async fn stuck() -> Host {
    let host = Host::new(1);
    let config = aryk_bdev_error::Config { identity: Identity::named("stuck"), base: "m0".to_owned() };
    aryk_bdev_error::create(&host.env, config).expect("a disk of ours");
    let ops = OpSet::of(&[Op::Read]);
    let never = Injection { fault: Fault::Pending, ops, count: u32::MAX, queue_depth: 0 };
    aryk_bdev_error::inject(host.env.registry(), "stuck", never).expect("a disk of ours");
    host.create("vm", false).expect("a disk of ours");
    host.scsi.add_target("vm", Some(0), "stuck").await.expect("a disk of ours");
    host
}

#[test]
fn commands_of_a_stuck_disk_can_be_aborted() {
    run(async {
        let host = stuck().await;
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, |guest| {
            greet(guest, 0);
            (1..4).for_each(|slot| guest.submit(slot, unit(0), &cdb_16(0x88, 0, 1), &[], 512));
            assert_eq!(guest.take(REQUEST, NEVER), None);
            // QUERY TASK and QUERY TASK SET.
            let query = |guest: &mut Guest| {
                [guest.manage(6, unit(0), 1002), guest.manage(6, unit(0), 1009), guest.manage(7, unit(0), 0)]
            };
            assert_eq!(query(guest), [10, 0, 10]);
            assert_eq!(guest.manage(0, unit(0), 1002), 0);
            assert_eq!(query(guest), [0, 0, 10]);
            let (slot, written) = guest.take(REQUEST, SOON).expect("the one that was aborted");
            assert_eq!((slot, guest.answer(slot, written, 0).response), (2, 2));
            assert_eq!(guest.manage(5, unit(0), 0), 0);
            let mut slots: Vec<_> =
                (0..2).map(|_| guest.take(REQUEST, SOON).expect("the others").0).collect();
            slots.sort_unstable();
            assert_eq!(slots, [1, 3]);
            assert_eq!(query(guest), [0, 0, 0]);
            let told = guest.command(unit(0), &[0; 6], &[], 0);
            assert_eq!(told.key_and_code(), (6, 0x29, 3));
        })
        .await;
        drop(guest);
        host.controllers.delete_all().await;
    });
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a deadline is of real time")]
fn an_abortion_is_answered_though_the_store_hangs() {
    run(async {
        let host = Host::new(0);
        let hears = deaf::create(&host.env, "deaf", BLOCKS);
        host.create("vm", false).unwrap();
        host.scsi.add_target("vm", Some(0), "deaf").await.unwrap();
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, move |guest| {
            greet(guest, 0);
            guest.submit(1, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            assert_eq!(guest.take(REQUEST, NEVER), None);
            let begun = std::time::Instant::now();
            for (function, tag) in [(0, 1001), (5, 0)] {
                assert_eq!(guest.manage(function, unit(0), tag), 9, "function {function} has failed");
            }
            assert!(begun.elapsed() > Duration::from_secs(8), "each had its time");
            // What was not aborted is there, and ends when it can.
            assert_eq!(guest.manage(6, unit(0), 1001), 10);
            assert_eq!(guest.take(REQUEST, NEVER), None);
            hears.store(true, std::sync::atomic::Ordering::Relaxed);
            guest.submit(2, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            let mut both = [1, 2].map(|_| guest.take(REQUEST, SOON).expect("it hears").0);
            both.sort_unstable();
            assert_eq!(both, [1, 2]);
        })
        .await;
        apart(move || drop(guest)).await;
        host.controllers.delete_all().await;
    });
}

/// Each function that waits is looked at when a command ends, and holds memory.
#[test]
fn functions_that_wait_have_a_limit() {
    const WAITING_MAX: u16 = 64;
    run(async {
        let host = Host::new(0);
        let hears = deaf::create(&host.env, "deaf", BLOCKS);
        host.create("vm", false).unwrap();
        host.scsi.add_target("vm", Some(0), "deaf").await.unwrap();
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, move |guest| {
            greet(guest, 0);
            guest.submit(1, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            assert_eq!(guest.take(REQUEST, NEVER), None);
            (0..WAITING_MAX).for_each(|slot| guest.begin_to_manage(slot, 0, unit(0), 1001));
            guest.begin_to_manage(WAITING_MAX, 0, unit(0), 1001);
            assert_eq!(guest.managed(SOON), Some((WAITING_MAX, 9)), "it fails at once, and the others wait");
            assert_eq!(guest.managed(NEVER), None);
            hears.store(true, std::sync::atomic::Ordering::Relaxed);
            guest.submit(2, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            let mut answered: Vec<_> =
                (0..WAITING_MAX).map(|_| guest.managed(SOON).expect("it hears")).collect();
            answered.sort_unstable();
            assert_eq!(answered, (0..WAITING_MAX).map(|slot| (slot, 0)).collect::<Vec<_>>());
            assert_eq!([1, 2].map(|_| guest.take(REQUEST, SOON).is_some()), [true; 2]);
        })
        .await;
        apart(move || drop(guest)).await;
        host.controllers.delete_all().await;
    });
}

#[test]
fn memory_that_is_taken_away_is_given_up_by_what_uses_it() {
    run(async {
        let host = stuck().await;
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, |guest| {
            greet(guest, 0);
            let more = Memory::new(512).expect("memory");
            guest.share(Some(&more));
            guest.submit(1, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            guest.submit_to_more(2, unit(0), &cdb_16(0x88, 0, 1), 512);
            assert_eq!(guest.take(REQUEST, NEVER), None);
            let took = guest.share(None);
            assert!(took < REVOKED, "the disk was asked to give memory up, and did not: {took:?}");
            let (slot, written) = guest.take(REQUEST, SOON).expect("what has used it");
            let answer = guest.answer(slot, written, 0);
            assert_eq!((slot, answer.response, answer.residual, written), (2, 2, 512, ANSWER as u32));
            assert_eq!(guest.take(REQUEST, NEVER), None, "what did not use it goes on");
        })
        .await;
        drop(guest);
        host.controllers.delete_all().await;
    });
}

#[test]
fn a_detach_waits_for_nobody() {
    run(async {
        let host = stuck().await;
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, |guest| {
            greet(guest, 0);
            guest.submit(1, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            assert_eq!(guest.take(REQUEST, NEVER), None);
        })
        .await;
        let removed = tokio::time::timeout(Duration::from_secs(1), host.scsi.remove_target("vm", 0)).await;
        removed.expect("at once").unwrap();
        // Another disk may have the place while the first is not gone.
        host.scsi.add_target("vm", Some(0), "stuck").await.unwrap();
        let (guest, ()) = with(guest, |guest| {
            greet(guest, 0);
            let (slot, written) = guest.take(REQUEST, SOON).expect("it ends within its time");
            assert_eq!((slot, guest.answer(slot, written, 0).response), (1, 3));
        })
        .await;
        drop(guest);
        host.controllers.delete_all().await;
        let closed = tokio::time::timeout(SOON, host.env.registry().remove("stuck")).await;
        closed.expect("nobody has it open").unwrap();
    });
}

#[test]
fn a_queue_stops_though_its_disk_is_stuck() {
    run(async {
        let host = stuck().await;
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, |guest| {
            greet(guest, 0);
            guest.submit(1, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            assert_eq!(guest.take(REQUEST, NEVER), None);
            guest.stop(REQUEST);
            assert_eq!(guest.take(REQUEST, SOON).map(|t| t.0), Some(1));
        })
        .await;
        drop(guest);
        host.controllers.delete_all().await;
    });
}

#[test]
fn a_delayed_controller_is_reached_when_it_is_started() {
    run(async {
        let host = Host::new(1);
        host.create("vm", true).unwrap();
        assert!(matches!(host.create("vm", false), Err(ControllerError::Exists(_))));
        assert!(matches!(host.create("a/b", false), Err(ControllerError::Name(_))));
        host.scsi.add_target("vm", None, "m0").await.unwrap();
        assert!(!host.socket("vm").exists() && host.controllers.list()[0].sessions.is_none());
        host.controllers.start("vm").unwrap();
        assert!(matches!(host.controllers.start("vm"), Err(ControllerError::Started(_))));
        assert!(matches!(host.controllers.start("other"), Err(ControllerError::NotFound(_))));
        assert!(matches!(host.scsi.add_target("vm", Some(8), "m0").await, Err(Error::Target(8))));
        assert!(matches!(host.scsi.add_target("vm", None, "none").await, Err(Error::Disk(_))));
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, |guest| greet(guest, 0)).await;
        drop(guest);
        host.controllers.delete("vm").await.unwrap();
        host.env.registry().remove("m0").await.unwrap();
    });
}

/// PERSISTENT RESERVE OUT with two keys, and a type.
fn reserve(guest: &mut Guest, target: u8, action: u8, kind: u8, [key, new]: [u64; 2]) -> u8 {
    let list = [&key.to_be_bytes()[..], &new.to_be_bytes(), &[0; 8]].concat();
    guest.command(unit(target), &[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list, 0).status
}

/// A reservation is the disk's, whoever it was attached to, and by whichever target. What is fenced is over when the fence is up.
#[test]
fn a_disk_of_two_controllers_is_reserved_for_one() {
    const CONFLICT: u8 = 0x18;
    run(async {
        let host = Host::new(1);
        let config = aryk_bdev_error::Config { identity: Identity::named("disk"), base: "m0".to_owned() };
        aryk_bdev_error::create(&host.env, config).unwrap();
        for (name, target) in [("a", 0), ("b", 3)] {
            host.create(name, false).unwrap();
            host.scsi.add_target(name, Some(target), "disk").await.unwrap();
        }
        host.scsi.add_target("a", Some(5), "disk").await.unwrap();
        let (a, b) = (host.guest("a", Format::Split).await, host.guest("b", Format::Packed).await);
        let (a, ()) = with(a, |a| {
            [0, 5].into_iter().for_each(|target| greet(a, target));
            assert_eq!(reserve(a, 0, 0, 0, [0, 1]), 0);
            assert_eq!(reserve(a, 0, 1, 5, [1, 0]), 0);
            let other_target = a.command(unit(5), &cdb_16(0x8a, 0, 1), &[1; 512], 0);
            assert_eq!(other_target.status, CONFLICT, "a nexus of its own");
        })
        .await;
        let never =
            Injection { fault: Fault::Pending, ops: OpSet::of(&[Op::Write]), count: 1, queue_depth: 0 };
        aryk_bdev_error::inject(host.env.registry(), "disk", never).unwrap();
        let (a, ()) = with(a, |a| {
            a.submit(1, unit(0), &cdb_16(0x8a, 0, 1), &[1; 512], 0);
            assert_eq!(a.take(REQUEST, NEVER), None);
        })
        .await;
        let (b, ()) = with(b, |b| {
            greet(b, 3);
            assert_eq!(b.command(unit(3), &cdb_16(0x8a, 0, 1), &[2; 512], 0).status, CONFLICT);
            assert_eq!(b.command(unit(3), &cdb_16(0x88, 0, 1), &[], 512).status, 0);
            assert_eq!(reserve(b, 3, 0, 0, [0, 2]), 0);
            assert_eq!(reserve(b, 3, 4, 5, [2, 1]), 0, "PREEMPT");
        })
        .await;
        let (a, ()) = with(a, |a| {
            let (slot, written) = a.take(REQUEST, SOON).expect("what was in flight is over");
            assert_eq!((slot, a.answer(slot, written, 0).status), (1, CONFLICT));
            let told = a.command(unit(0), &[0; 6], &[], 0);
            assert_eq!(told.key_and_code(), (6, 0x2a, 5), "registrations preempted");
            assert_eq!(a.command(unit(0), &cdb_16(0x8a, 0, 1), &[1; 512], 0).status, CONFLICT);
        })
        .await;
        // Another disk does not know of it, and the same one does when it comes back.
        host.scsi.remove_target("b", 3).await.unwrap();
        host.scsi.add_target("b", Some(3), "disk").await.unwrap();
        let (b, ()) = with(b, |b| {
            greet(b, 3);
            assert_eq!(b.command(unit(3), &cdb_16(0x8a, 0, 1), &[2; 512], 0).status, 0);
        })
        .await;
        apart(move || drop((a, b))).await;
        host.controllers.delete_all().await;
    });
}

/// What is given up while its queue stops stays in flight, and a successor does it again: but not what cannot be done twice.
#[test]
fn what_cannot_be_done_twice_is_not() {
    for format in [Format::Split, Format::Packed] {
        run(async move {
            let host = Host::new(1);
            let config = aryk_bdev_error::Config { identity: Identity::named("disk"), base: "m0".to_owned() };
            aryk_bdev_error::create(&host.env, config).unwrap();
            let ops = OpSet::of(&[Op::Read, Op::Write]);
            let never = Injection { fault: Fault::Pending, ops, count: 1, queue_depth: 0 };
            aryk_bdev_error::inject(host.env.registry(), "disk", never).unwrap();
            host.create("vm", false).unwrap();
            host.scsi.add_target("vm", Some(0), "disk").await.unwrap();
            let socket = host.socket("vm");
            let guest = apart(move || Guest::connect(&socket, format, true)).await;
            let (guest, ()) = with(guest, |guest| {
                greet(guest, 0);
                // COMPARE AND WRITE reads first; a WRITE is besides it.
                let mut compare_and_write = cdb_16(0x89, 0, 0);
                compare_and_write[13] = 1;
                guest.submit(1, unit(0), &compare_and_write, &[[0; 512], [7; 512]].concat(), 0);
                guest.submit(2, unit(0), &cdb_16(0x8a, 8, 1), &[8; 512], 0);
                assert_eq!(guest.take(REQUEST, NEVER), None);
                guest.stop(REQUEST);
                assert_eq!(guest.take(REQUEST, NEVER), None, "they stay in flight");
                guest.resume(REQUEST);
                let mut ends: Vec<_> = (0..2)
                    .map(|_| {
                        let (slot, written) = guest.take(REQUEST, SOON).expect("a successor takes them");
                        let answer = guest.answer(slot, written, 0);
                        let told = (answer.status == 2).then(|| answer.key_and_code());
                        (slot, answer.status, told)
                    })
                    .collect();
                ends.sort_unstable();
                assert_eq!(ends, [(1, 2, Some((6, 0x29, 0))), (2, 0, None)]);
                let swapped = guest.command(unit(0), &compare_and_write, &[[0; 512], [7; 512]].concat(), 0);
                assert_eq!(swapped.status, 0, "what is new is done");
            })
            .await;
            apart(move || drop(guest)).await;
            host.controllers.delete_all().await;
        });
    }
}

/// Every write to a guest's memory is noted while it migrates: answers, data, responses, events, and the rings.
#[test]
fn what_is_written_is_noted() {
    for format in [Format::Split, Format::Packed] {
        run(async move {
            let host = Host::new(1);
            host.create("vm", false).unwrap();
            let guest = host.guest("vm", format).await;
            let (guest, log) = with(guest, |guest| {
                guest.refill(0);
                guest.log()
            })
            .await;
            host.scsi.add_target("vm", Some(0), "m0").await.unwrap();
            let (guest, ()) = with(guest, move |guest| {
                assert_eq!(guest.event(SOON).map(|e| e.2), Some(1));
                assert!(log.take(guest.pages(EVENT, 0, 16)) && log.take(guest.used_page(EVENT)));
                greet(guest, 0);
                let answer = guest.pages(REQUEST, ANSWER_AT, ANSWER as u64);
                let data = guest.pages(REQUEST, DATA_AT, 16_384);
                assert!(log.take(answer.clone()) && log.take(guest.used_page(REQUEST)));
                assert!(!log.take(data.clone()), "nothing has come yet");
                let read = guest.command(unit(0), &cdb_16(0x88, 0, 32), &[], 16_384);
                assert_eq!(read.status, 0);
                assert!(log.take(answer.clone()) && log.take(data.clone()));
                assert!(!log.take(guest.pages(REQUEST, DATA_AT + 16_384, 4096)), "this was not written");
                // An answer from memory of ours, and one of a target that is not there.
                let inquiry = guest.command(unit(0), &[0x12, 0, 0, 0, 96, 0], &[], 96);
                assert_eq!((inquiry.status, log.take(data.start..data.start + 1)), (0, true));
                assert!(log.take(answer.clone()));
                assert_eq!(guest.command(unit(3), &[0; 6], &[], 0).response, 3);
                assert!(log.take(answer));
                assert_eq!(guest.manage(0, unit(0), 1), 0);
                assert!(log.take(guest.pages(CONTROL, 64, 1)) && log.take(guest.used_page(CONTROL)));
            })
            .await;
            apart(move || drop(guest)).await;
            host.controllers.delete_all().await;
        });
    }
}
