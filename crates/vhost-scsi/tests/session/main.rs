//! Tests of controllers from the guest's side: over a socket, with rings of both formats, while disks are attached and
//! detached.

mod guest;
mod hung;
mod registered;
mod remote;

use aryk_bdev::{Blocks, Env, Identity, Op, OpSet, OpenError};
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

const BLOCKS: Blocks = Blocks(2048);
/// How long a test waits for an event that must come, and for one that must not come.
const SOON: Duration = Duration::from_secs(10);
const BRIEF: Duration = Duration::from_millis(100);
/// The back-end aborts requests that use removed guest memory after a second.
const REVOKED: Duration = Duration::from_secs(4);

/// Unit 0 of a target.
const fn unit(target: u8) -> [u8; 8] {
    [1, target, 0x40, 0, 0, 0, 0, 0]
}

fn cdb_16(opcode: u8, lba: u64, blocks: u32) -> Vec<u8> {
    [&[opcode, 0][..], &lba.to_be_bytes(), &blocks.to_be_bytes(), &[0, 0]].concat()
}

/// The back-end.
struct Host {
    directory: tempfile::TempDir,
    env: Env,
    controllers: Rc<Controllers>,
    scsi: ScsiControllers,
    /// Dropped last.
    _reactors: Rc<Reactors>,
}

impl Host {
    /// A back-end with malloc disks `m0`, `m1` and so on.
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
                optimal_io_blocks: Blocks::ZERO,
            };
            malloc::create(&env, config).expect("a test daemon");
        }
        let options = ReactorOptions {
            cores: "0x3".parse::<CoreSet>().expect("a test daemon"),
            policy: SleepPolicy::Adaptive,
            engine: Engine::Auto,
            watchdog: Duration::from_secs(60),
        };
        let reactors = Rc::new(Reactors::start(&options).expect("a test daemon"));
        let directory = tempfile::tempdir().expect("a test daemon");
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
        run_blocking(move || Guest::connect(&socket, format, false)).await
    }
}

/// Runs blocking code on its own thread, as a guest would run.
async fn run_blocking<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = oneshot::channel();
    let thread = std::thread::spawn(move || drop(sender.send(f())));
    let result = receiver.await;
    let ended = thread.join();
    result.unwrap_or_else(|_| std::panic::resume_unwind(ended.expect_err("it has ended without a result")))
}

/// Runs blocking code of a guest and returns the guest.
async fn with<T: Send + 'static>(
    mut guest: Guest,
    f: impl FnOnce(&mut Guest) -> T + Send + 'static,
) -> (Guest, T) {
    run_blocking(move || {
        let result = f(&mut guest);
        (guest, result)
    })
    .await
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a test daemon");
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

/// The first command to a new unit reports a unit attention.
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
                // A buffer longer than the data; a buffer shorter than the blocks.
                let read = guest.command(unit(5), &cdb_16(0x88, 100, 1), &[], 1000);
                assert_eq!((read.status, read.residual, read.written), (0, 488, 108 + 512));
                let short = guest.command(unit(5), &cdb_16(0x8a, 100, 2), &data[..600], 0);
                assert_eq!((short.response, short.residual), (1, 600));
                let beyond = guest.command(unit(5), &cdb_16(0x88, BLOCKS.0, 1), &[], 512);
                assert_eq!((beyond.response, beyond.status, beyond.key_and_code()), (0, 2, (5, 0x21, 0)));
                assert_eq!(beyond.residual, 512);
            })
            .await;
            assert_eq!(host.controllers.list()[0].running.len(), 3);
            run_blocking(move || drop(guest)).await;
            host.controllers.delete_all().await;
        });
    }
}

#[test]
fn missing_targets_and_units_are_reported() {
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
            assert_eq!(guest.run_tmf(5, other_unit, 0), 12);
            assert_eq!(guest.run_tmf(5, unit(3), 0), 3);
            assert_eq!(guest.run_tmf(99, unit(0), 0), 11);
            assert_eq!(guest.run_tmf(0, unit(0), 12345), 0, "aborting an unknown command succeeds");
            // A chain without room for an answer; the queue continues after it.
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
fn attach_detach_and_resize_send_events() {
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
            assert_eq!(guest.event(SOON), Some((3, [1, 2, 0, 0, 0, 0, 0, 0], 0x092a)), "capacity changed");
            let attention = guest.command(unit(2), &cdb_16(0x88, 0, 1), &[], 512);
            assert_eq!((attention.status, attention.key_and_code()), (2, (6, 0x2a, 9)));
            let capacity = guest.command(unit(2), &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8);
            assert_eq!(capacity.data[..4], (BLOCKS.0 as u32 / 2 - 1).to_be_bytes());
            guest.refill(0);
        })
        .await;
        host.env.registry().changed("m0").await.unwrap();
        let (guest, ()) = with(guest, |guest| {
            assert_eq!(
                guest.event(SOON),
                Some((3, [1, 2, 0, 0, 0, 0, 0, 0], 0x012a)),
                "mode parameters changed"
            );
            let attention = guest.command(unit(2), &cdb_16(0x88, 0, 1), &[], 512);
            assert_eq!((attention.status, attention.key_and_code()), (2, (6, 0x2a, 1)));
        })
        .await;
        host.scsi.remove_target("vm", 2).await.unwrap();
        assert!(matches!(host.scsi.remove_target("vm", 2).await, Err(Error::Empty(2))));
        let (guest, ()) = with(guest, |guest| {
            assert_eq!(guest.event(SOON), Some((1, [1, 2, 0, 0, 0, 0, 0, 0], 2)), "removed");
            assert_eq!(guest.command(unit(2), &[0; 6], &[], 0).response, 3);
        })
        .await;
        // Another disk takes the target, and deleting that disk frees the target again.
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

/// A disk that needs time to prepare a reactor is attached when it is ready. Until then the target reports no disk, and the
/// guest's other disks work.
#[test]
fn a_slow_prepare_delays_only_its_own_attach() {
    run(async {
        let host = Host::new(1);
        let ready = remote::create(&host.env, "remote", BLOCKS);
        remote::create(&host.env, "lost", BLOCKS);
        host.create("vm", false).unwrap();
        let guest = host.guest("vm", Format::Split).await;
        let attaching = async {
            let attached = host.scsi.add_target("vm", None, "remote").await.unwrap();
            assert!(*ready.borrow(), "the disk was attached before it was ready");
            attached
        };
        let meanwhile = async {
            tokio::time::sleep(BRIEF).await;
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
        // A disk that is removed before it is ready is not attached.
        let removing = async {
            tokio::time::sleep(BRIEF).await;
            host.env.registry().remove("lost").await
        };
        let (lost, removed) = tokio::join!(host.scsi.add_target("vm", None, "lost"), removing);
        assert!(matches!(lost, Err(Error::Open(OpenError::Removed))), "{lost:?}");
        removed.unwrap();
        assert_eq!(host.controllers.list()[0].disks.len(), 2);
        run_blocking(move || drop(guest)).await;
        host.controllers.delete_all().await;
    });
}

/// The guest never refills its event queue while a disk is attached and detached 100 times, and continues reading from another
/// disk. When it refills the queue, it receives only the events that describe the current state.
#[test]
fn a_guest_with_an_empty_event_queue_later_receives_the_current_state() {
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
            // This buffer is too small for an event.
            guest.offer(EVENT, 9, &[(0, 8, true)]);
            assert_eq!(guest.take(EVENT, SOON), Some((9, 0)));
            let expected = [(1, 1, 2), (1, 3, 1), (3, 7, 0x092a)];
            for (event, target, reason) in expected {
                guest.refill(0);
                assert_eq!(guest.event(SOON), Some((event, [1, target, 0, 0, 0, 0, 0, 0], reason)));
            }
            guest.refill(0);
            assert_eq!(guest.event(BRIEF), None);
        })
        .await;
        drop(guest);
        host.controllers.delete_all().await;
    });
}

/// A front-end that pauses a VM stops its queues. When the VM continues, it receives the events of that time. A driver that
/// starts again receives none of them.
#[test]
fn a_paused_vm_receives_its_events_when_it_continues() {
    for format in [Format::Split, Format::Packed] {
        run(async move {
            let host = Host::new(2);
            host.create("vm", false).unwrap();
            host.scsi.add_target("vm", Some(2), "m0").await.unwrap();
            let guest = host.guest("vm", format).await;
            let (guest, ()) = with(guest, |guest| {
                guest.stop(EVENT);
                guest.resume(EVENT);
                assert_eq!(guest.event(BRIEF), None, "a driver that starts scans the targets itself");
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
                assert_eq!(guest.event(BRIEF), None);
            })
            .await;
            drop(guest);
            host.controllers.delete_all().await;
        });
    }
}

/// A back-end whose target 0 is a disk that never completes a read.
async fn stuck() -> Host {
    let host = Host::new(1);
    let config = aryk_bdev_error::Config { identity: Identity::named("stuck"), base: "m0".to_owned() };
    aryk_bdev_error::create(&host.env, config).expect("a test disk");
    let ops = OpSet::of(&[Op::Read]);
    let never = Injection { fault: Fault::Pending, ops, count: u32::MAX, queue_depth: 0 };
    aryk_bdev_error::inject(host.env.registry(), "stuck", never).expect("a test disk");
    host.create("vm", false).expect("a test disk");
    host.scsi.add_target("vm", Some(0), "stuck").await.expect("a test disk");
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
            assert_eq!(guest.take(REQUEST, BRIEF), None);
            // QUERY TASK and QUERY TASK SET.
            let query = |guest: &mut Guest| {
                [
                    guest.run_tmf(6, unit(0), 1002),
                    guest.run_tmf(6, unit(0), 1009),
                    guest.run_tmf(7, unit(0), 0),
                ]
            };
            assert_eq!(query(guest), [10, 0, 10]);
            assert_eq!(guest.run_tmf(0, unit(0), 1002), 0);
            assert_eq!(query(guest), [0, 0, 10]);
            let (slot, written) = guest.take(REQUEST, SOON).expect("the aborted command");
            assert_eq!((slot, guest.answer(slot, written, 0).response), (2, 2));
            assert_eq!(guest.run_tmf(5, unit(0), 0), 0);
            let mut slots: Vec<_> =
                (0..2).map(|_| guest.take(REQUEST, SOON).expect("the other commands").0).collect();
            slots.sort_unstable();
            assert_eq!(slots, [1, 3]);
            assert_eq!(query(guest), [0, 0, 0]);
            let attention = guest.command(unit(0), &[0; 6], &[], 0);
            assert_eq!(attention.key_and_code(), (6, 0x29, 3));
        })
        .await;
        drop(guest);
        host.controllers.delete_all().await;
    });
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a deadline is of real time")]
fn an_abort_fails_at_its_deadline_if_the_store_hangs() {
    run(async {
        let host = Host::new(0);
        let resumed = hung::create(&host.env, "hung", BLOCKS);
        host.create("vm", false).unwrap();
        host.scsi.add_target("vm", Some(0), "hung").await.unwrap();
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, move |guest| {
            greet(guest, 0);
            guest.submit(1, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            assert_eq!(guest.take(REQUEST, BRIEF), None);
            let begun = std::time::Instant::now();
            for (function, tag) in [(0, 1001), (5, 0)] {
                assert_eq!(guest.run_tmf(function, unit(0), tag), 9, "function {function} has failed");
            }
            assert!(begun.elapsed() > Duration::from_secs(8), "each function waited for its deadline");
            // The read whose abort timed out is still in flight, and ends when the store allows it.
            assert_eq!(guest.run_tmf(6, unit(0), 1001), 10);
            assert_eq!(guest.take(REQUEST, BRIEF), None);
            resumed.store(true, std::sync::atomic::Ordering::Relaxed);
            guest.submit(2, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            let mut both = [1, 2].map(|_| guest.take(REQUEST, SOON).expect("the disk has resumed").0);
            both.sort_unstable();
            assert_eq!(both, [1, 2]);
        })
        .await;
        run_blocking(move || drop(guest)).await;
        host.controllers.delete_all().await;
    });
}

/// Each waiting function is checked whenever a command ends, and uses memory, so their number has a limit.
#[test]
fn the_number_of_waiting_task_management_functions_is_limited() {
    const WAITING_MAX: u16 = 64;
    run(async {
        let host = Host::new(0);
        let resumed = hung::create(&host.env, "hung", BLOCKS);
        host.create("vm", false).unwrap();
        host.scsi.add_target("vm", Some(0), "hung").await.unwrap();
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, move |guest| {
            greet(guest, 0);
            guest.submit(1, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            assert_eq!(guest.take(REQUEST, BRIEF), None);
            (0..WAITING_MAX).for_each(|slot| guest.submit_tmf(slot, 0, unit(0), 1001));
            guest.submit_tmf(WAITING_MAX, 0, unit(0), 1001);
            assert_eq!(
                guest.next_tmf_answer(SOON),
                Some((WAITING_MAX, 9)),
                "the function beyond the limit fails at once"
            );
            assert_eq!(guest.next_tmf_answer(BRIEF), None);
            resumed.store(true, std::sync::atomic::Ordering::Relaxed);
            guest.submit(2, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            let mut answered: Vec<_> = (0..WAITING_MAX)
                .map(|_| guest.next_tmf_answer(SOON).expect("the disk has resumed"))
                .collect();
            answered.sort_unstable();
            assert_eq!(answered, (0..WAITING_MAX).map(|slot| (slot, 0)).collect::<Vec<_>>());
            assert_eq!([1, 2].map(|_| guest.take(REQUEST, SOON).is_some()), [true; 2]);
        })
        .await;
        run_blocking(move || drop(guest)).await;
        host.controllers.delete_all().await;
    });
}

#[test]
fn commands_that_use_removed_memory_are_aborted() {
    run(async {
        let host = stuck().await;
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, |guest| {
            greet(guest, 0);
            let more = Memory::new(512).expect("memory");
            guest.share(Some(&more));
            guest.submit(1, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            guest.submit_to_more(2, unit(0), &cdb_16(0x88, 0, 1), 512);
            assert_eq!(guest.take(REQUEST, BRIEF), None);
            let took = guest.share(None);
            assert!(took < REVOKED, "the request that used the memory was not aborted: {took:?}");
            let (slot, written) = guest.take(REQUEST, SOON).expect("the read that used the removed memory");
            let answer = guest.answer(slot, written, 0);
            assert_eq!((slot, answer.response, answer.residual, written), (2, 2, 512, ANSWER as u32));
            assert_eq!(guest.take(REQUEST, BRIEF), None, "the other read stays in flight");
        })
        .await;
        drop(guest);
        host.controllers.delete_all().await;
    });
}

#[test]
fn a_detach_does_not_wait_for_commands_in_flight() {
    run(async {
        let host = stuck().await;
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, |guest| {
            greet(guest, 0);
            guest.submit(1, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            assert_eq!(guest.take(REQUEST, BRIEF), None);
        })
        .await;
        let removed = tokio::time::timeout(Duration::from_secs(1), host.scsi.remove_target("vm", 0)).await;
        removed.expect("the detach does not wait").unwrap();
        // Another disk can be attached to the target while the first disk still has a command in flight.
        host.scsi.add_target("vm", Some(0), "stuck").await.unwrap();
        let (guest, ()) = with(guest, |guest| {
            greet(guest, 0);
            let (slot, written) = guest.take(REQUEST, SOON).expect("aborted after the grace period");
            assert_eq!((slot, guest.answer(slot, written, 0).response), (1, 3));
        })
        .await;
        drop(guest);
        host.controllers.delete_all().await;
        let closed = tokio::time::timeout(SOON, host.env.registry().remove("stuck")).await;
        closed.expect("no opener is left").unwrap();
    });
}

#[test]
fn a_queue_stops_although_its_disk_is_stuck() {
    run(async {
        let host = stuck().await;
        let guest = host.guest("vm", Format::Split).await;
        let (guest, ()) = with(guest, |guest| {
            greet(guest, 0);
            guest.submit(1, unit(0), &cdb_16(0x88, 0, 1), &[], 512);
            assert_eq!(guest.take(REQUEST, BRIEF), None);
            guest.stop(REQUEST);
            assert_eq!(guest.take(REQUEST, SOON).map(|t| t.0), Some(1));
        })
        .await;
        drop(guest);
        host.controllers.delete_all().await;
    });
}

#[test]
fn a_delayed_controller_accepts_sessions_after_start() {
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

/// Sends PERSISTENT RESERVE OUT with two keys and a type. Returns the status.
fn reserve(guest: &mut Guest, target: u8, action: u8, kind: u8, [key, new]: [u64; 2]) -> u8 {
    let list = [&key.to_be_bytes()[..], &new.to_be_bytes(), &[0; 8]].concat();
    guest.command(unit(target), &[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list, 0).status
}

/// A reservation belongs to the disk, whichever controller and target it was attached to. PREEMPT returns after the preempted
/// nexus' commands have ended.
#[test]
fn reservations_hold_between_controllers_and_targets() {
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
            assert_eq!(other_target.status, CONFLICT, "each target is a nexus");
        })
        .await;
        let never =
            Injection { fault: Fault::Pending, ops: OpSet::of(&[Op::Write]), count: 1, queue_depth: 0 };
        aryk_bdev_error::inject(host.env.registry(), "disk", never).unwrap();
        let (a, ()) = with(a, |a| {
            a.submit(1, unit(0), &cdb_16(0x8a, 0, 1), &[1; 512], 0);
            assert_eq!(a.take(REQUEST, BRIEF), None);
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
            let (slot, written) = a.take(REQUEST, SOON).expect("the command in flight was aborted");
            assert_eq!((slot, a.answer(slot, written, 0).status), (1, CONFLICT));
            let attention = a.command(unit(0), &[0; 6], &[], 0);
            assert_eq!(attention.key_and_code(), (6, 0x2a, 5), "registrations preempted");
            assert_eq!(a.command(unit(0), &cdb_16(0x8a, 0, 1), &[1; 512], 0).status, CONFLICT);
        })
        .await;
        // A reservation survives a detach and attach of the disk.
        host.scsi.remove_target("b", 3).await.unwrap();
        host.scsi.add_target("b", Some(3), "disk").await.unwrap();
        let (b, ()) = with(b, |b| {
            greet(b, 3);
            assert_eq!(b.command(unit(3), &cdb_16(0x8a, 0, 1), &[2; 512], 0).status, 0);
        })
        .await;
        run_blocking(move || drop((a, b))).await;
        host.controllers.delete_all().await;
    });
}

/// Commands that are aborted because their queue stops stay in flight, and the queue's successor runs them again, except those
/// that cannot be repeated.
#[test]
fn a_successor_does_not_repeat_compare_and_write() {
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
            let guest = run_blocking(move || Guest::connect(&socket, format, true)).await;
            let (guest, ()) = with(guest, |guest| {
                greet(guest, 0);
                // COMPARE AND WRITE reads first; the WRITE is the other command.
                let mut compare_and_write = cdb_16(0x89, 0, 0);
                compare_and_write[13] = 1;
                guest.submit(1, unit(0), &compare_and_write, &[[0; 512], [7; 512]].concat(), 0);
                guest.submit(2, unit(0), &cdb_16(0x8a, 8, 1), &[8; 512], 0);
                assert_eq!(guest.take(REQUEST, BRIEF), None);
                guest.stop(REQUEST);
                assert_eq!(guest.take(REQUEST, BRIEF), None, "the commands stay in flight");
                guest.resume(REQUEST);
                let mut ends: Vec<_> = (0..2)
                    .map(|_| {
                        let (slot, written) =
                            guest.take(REQUEST, SOON).expect("the successor completes them");
                        let answer = guest.answer(slot, written, 0);
                        let attention = (answer.status == 2).then(|| answer.key_and_code());
                        (slot, answer.status, attention)
                    })
                    .collect();
                ends.sort_unstable();
                assert_eq!(ends, [(1, 2, Some((6, 0x29, 0))), (2, 0, None)]);
                let swapped = guest.command(unit(0), &compare_and_write, &[[0; 512], [7; 512]].concat(), 0);
                assert_eq!(swapped.status, 0, "a new command succeeds");
            })
            .await;
            run_blocking(move || drop(guest)).await;
            host.controllers.delete_all().await;
        });
    }
}

/// During a migration, every write to guest memory is logged: answers, data, responses, events, and rings.
#[test]
fn every_write_to_guest_memory_is_logged() {
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
                assert!(!log.take(data.clone()), "no data was written yet");
                let read = guest.command(unit(0), &cdb_16(0x88, 0, 32), &[], 16_384);
                assert_eq!(read.status, 0);
                assert!(log.take(answer.clone()) && log.take(data.clone()));
                assert!(
                    !log.take(guest.pages(REQUEST, DATA_AT + 16_384, 4096)),
                    "these pages were not written"
                );
                // An INQUIRY, which is answered from the back-end's memory, and an answer for a missing target.
                let inquiry = guest.command(unit(0), &[0x12, 0, 0, 0, 96, 0], &[], 96);
                assert_eq!((inquiry.status, log.take(data.start..data.start + 1)), (0, true));
                assert!(log.take(answer.clone()));
                assert_eq!(guest.command(unit(3), &[0; 6], &[], 0).response, 3);
                assert!(log.take(answer));
                assert_eq!(guest.run_tmf(0, unit(0), 1), 0);
                assert!(log.take(guest.pages(CONTROL, 64, 1)) && log.take(guest.used_page(CONTROL)));
            })
            .await;
            run_blocking(move || drop(guest)).await;
            host.controllers.delete_all().await;
        });
    }
}
