//! Copies: which requests the disk gets, and what ends them in the middle.

use super::*;
use aryk_nvme_fabrics::reservation::Rights;

/// The data of a copy with these sources: first block, number of blocks.
fn sources(of: &[(u64, u16)]) -> Vec<u8> {
    let source = |&(lba, blocks): &(u64, u16)| {
        [&[0; 8], &lba.to_le_bytes()[..], &(blocks - 1).to_le_bytes(), &[0; 14]].concat()
    };
    of.iter().flat_map(source).collect()
}

/// A copy to blocks from `to` on, whose data comes by an R2T.
fn copy(cid: u16, to: u64, of: &[(u64, u16)]) -> SubmissionEntry {
    let len = of.len() as u32 * 32;
    entry(cid, io::COPY, to, of.len() as u32).with_sgl(Sgl::Transport { len }.encode())
}

const THREE: [(u64, u16); 3] = [(100, 4), (300, 2), (200, 8)];

impl Rig {
    /// Starts a copy of three sources to block 500, and waits until the disk has the second one.
    fn start_three(&mut self, cid: u16, control: &Control) {
        control.is_held.store(true, Relaxed);
        self.send(&command_with(copy(cid, 500, &THREE), &sources(&THREE)));
        self.turns(20);
        assert_eq!(control.take_copies(), [(100, 500, 4, false)]);
        control.complete_one();
        self.turns(20);
        assert_eq!(control.take_copies(), [(300, 504, 2, false)]);
    }
}

#[test]
fn the_disk_gets_the_sources_one_after_the_other() {
    let (mut rig, control) = Rig::new();
    rig.start_three(1, &control);
    assert!(rig.received().is_empty());
    control.is_held.store(false, Relaxed);
    assert_eq!((rig.completions(1), rig.result), (vec![(1, Code::SUCCESS)], 0));
    assert_eq!(control.take_copies(), [(200, 506, 8, false)]);

    // By an R2T, with FUA, and with more data than sources.
    let entry = copy(2, 0, &[(7, 1); 5]).with_cdw12_13(1 | 1 << 30, 0);
    rig.send(&command(entry));
    let [requested] = rig.requested();
    assert_eq!(requested.len, 160);
    rig.answer(requested, &sources(&[(7, 1), (9, 1), (u64::MAX, 1), (0, u16::MAX), (0, 1)]));
    assert_eq!(rig.completions(1), [(2, Code::SUCCESS)]);
    assert_eq!(control.take_copies(), [(7, 0, 1, true), (9, 1, 1, true)]);

    // The block layer copies between ranges that overlap, which devices may not.
    rig.send(&command_with(copy(3, 10, &[(11, 4)]), &sources(&[(11, 4)])));
    assert_eq!(rig.completions(1), [(3, Code::SUCCESS)]);
    assert_eq!((control.take_copies(), control.count(Op::Read), control.count(Op::Write)), (vec![], 1, 1));
    rig.end();
}

#[test]
fn nothing_is_copied_of_a_command_with_a_wrong_source() {
    let (mut rig, control) = Rig::new();
    let (limit, outside) = (Code::COMMAND_SIZE_LIMIT, Code::LBA_OUT_OF_RANGE);
    let last = BLOCKS - 1;
    for (to, of, code) in [
        (0, &[(0, 1), (0, 257)][..], limit),
        (0, &[(0, 256), (0, 256), (0, 256), (0, 256), (0, 1)], limit),
        (0, &[(0, u16::MAX); 128], limit),
        (0, &[(0, 1), (last, 2)], outside),
        (0, &[(0, 1), (u64::MAX, 1)], outside),
        (0, &[(0, 1), (u64::MAX - 1, 2)], outside),
        (last, &[(0, 1), (0, 1)], outside),
        (BLOCKS, &[(0, 1)], outside),
    ] {
        rig.send(&command_with(copy(1, to, of), &sources(of)));
        assert_eq!((rig.completions(1), rig.result), (vec![(1, code)], 0), "{to} {:?}", of.last());
    }
    let short = sources(&[(0, 1); 2]);
    for (wrong, code) in [
        (copy(1, 0, &[(0, 1); 3]), Code::SGL_DATA_LENGTH_INVALID),
        (copy(1, 0, &[(0, 1); 2]).with_cdw12_13(1 | 1 << 8, 0), Code::INVALID_FIELD),
        (copy(1, 0, &[(0, 1); 2]).with_cdw12_13(128, 0), limit),
        (copy(1, 0, &[(0, 1); 2]).with_fuse(Fuse::First), Code::INVALID_FIELD),
    ] {
        rig.send(&command_with(wrong, &short));
        assert_eq!((rig.completions(1), rig.result), (vec![(1, code)], 0));
    }
    assert_eq!(control.take_copies(), []);
    rig.send(&command_with(copy(1, last, &[(0, 1)]), &sources(&[(0, 1)])));
    assert_eq!(rig.completions(1), [(1, Code::SUCCESS)]);
    rig.end();
}

#[test]
fn a_copy_that_ends_in_the_middle_says_where() {
    let (mut rig, control) = Rig::new();
    // An abort, which the disk carries out.
    rig.start_three(1, &control);
    assert!(rig.abort(1));
    assert_eq!((rig.completions(1), rig.result), (vec![(1, Code::ABORT_REQUESTED)], 1));

    // A disk that becomes smaller: the third source is not on it any more.
    rig.start_three(2, &control);
    rig.registry.resized("disk", Blocks(200)).unwrap();
    control.is_held.store(false, Relaxed);
    assert_eq!((rig.completions(1), rig.result), (vec![(2, Code::LBA_OUT_OF_RANGE)], 2));
    rig.registry.resized("disk", Blocks(BLOCKS)).unwrap();

    // A reservation that takes the right to write, also of a copy whose sources have not come.
    rig.start_three(3, &control);
    rig.send(&command(copy(4, 0, &THREE)));
    let [requested] = rig.requested();
    {
        let (mut queue, cx) = rig.queue();
        assert!(queue.restrict((1, 0), Rights::Read, Loss::Rights, cx).is_some());
    }
    let conflict = Code::RESERVATION_CONFLICT;
    assert_eq!((rig.completions(1), rig.result), (vec![(3, conflict)], 1));
    rig.answer(requested, &sources(&THREE));
    assert_eq!((rig.completions(1), rig.result), (vec![(4, conflict)], 0));
    rig.send(&command(copy(5, 0, &THREE)));
    assert_eq!(rig.completions(1), [(5, conflict)]);
    {
        let (mut queue, cx) = rig.queue();
        assert!(queue.restrict((1, 0), Rights::All, Loss::Rights, cx).is_none());
    }

    // What the disk does not abort ends as it does; the next source is not copied.
    control.is_stuck.store(true, Relaxed);
    rig.start_three(6, &control);
    let mut ended = {
        let (mut queue, cx) = rig.queue();
        queue.restrict((1, 0), Rights::All, Loss::All, cx).unwrap()
    };
    control.is_held.store(false, Relaxed);
    assert_eq!((rig.completions(1), rig.result), (vec![(6, Code::PREEMPTED)], 2));
    assert_eq!((ended.try_recv(), control.take_copies()), (Ok(Some(())), vec![]));

    // A namespace that is removed.
    rig.start_three(7, &control);
    {
        let (mut queue, cx) = rig.queue();
        queue.remove(1, 0, oneshot::channel().0, cx);
    }
    rig.turns(20);
    control.is_held.store(false, Relaxed);
    assert_eq!((rig.completions(1), rig.result), (vec![(7, Code::INVALID_NAMESPACE_OR_FORMAT)], 2));
    assert_eq!(control.take_copies(), []);
    rig.end();
}
