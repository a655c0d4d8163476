//! A pair and a scripted controller, right or wrong.

use super::scripted::{BASE, QID, Scripted};
use super::*;

impl Scripted {
    fn read(&mut self, token: u64, now: u64) -> u16 {
        self.pair.submit(SubmissionEntry::new(2, 1), &[], token, now).unwrap()
    }

    fn complete(&mut self, cid: u16) {
        self.post(cid, QID, 0, 0);
    }

    fn reap(&mut self) -> Result<Vec<u64>, QueueError> {
        let mut tokens = Vec::new();
        self.pair.reap(u16::MAX, |completed| tokens.push(completed.token)).map(|_| tokens)
    }
}

#[test]
fn doorbells_are_rung_once_per_batch() {
    let mut rig = Scripted::new(7, 8);
    let cids: Vec<u16> = (0..5).map(|token| rig.read(token, 0)).collect();
    assert_eq!(rig.doorbells(), (0, 0));
    rig.pair.flush();
    rig.pair.flush();
    assert_eq!((rig.doorbells(), rig.pair.counters().doorbells()), ((5, 0), 1));
    cids.iter().rev().for_each(|&cid| rig.complete(cid));
    assert!(rig.pair.has_completion());
    assert_eq!(rig.reap().unwrap(), [4, 3, 2, 1, 0]);
    assert!(!rig.pair.has_completion());
    assert_eq!((rig.doorbells(), rig.pair.counters().doorbells()), ((5, 5), 2));
    assert!(rig.reap().unwrap().is_empty());
    assert_eq!(rig.pair.counters().doorbells(), 2);
}

#[test]
fn both_queues_wrap_around_with_their_phase() {
    let mut rig = Scripted::new(3, 4);
    for round in 0..100 {
        let cid = rig.read(round, 0);
        rig.pair.flush();
        let entry: SubmissionEntry = rig.device.read(usize::from((round % 4) as u16) * 64);
        assert_eq!(entry.cid(), cid);
        rig.complete(cid);
        assert_eq!(rig.reap().unwrap(), [round]);
        let next = ((round + 1) % 4) as u32;
        assert_eq!(rig.doorbells(), (next, next));
    }
}

#[test]
fn a_full_pair_refuses_and_a_limit_of_completions_is_kept() {
    let mut rig = Scripted::new(3, 4);
    let cids: Vec<u16> = (0..3).map(|token| rig.read(token, 0)).collect();
    assert_eq!(rig.pair.submit(SubmissionEntry::new(2, 1), &[], 9, 0), Err(SubmitError::Full));
    assert_eq!(
        rig.pair.submit_fused([SubmissionEntry::new(5, 1); 2], [&[], &[]], [1, 2], 0),
        Err(SubmitError::Full)
    );
    cids.iter().for_each(|&cid| rig.complete(cid));
    assert_eq!(rig.pair.reap(2, |_| ()), Ok(2));
    assert_eq!((rig.pair.in_flight(), rig.doorbells().1), (1, 2));
    assert_eq!(rig.pair.reap(2, |_| ()), Ok(1));
}

#[test]
fn fused_commands_are_neighbours_and_refused_together() {
    let mut rig = Scripted::new(3, 4);
    let bad = Piece { iova: 1, len: 512 };
    let good = Piece { iova: 4096, len: 512 };
    let entries = [SubmissionEntry::new(5, 1), SubmissionEntry::new(1, 1)];
    let refused = rig.pair.submit_fused(entries, [&[good], &[bad]], [1, 2], 0);
    assert_eq!(refused, Err(SubmitError::Unfit(Unfit::Unaligned { index: 0 })));
    assert_eq!(rig.pair.in_flight(), 0);
    rig.pair.submit_fused(entries, [&[good], &[good]], [1, 2], 0).unwrap();
    let fuses = [0, 64].map(|at| rig.device.read::<SubmissionEntry>(at).fuse());
    assert_eq!(fuses, [Some(Fuse::First), Some(Fuse::Second)]);
}

#[test]
fn impossible_completions_stop_the_pair_and_end_no_command() {
    type Post = fn(&mut Scripted, u16);
    type Expected = fn(u16) -> QueueError;
    let cases: [(Post, Expected); 5] = [
        (
            |rig, cid| rig.post(cid ^ 0x8000, QID, 0, 0),
            |cid| QueueError::UnknownCid { qid: QID, cid: cid ^ 0x8000 },
        ),
        (|rig, _| rig.post(u16::MAX, QID, 0, 0), |_| QueueError::UnknownCid { qid: QID, cid: u16::MAX }),
        (|rig, cid| rig.post(cid, 4, 0, 0), |_| QueueError::WrongQueue { qid: QID, sqid: 4 }),
        (|rig, cid| rig.post(cid, QID, 8, 0), |_| QueueError::SqHead { qid: QID, sqhd: 8, entries: 8 }),
        (
            |rig, cid| {
                rig.complete(cid);
                rig.reap().unwrap();
                rig.complete(cid);
            },
            |cid| QueueError::UnknownCid { qid: QID, cid },
        ),
    ];
    for (post, expected) in cases {
        let mut rig = Scripted::new(7, 8);
        let cid = rig.read(0, 0);
        rig.read(1, 0);
        rig.pair.flush();
        post(&mut rig, cid);
        let before = rig.pair.in_flight();
        assert_eq!(rig.reap(), Err(expected(cid)));
        assert_eq!((rig.pair.in_flight(), rig.pair.error()), (before, Some(expected(cid))));
        assert_eq!(rig.reap(), Err(expected(cid)), "until the reset");
        assert_eq!(rig.pair.submit(SubmissionEntry::new(2, 1), &[], 0, 0), Err(SubmitError::Stopped));
    }
}

#[test]
fn late_commands_are_reported_for_abort_and_then_for_reset() {
    let mut rig = Scripted::new(7, 8);
    let first = rig.read(10, 0);
    let second = rig.read(11, 60);
    let late = |rig: &mut Scripted, now| {
        let mut found = Vec::new();
        rig.pair.late(now, 8, |late| found.push((late.token, late.step, late.waited)));
        found
    };
    assert_eq!(rig.pair.next_late(), Some(100));
    assert_eq!(late(&mut rig, 99), []);
    assert_eq!(late(&mut rig, 100), [(10, LateStep::Abort, 100)]);
    assert_eq!(rig.pair.next_late(), Some(150), "the reset of the first, before the abort of the second");
    assert_eq!(late(&mut rig, 149), []);
    assert_eq!(late(&mut rig, 160), [(11, LateStep::Abort, 100), (10, LateStep::Reset, 160)]);
    assert_eq!(rig.pair.next_late(), Some(210), "the reset of the second");
    rig.complete(second);
    rig.complete(first);
    assert_eq!(rig.reap().unwrap(), [11, 10]);
    assert_eq!((late(&mut rig, 1000), rig.pair.next_late()), (vec![], None));
}

#[test]
fn a_pause_moves_deadlines_and_not_the_times_that_replay_decides_by() {
    let mut rig = Scripted::new(7, 8);
    rig.read(10, 5);
    rig.pair.late(120, 8, |late| assert_eq!(late.step, LateStep::Abort));
    rig.pair.restart_clock(300);
    assert_eq!(rig.pair.next_late(), Some(400));
    rig.pair.late(399, 8, |late| panic!("{late:?}"));
    let mut submitted = Vec::new();
    for _ in 0..2 {
        rig.reset(1000, |unfinished| {
            submitted.push(unfinished.submitted);
            Fate::Resubmit
        });
    }
    assert_eq!(submitted, [5, 5], "a write that completed at 100 forbids to submit an earlier write again");
}

#[test]
fn a_reset_submits_the_kept_commands_in_order_with_live_cids() {
    let mut rig = Scripted::new(7, 8);
    let cids: Vec<u16> = (0..6).map(|token| rig.read(token, token)).collect();
    rig.pair.flush();
    rig.pair.quiesce();
    assert_eq!(rig.pair.submit(SubmissionEntry::new(2, 1), &[], 0, 0), Err(SubmitError::Stopped));
    rig.complete(cids[1]);
    assert_eq!(rig.reap().unwrap(), [1], "what came in time is taken");
    assert_eq!(rig.doorbells().1, 0, "without a doorbell");
    let mut asked = Vec::new();
    let kept = rig.reset(1000, |unfinished| {
        asked.push(unfinished.token);
        if unfinished.token == 3 { Fate::Fail } else { Fate::Resubmit }
    });
    assert_eq!((kept, asked), (4, vec![0, 2, 3, 4, 5]));
    assert!(rig.reap().unwrap().is_empty(), "nothing old is left");
    assert_eq!(rig.doorbells(), (4, 0));
    let again: Vec<u16> = (0..4).map(|i| rig.device.read::<SubmissionEntry>(64 * i).cid()).collect();
    assert_eq!(again, [cids[0], cids[2], cids[4], cids[5]]);
    assert_eq!(rig.pair.next_late(), Some(1100));
    again.iter().for_each(|&cid| rig.complete(cid));
    assert_eq!(rig.reap().unwrap(), [0, 2, 4, 5]);
    assert_eq!(rig.pair.counters().resubmitted, 4);
}

#[test]
#[should_panic(expected = "a proof for another pair")]
fn a_proof_for_another_pair_ends_nothing() {
    Scripted::new(3, 4).pair.rewind(DmaEnded::new(QID + 1, 9), |_| Fate::Fail);
}

#[test]
fn lists_are_the_slots_own() {
    let mut rig = Scripted::new(3, 4);
    let pieces = |base: u64| [Piece { iova: base, len: 3 * 4096 }];
    for base in [0x10_0000, 0x20_0000, 0x30_0000] {
        rig.pair.submit(SubmissionEntry::new(2, 1), &pieces(base), 0, 0).unwrap();
    }
    let lists: Vec<u64> =
        (0..3).map(|i| rig.device.read::<SubmissionEntry>(64 * i).data_pointer()[1]).collect();
    for (i, list) in lists.iter().enumerate() {
        let at = (list - BASE) as usize;
        let base = 0x10_0000 * (i as u64 + 1);
        assert_eq!([rig.device.load_u64(at), rig.device.load_u64(at + 8)], [base + 0x1000, base + 0x2000]);
        assert!(list % 256 == 0);
    }
}
