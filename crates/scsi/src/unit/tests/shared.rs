//! Interactions of initiators that share a disk, and the state that outlives the process.

use super::*;
use crate::lun::CHANGES_MAX;
use crate::{Mode, Port, SaveRequest, SavedState, Units};
use futures_channel::mpsc;

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const REGISTER_AND_IGNORE: u8 = 6;
const REGISTER_AND_MOVE: u8 = 7;
/// Write exclusive, registrants only.
const REGISTRANTS: u8 = 5;
const EXCLUSIVE: u8 = 3;

/// `count` initiators of a disk on which requests of these kinds do not complete; the first two are registered with keys 10 and
/// 11.
pub fn stuck(ops: &[Op], count: u8) -> Initiators {
    let env = disk();
    let config = aryk_bdev_error::Config { identity: Identity::named("slow"), base: "disk".to_owned() };
    aryk_bdev_error::create(&env, config).unwrap();
    let fault = aryk_bdev_error::Fault::Pending;
    let never = Injection { fault, ops: OpSet::of(ops), count: u32::MAX, queue_depth: 0 };
    aryk_bdev_error::inject(env.registry(), "slow", never).unwrap();
    let mut all = Initiators::new(env.registry(), "slow", Access::Shared, count);
    for i in 0..count.into() {
        sense_of(&mut all, i, &[0; 6], &[]);
    }
    register(&mut all, u64::from(count.min(2)));
    all
}

fn register(all: &mut Initiators, count: u64) {
    for i in 0..count {
        assert_eq!(reserve(all, i as usize, REGISTER, 0, 0, 10 + i).status, Status::Good);
    }
}

#[test]
fn a_preemption_completes_when_the_preempted_commands_have_ended() {
    let mut all = stuck(&[Op::Read, Op::Write], 2);
    assert_eq!(reserve(&mut all, 0, RESERVE, REGISTRANTS, 10, 0).status, Status::Good);
    let mut buffers: Vec<_> = (0..3).map(|_| Buffer::new(BLOCK, 512)).collect();
    let lists: Vec<_> = buffers.iter_mut().map(Buffer::lend).collect();
    let write = all.submit(0, &cdb_16(0x8a, 0, 7, 1), lists[0], Sgl::EMPTY);
    let read = all.submit(0, &cdb_16(0x88, 0, 7, 1), Sgl::EMPTY, lists[1]);
    let own = all.submit(1, &cdb_16(0x8a, 0, 9, 1), lists[2], Sgl::EMPTY);
    for _ in 0..100 {
        all.turn();
    }
    assert_eq!((all.outcome(0, write), all.outcome(0, read)), (None, None));
    assert_eq!(reserve(&mut all, 1, PREEMPT, REGISTRANTS, 11, 10).status, Status::Good);
    let refused = all.outcome(0, write).expect("the write ends before the preemption completes");
    assert_eq!((refused.status, refused.aborted), (Status::ReservationConflict, false));
    assert_eq!((all.outcome(0, read), all.outcome(1, own)), (None, None), "both commands are still allowed");
    // After the preemption the initiator may only read.
    assert_eq!(sense_of(&mut all, 0, &[0; 6], &[]), Attention::RegistrationsPreempted.sense());
    assert_eq!(all.run(0, &cdb_16(0x8a, 0, 7, 1), &[1; BLOCK], 0).0.status, Status::ReservationConflict);
    let lun = Arc::clone(&all.lun);
    all.cx().local().spawn(async move { lun.abort(TaskFilter::All).await }).detach();
    assert!(all.wait(0, read).aborted && all.wait(1, own).aborted);
    buffers.iter_mut().for_each(Buffer::reclaim);
}

/// An initiator that loses a right also loses its commands in flight, in whichever way it loses the right; other initiators'
/// commands continue.
#[test]
fn a_reservation_waits_for_the_commands_that_it_denies() {
    let mut all = stuck(&[Op::Write], 3);
    let mut buffers: Vec<_> = (0..2).map(|_| Buffer::new(BLOCK, 512)).collect();
    let lists: Vec<_> = buffers.iter_mut().map(Buffer::lend).collect();
    let stranger = all.submit(2, &cdb_16(0x8a, 0, 7, 1), lists[0], Sgl::EMPTY);
    let registered = all.submit(1, &cdb_16(0x8a, 0, 8, 1), lists[1], Sgl::EMPTY);
    assert_eq!(reserve(&mut all, 0, RESERVE, REGISTRANTS, 10, 0).status, Status::Good);
    assert_eq!(all.outcome(2, stranger).map(|o| o.status), Some(Status::ReservationConflict));
    assert_eq!(all.outcome(1, registered), None);
    // The initiator unregisters, and so loses the right to write.
    assert_eq!(reserve(&mut all, 1, REGISTER, 0, 11, 0).status, Status::Good);
    assert_eq!(all.outcome(1, registered).map(|o| o.status), Some(Status::ReservationConflict));
    buffers.iter_mut().for_each(Buffer::reclaim);
}

#[test]
fn an_initiator_regains_its_rights_when_a_reservation_ends() {
    let mut all = initiators(3);
    register(&mut all, 2);
    let may_write = |all: &mut Initiators| {
        [0, 1, 2].map(|i| all.run(i, &cdb_16(0x8a, 0, 0, 1), &[1; BLOCK], 0).0.status == Status::Good)
    };
    assert_eq!(reserve(&mut all, 0, RESERVE, EXCLUSIVE, 10, 0).status, Status::Good);
    assert_eq!(may_write(&mut all), [true, false, false]);
    assert_eq!(reserve(&mut all, 0, RELEASE, EXCLUSIVE, 10, 0).status, Status::Good);
    assert_eq!(may_write(&mut all), [true; 3]);
    assert_eq!(reserve(&mut all, 0, RESERVE, REGISTRANTS, 10, 0).status, Status::Good);
    assert_eq!(may_write(&mut all), [true, true, false]);
    assert_eq!(reserve(&mut all, 0, RELEASE, REGISTRANTS, 10, 0).status, Status::Good);
    assert_eq!(sense_of(&mut all, 1, &[0; 6], &[]), Attention::ReservationsReleased.sense());
    assert_eq!(reserve(&mut all, 1, RESERVE, EXCLUSIVE, 11, 0).status, Status::Good);
    assert_eq!(reserve(&mut all, 0, CLEAR, 0, 10, 0).status, Status::Good);
    assert_eq!(sense_of(&mut all, 1, &[0; 6], &[]), Attention::ReservationsPreempted.sense());
    assert_eq!(may_write(&mut all), [true; 3]);
}

#[test]
fn register_and_move_moves_the_reservation() {
    let mut all = initiators(2);
    register(&mut all, 1);
    assert_eq!(reserve(&mut all, 0, RESERVE, EXCLUSIVE, 10, 0).status, Status::Good);
    let list = |initiator: u64| {
        let mut list = [&10u64.to_be_bytes()[..], &77u64.to_be_bytes(), &[0, 2, 0, 1, 0, 0, 0, 24]].concat();
        list.extend([6, 0, 0, 0]);
        list.extend(initiator.to_be_bytes());
        list.extend([0; 12]);
        list
    };
    let cdb = [0x5f, REGISTER_AND_MOVE, EXCLUSIVE, 0, 0, 0, 0, 0, 48, 0];
    assert_eq!(sense_of(&mut all, 0, &cdb, &list(0x9999)), Sense::in_list(24), "no initiator has that name");
    good(&mut all, 0, &cdb, &list(0x3001), 0);
    good(&mut all, 1, &cdb_16(0x8a, 0, 0, 1), &[1; BLOCK], 0);
    assert_eq!(all.run(0, &cdb_16(0x88, 0, 0, 1), &[], BLOCK).0.status, Status::ReservationConflict);
    assert_eq!(reserve(&mut all, 1, RELEASE, EXCLUSIVE, 77, 0).status, Status::Good);
}

#[test]
fn no_reservation_while_another_opener_writes() {
    let env = disk();
    let mut all = Initiators::new(env.registry(), "disk", Access::Shared, 1);
    sense_of(&mut all, 0, &[0; 6], &[]);
    let other = env.registry().open("disk", Access::Shared, "block", |_| ()).unwrap();
    assert_eq!(reserve(&mut all, 0, REGISTER, 0, 0, 1).sense, Sense::OPCODE);
    drop(other);
    assert_eq!(reserve(&mut all, 0, REGISTER, 0, 0, 1).status, Status::Good);
}

/// Commands that a predecessor may have carried out already (see [`crate::Command`]).
#[test]
fn only_repeatable_commands_are_repeated() {
    let mut all = initiators(1);
    register(&mut all, 1);
    let swap = [vec![0; BLOCK], vec![9; BLOCK]].concat();
    let mut compare_and_write = cdb_16(0x89, 0, 5, 0);
    compare_and_write[13] = 1;
    // The command is executed, as if the initiator had received no answer.
    good(&mut all, 0, &compare_and_write, &swap, 0);
    all.replayed = true;
    assert_eq!(sense_of(&mut all, 0, &compare_and_write, &swap), Attention::PowerOn.sense());
    assert_eq!(read(&mut all, 5, 1), [9; BLOCK]);
    let (cdb, list) = reserve_out(REGISTER, 0, 0, 10);
    assert_eq!(sense_of(&mut all, 0, &cdb, &list), Attention::PowerOn.sense());
    for (cdb, out, room) in [
        (cdb_16(0x8a, 0, 6, 1), vec![3; BLOCK], 0),
        (cdb_16(0x93, 0, 7, 2), vec![4; BLOCK], 0),
        (cdb_16(0x88, 0, 6, 1), vec![], BLOCK),
        (cdb_16(0x8f, 0x02, 6, 1), vec![3; BLOCK], 0),
        (cdb_16(0x91, 0, 0, 0), vec![], 0),
    ] {
        good(&mut all, 0, &cdb, &out, room);
    }
    all.replayed = false;
    assert_eq!(read(&mut all, 6, 3), [vec![3; BLOCK], vec![4; 2 * BLOCK]].concat());
}

/// Initiators of units whose state is saved, with state saved before.
fn with_saved(
    registry: &Registry,
    before: Option<SavedState>,
) -> (Initiators, mpsc::UnboundedReceiver<SaveRequest>) {
    let (saver, saving) = mpsc::unbounded();
    let units = Units::default();
    units.persist(saver, move |_| before.clone());
    let mut all = Initiators::of(&units, registry, "disk", Access::Shared, 2);
    for i in 0..2 {
        sense_of(&mut all, i, &[0; 6], &[]);
    }
    (all, saving)
}

/// Runs a command that saves state, which succeeds or fails; returns the outcome and the state to save.
fn run_and_save(
    (all, saving): &mut (Initiators, mpsc::UnboundedReceiver<SaveRequest>),
    (cdb, out): (&[u8], &[u8]),
    succeeds: bool,
) -> (Outcome, SavedState) {
    let mut data = Buffer::from_slice(out);
    let tag = all.submit(0, cdb, data.lend(), Sgl::EMPTY);
    for _ in 0..100 {
        all.turn();
    }
    assert_eq!(all.outcome(0, tag), None, "the command is not answered before its state is saved");
    let SaveRequest { state, done, .. } = saving.try_recv().expect("state to save");
    done.send(succeeds).unwrap();
    if !succeeds {
        // A refused change must not be found after a restart.
        for _ in 0..100 {
            all.turn();
        }
        let again = saving.try_recv().expect("the old state is saved again");
        assert_ne!(again.state, state);
        again.done.send(true).unwrap();
    }
    let outcome = all.wait(0, tag);
    data.reclaim();
    (outcome, state)
}

/// MODE SELECT of the caching page without a write cache.
fn write_through(all: &mut Initiators, save: bool) -> ([u8; 6], Vec<u8>) {
    let mut page = good(all, 0, &[0x1a, 8, 0x08, 0, 255, 0], &[], 255);
    assert_eq!((page[4] & 0x80, page[6] & 4), (0x80, 4), "the page can be saved, and the write cache is on");
    (page[0], page[6]) = (0, 0);
    ([0x15, 0x10 | u8::from(save), 0, 0, page.len() as u8, 0], page)
}

fn caches_writes(all: &mut Initiators, control: u8) -> bool {
    good(all, 0, &[0x1a, 8, control << 6 | 0x08, 0, 255, 0], &[], 255)[6] & 4 != 0
}

#[test]
fn a_saved_mode_outlives_a_restart() {
    let env = disk();
    let mut unit = with_saved(env.registry(), None);
    let (cdb, page) = write_through(&mut unit.0, true);
    let (outcome, stored) = run_and_save(&mut unit, (&cdb, &page), true);
    assert_eq!(outcome.status, Status::Good);
    let mode = Mode { write_cache: false, ..Mode::default() };
    assert_eq!((stored.mode, stored.saved, stored.is_durable()), (mode, mode, true));
    assert_eq!(sense_of(&mut unit.0, 1, &[0; 6], &[]), Attention::ModeChanged.sense());
    let lun = Arc::clone(&unit.0.lun);
    unit.0.cx().local().spawn(async move { lun.begin_reset().await.carry_out().await }).detach();
    (0..100).for_each(|_| unit.0.turn());
    assert_eq!(sense_of(&mut unit.0, 0, &[0; 6], &[]), Attention::Reset.sense());
    assert_eq!([0, 2, 3].map(|control| caches_writes(&mut unit.0, control)), [false, true, false]);
    drop(unit);
    let (mut all, _saving) = with_saved(env.registry(), Some(stored));
    assert!(!caches_writes(&mut all, 0), "after a restart");
}

#[test]
fn a_reset_undoes_a_mode_that_was_not_saved_and_raises_an_attention() {
    let mut unit = with_saved(disk().registry(), None);
    let (cdb, page) = write_through(&mut unit.0, false);
    let (_, stored) = run_and_save(&mut unit, (&cdb, &page), true);
    assert_eq!((stored.mode.write_cache, stored.saved.write_cache), (false, true));
    let lun = Arc::clone(&unit.0.lun);
    unit.0.cx().local().spawn(async move { lun.begin_reset().await.carry_out().await }).detach();
    (0..100).for_each(|_| unit.0.turn());
    unit.1.try_recv().unwrap().done.send(true).unwrap();
    (0..100).for_each(|_| unit.0.turn());
    for attention in [Attention::Reset, Attention::ModeChanged] {
        assert_eq!(
            sense_of(&mut unit.0, 0, &[0; 6], &[]),
            attention.sense(),
            "also the initiator that set the mode"
        );
    }
    assert!(caches_writes(&mut unit.0, 0));
}

#[test]
fn persistent_reservations_are_saved_before_they_take_effect() {
    let env = disk();
    let mut unit = with_saved(env.registry(), None);
    let (cdb, mut list) = reserve_out(REGISTER, 0, 0, 10);
    list[20] = 1;
    let (outcome, _) = run_and_save(&mut unit, (&cdb, &list), false);
    assert_eq!(outcome.sense, Sense::REGISTRATIONS, "the registration cannot be saved");
    let (outcome, stored) = run_and_save(&mut unit, (&cdb, &list), true);
    assert_eq!((outcome.status, stored.is_durable()), (Status::Good, true));
    let capabilities = good(&mut unit.0, 1, &[0x5e, 2, 0, 0, 0, 0, 0, 0, 255, 0], &[], 255);
    assert_eq!(capabilities[2..4], [0x01, 0x81]);
    let (cdb, list) = reserve_out(RESERVE, REGISTRANTS, 10, 0);
    let (_, stored) = run_and_save(&mut unit, (&cdb, &list), true);
    let own = Port { initiator: 0x3000, target: 1 };
    assert_eq!((&stored.registrations[..], stored.reservation), (&[(own, 10)][..], Some((own, REGISTRANTS))));
    drop(unit);
    // The next process.
    let (mut all, _saving) = with_saved(env.registry(), Some(stored));
    assert_eq!(all.run(1, &cdb_16(0x8a, 0, 0, 1), &[1; BLOCK], 0).0.status, Status::ReservationConflict);
    good(&mut all, 0, &cdb_16(0x8a, 0, 0, 1), &[1; BLOCK], 0);
    let keys = good(&mut all, 1, &[0x5e, 0, 0, 0, 0, 0, 0, 0, 255, 0], &[], 255);
    assert_eq!(keys[8..], 10u64.to_be_bytes());
}

/// The next state to save, which is then reported as saved.
fn save_next(unit: &mut (Initiators, mpsc::UnboundedReceiver<SaveRequest>)) -> SavedState {
    save_next_how(unit).0
}

/// As [`save_next`], and whether the save must outlive a loss of power.
fn save_next_how(
    (all, saving): &mut (Initiators, mpsc::UnboundedReceiver<SaveRequest>),
) -> (SavedState, bool) {
    (0..100).for_each(|_| all.turn());
    let SaveRequest { state, durable, done, .. } = saving.try_recv().expect("state to save");
    done.send(true).unwrap();
    (0..100).for_each(|_| all.turn());
    (state, durable)
}

/// A registration or a mode that outlives a loss of power does not come back after it was removed.
#[test]
fn durable_state_is_removed_durably() {
    let mut unit = with_saved(disk().registry(), None);
    let (cdb, _) = reserve_out(REGISTER_AND_IGNORE, 0, 0, 0);
    let register = |unit: &mut (Initiators, _), key, aptpl| {
        let (_, mut list) = reserve_out(REGISTER_AND_IGNORE, 0, 0, key);
        list[20] = aptpl;
        let mut list = Buffer::from_slice(&list);
        let tag = unit.0.submit(0, &cdb, list.lend(), Sgl::EMPTY);
        let (state, durable) = save_next_how(unit);
        assert_eq!(unit.0.wait(0, tag).status, Status::Good);
        list.reclaim();
        (state.registrations.len(), durable)
    };
    assert_eq!(register(&mut unit, 10, 1), (1, true));
    assert_eq!(register(&mut unit, 0, 0), (0, true), "unregistered");
    assert_eq!(register(&mut unit, 10, 0), (1, false));
    assert_eq!(register(&mut unit, 0, 0), (0, false));
    let (cdb, page) = write_through(&mut unit.0, true);
    let select = |unit: &mut (Initiators, _), is_cached: bool| {
        let mut page = page.clone();
        page[6] = u8::from(is_cached) << 2;
        let mut page = Buffer::from_slice(&page);
        let tag = unit.0.submit(0, &cdb, page.lend(), Sgl::EMPTY);
        let (state, durable) = save_next_how(unit);
        assert_eq!(unit.0.wait(0, tag).status, Status::Good);
        page.reclaim();
        (state.saved.write_cache, durable)
    };
    assert_eq!(select(&mut unit, false), (false, true));
    assert_eq!(select(&mut unit, true), (true, true), "the default mode");
    let (cdb, page) = write_through(&mut unit.0, false);
    let mut page = Buffer::from_slice(&page);
    unit.0.submit(0, &cdb, page.lend(), Sgl::EMPTY);
    assert!(!save_next_how(&mut unit).1, "the mode is not saved");
    page.reclaim();
}

/// The limit of changes in progress also holds for an initiator that aborts commands which wait for the store.
#[test]
fn aborted_changes_count_until_they_have_ended() {
    let mut unit = with_saved(disk().registry(), None);
    let mut lists: Vec<_> = [10, 11]
        .map(|key| {
            let (_, mut list) = reserve_out(REGISTER_AND_IGNORE, 0, 0, key);
            list[20] = 1;
            Buffer::from_slice(&list)
        })
        .into();
    let lent: Vec<_> = lists.iter_mut().map(Buffer::lend).collect();
    let (cdb, _) = reserve_out(REGISTER_AND_IGNORE, 0, 0, 0);
    let number = unit.0.nexus(0).number();
    let mut begun = 0;
    for _ in 0..4 {
        let tags: Vec<_> =
            (0..CHANGES_MAX as usize).map(|i| unit.0.submit(0, &cdb, lent[i % 2], Sgl::EMPTY)).collect();
        let lun = Arc::clone(&unit.0.lun);
        unit.0.cx().local().spawn(async move { lun.abort(TaskFilter::Nexus(number, None)).await }).detach();
        for tag in tags {
            let outcome = unit.0.wait(0, tag);
            begun += u32::from(outcome.aborted);
            assert!(outcome.aborted || outcome.status == Status::TaskSetFull, "{outcome:?}");
        }
    }
    assert_eq!(begun, CHANGES_MAX);
    // The other initiator's change follows the one that has begun, since those that waited have no effect; then there is room
    // again.
    let other = unit.0.submit(1, &cdb, lent[0], Sgl::EMPTY);
    assert_eq!((unit.0.outcome(1, other), save_next(&mut unit).registrations.len()), (None, 1));
    assert_eq!(save_next(&mut unit).registrations.len(), 2);
    assert_eq!(unit.0.outcome(1, other).map(|o| o.status), Some(Status::Good));
    let again = unit.0.submit(0, &cdb, lent[1], Sgl::EMPTY);
    save_next(&mut unit);
    assert_eq!(unit.0.outcome(0, again).map(|o| o.status), Some(Status::Good));
    lists.iter_mut().for_each(Buffer::reclaim);
}

/// Two commands that are started in one turn; the second one waits for the first.
fn begin(all: &mut Initiators, commands: [(usize, &[u8], &[u8]); 2]) -> ([u16; 2], [Buffer; 2]) {
    let mut buffers = commands.map(|(_, _, out)| Buffer::from_slice(out));
    let mut lists = buffers.iter_mut().map(Buffer::lend);
    let tags = commands.map(|(i, cdb, _)| all.submit(i, cdb, lists.next().expect("two"), Sgl::EMPTY));
    drop(lists);
    (tags, buffers)
}

#[test]
fn a_mode_change_of_a_preempted_initiator_is_refused() {
    let mut unit = with_saved(disk().registry(), None);
    for i in 0..2 {
        let (cdb, list) = reserve_out(REGISTER, 0, 0, 10 + i);
        let mut list = Buffer::from_slice(&list);
        let tag = unit.0.submit(i as usize, &cdb, list.lend(), Sgl::EMPTY);
        save_next(&mut unit);
        assert_eq!(unit.0.wait(i as usize, tag).status, Status::Good);
        list.reclaim();
    }
    let (select, page) = write_through(&mut unit.0, false);
    let (reserve, key) = reserve_out(RESERVE, REGISTRANTS, 10, 0);
    let (preempt, keys) = reserve_out(PREEMPT, REGISTRANTS, 10, 11);
    let (tags, mut buffers) = begin(&mut unit.0, [(0, &reserve, &key), (0, &preempt, &keys)]);
    let mut page = Buffer::from_slice(&page);
    let late = unit.0.submit(1, &select, page.lend(), Sgl::EMPTY);
    save_next(&mut unit);
    save_next(&mut unit);
    assert!(tags.map(|tag| unit.0.wait(0, tag).status).iter().all(|status| *status == Status::Good));
    assert_eq!(unit.0.outcome(1, late).map(|o| o.status), Some(Status::ReservationConflict));
    assert!(unit.1.try_recv().is_err() && caches_writes(&mut unit.0, 0));
    buffers.iter_mut().chain([&mut page]).for_each(Buffer::reclaim);
}

/// An initiator that is preempted cannot register by a command that it sent before, although REGISTER AND IGNORE EXISTING KEY
/// needs no key.
#[test]
fn a_registration_change_of_a_preempted_initiator_is_refused() {
    for action in [PREEMPT, CLEAR] {
        let mut unit = with_saved(disk().registry(), None);
        for i in 0..2 {
            let (cdb, list) = reserve_out(REGISTER, 0, 0, 10 + i);
            let mut list = Buffer::from_slice(&list);
            let tag = unit.0.submit(i as usize, &cdb, list.lend(), Sgl::EMPTY);
            save_next(&mut unit);
            assert_eq!(unit.0.wait(i as usize, tag).status, Status::Good);
            list.reclaim();
        }
        let (reserve, key) = reserve_out(RESERVE, REGISTRANTS, 10, 0);
        let (preempt, keys) = reserve_out(action, REGISTRANTS, 10, 11);
        let (tags, mut buffers) = begin(&mut unit.0, [(0, &reserve, &key), (0, &preempt, &keys)]);
        let (register, list) = reserve_out(REGISTER_AND_IGNORE, 0, 0, 12);
        let mut list = Buffer::from_slice(&list);
        let lent = list.lend();
        let late = unit.0.submit(1, &register, lent, Sgl::EMPTY);
        save_next(&mut unit);
        save_next(&mut unit);
        assert!(tags.map(|tag| unit.0.wait(0, tag).status).iter().all(|status| *status == Status::Good));
        assert_eq!(unit.0.outcome(1, late).map(|o| o.status), Some(Status::ReservationConflict));
        assert!(unit.1.try_recv().is_err());
        // The initiator may register again, after it has received the unit attention.
        assert_eq!(unit.0.run(1, &[0; 6], &[], 0).0.status, Status::CheckCondition);
        let again = unit.0.submit(1, &register, lent, Sgl::EMPTY);
        save_next(&mut unit);
        assert_eq!(unit.0.outcome(1, again).map(|o| o.status), Some(Status::Good));
        buffers.iter_mut().chain([&mut list]).for_each(Buffer::reclaim);
    }
}

/// A change that is aborted while it waits for another initiator's change has no effect when its turn comes.
#[test]
fn a_change_that_was_aborted_before_its_turn_has_no_effect() {
    let mut unit = with_saved(disk().registry(), None);
    let (select, page) = write_through(&mut unit.0, true);
    let (register, list) = reserve_out(REGISTER_AND_IGNORE, 0, 0, 10);
    let commands: [(usize, &[u8], &[u8]); 2] = [(1, &select, &page), (1, &register, &list)];
    let mut first = Buffer::from_slice(&list);
    let begun = unit.0.submit(0, &register, first.lend(), Sgl::EMPTY);
    let (tags, mut buffers) = begin(&mut unit.0, commands);
    (0..100).for_each(|_| unit.0.turn());
    let (lun, number) = (Arc::clone(&unit.0.lun), unit.0.nexus(1).number());
    unit.0.cx().local().spawn(async move { lun.abort(TaskFilter::Nexus(number, None)).await }).detach();
    assert!(tags.iter().all(|tag| unit.0.wait(1, *tag).aborted));
    let state = save_next(&mut unit);
    assert_eq!((state.registrations.len(), state.saved), (1, Mode::default()));
    assert_eq!(unit.0.wait(0, begun).status, Status::Good);
    (0..100).for_each(|_| unit.0.turn());
    assert!(unit.1.try_recv().is_err(), "nothing else is saved");
    assert!(caches_writes(&mut unit.0, 0));
    buffers.iter_mut().chain([&mut first]).for_each(Buffer::reclaim);
}

#[test]
fn concurrent_mode_selects_do_not_undo_each_other() {
    let mut unit = with_saved(disk().registry(), None);
    let (select, page) = write_through(&mut unit.0, false);
    let mut control = good(&mut unit.0, 0, &[0x1a, 8, 0x0a, 0, 255, 0], &[], 255);
    (control[0], control[4 + 2]) = (0, control[4 + 2] | 0x04);
    let select_control = [0x15, 0x10, 0, 0, control.len() as u8, 0];
    let both: [(usize, &[u8], &[u8]); 2] = [(0, &select, &page), (1, &select_control, &control)];
    let (tags, mut buffers) = begin(&mut unit.0, both);
    save_next(&mut unit);
    let both = Mode { write_cache: false, descriptors: true, ..Mode::default() };
    assert_eq!(save_next(&mut unit).mode, both);
    assert_eq!([0, 1].map(|i| unit.0.wait(i, tags[i]).status), [Status::Good; 2]);
    buffers.iter_mut().for_each(Buffer::reclaim);
}

#[test]
fn initiators_that_come_and_go_use_no_extra_memory() {
    let env = disk();
    let units = Units::default();
    let nexus = |initiator| {
        let disk = env.registry().open("disk", Access::Shared, "test", |_| ()).unwrap();
        units.nexus(disk, Port { initiator, target: 1 }, 0)
    };
    let stays = nexus(0);
    for initiator in 1..100 {
        assert_eq!(nexus(initiator).number(), 1);
    }
    assert_eq!(stays.number(), 0);
}
