//! Commands that control executes, and commands that a reservation forbids while a queue has them.

use super::*;
use aryk_nvme_fabrics::io::Request;
use aryk_nvme_fabrics::reservation::Rights;

const CONFLICT: Code = Code::RESERVATION_CONFLICT;

impl Rig {
    /// Takes a right of the host. Returns what tells that the disk has no command any more that needs it.
    fn restrict(&mut self, rights: Rights, loss: Loss) -> Option<oneshot::Receiver<()>> {
        let (mut queue, cx) = self.queue();
        queue.restrict((1, 0), rights, loss, cx)
    }

    /// The next command that the queue sends to control.
    fn next_asked(&mut self) -> Asked {
        for _ in 0..100 {
            if let Ok(asked) = self.asked.try_recv() {
                return asked;
            }
            self.bench.turn();
        }
        panic!("no command")
    }

    fn answer_asked(&mut self, asked: &Asked, answer: crate::reservation::Answer) {
        let (mut queue, cx) = self.queue();
        queue.answer(asked.slot, answer, cx);
    }
}

fn register(cid: u16) -> SubmissionEntry {
    SubmissionEntry::new(io::RESERVATION_REGISTER, 1)
        .with_cid(cid)
        .with_sgl(Sgl::Transport { len: 16 }.encode())
}

#[test]
fn control_answers_the_commands_of_reservations() {
    let (mut rig, _) = Rig::new();
    // In the capsule, and by R2T.
    let keys: [u8; 16] = std::array::from_fn(|at| at as u8);
    rig.send(&command_with(register(1), &keys));
    let first = rig.next_asked();
    rig.send(&command(register(2)));
    let [requested] = rig.requested();
    rig.answer(requested, &keys);
    let second = rig.next_asked();
    for asked in [&first, &second] {
        assert_eq!((&asked.data[..], asked.request, asked.number), (&keys[..], Request::Reserve, 0));
    }
    assert!(!rig.abort(1), "control has it");
    rig.answer_asked(&second, Ok(Vec::new()));
    rig.answer_asked(&first, Err(CONFLICT));
    assert_eq!(rig.completions(2), [(1, CONFLICT), (2, Code::SUCCESS)]);

    let report = |dwords, extended| {
        let entry = SubmissionEntry::new(io::RESERVATION_REPORT, 1).with_cid(3);
        entry.with_cdw10_11(dwords, extended).with_sgl(Sgl::Transport { len: 4096 }.encode())
    };
    rig.send(&command(report(31, 1)));
    let asked = rig.next_asked();
    assert_eq!(asked.request, Request::Report { len: 128 });
    rig.answer_asked(&asked, Ok(vec![7; 128]));
    assert!(matches!(rig.receive(2)[..], [Got::Data(128), Got::Completion(3, Code::SUCCESS)]));
    rig.send(&command(report(31, 0)));
    assert_eq!(rig.completions(1), [(3, Code::HOST_ID_INCONSISTENT)]);
    rig.send(&command_with(register(4), &keys[..15]));
    assert_eq!(rig.completions(1), [(4, Code::SGL_DATA_LENGTH_INVALID)]);

    // Control has a limited number of commands of a queue.
    let many: Vec<u8> = (0..17).flat_map(|cid| command_with(register(cid), &keys)).collect();
    rig.send(&many);
    assert_eq!(rig.completions(1), [(16, Code::COMMAND_INTERRUPTED)]);
    let asked = rig.next_asked();
    rig.answer_asked(&asked, Ok(Vec::new()));
    assert_eq!(rig.completions(1), [(0, Code::SUCCESS)]);
    rig.send(&command_with(register(30), &keys));

    // A queue that ends does not wait for control.
    rig.next_asked();
    rig.end();
}

#[test]
fn commands_that_a_reservation_forbids_fail_wherever_they_are() {
    let (mut rig, control) = Rig::new();
    control.is_held.store(true, Relaxed);
    let half = |cid, opcode, fuse| entry(cid, opcode, 7, 1).with_fuse(fuse);
    let data = [1; BLOCK as usize];
    // The disk has a read and a write; the others wait for their data, or for the other half.
    rig.send(&[command(entry(1, io::READ, 0, 1)), command_with(entry(2, io::WRITE, 0, 1), &data)].concat());
    rig.send(&command(entry(3, io::WRITE, 0, 4)));
    let [of_write] = rig.requested();
    let fused =
        [command_with(half(4, io::COMPARE, Fuse::First), &data), command(half(5, io::WRITE, Fuse::Second))];
    rig.send(&fused.concat());
    let [of_half] = rig.requested();
    let mut ended = rig.restrict(Rights::Read, Loss::Rights).unwrap();
    assert_eq!(rig.completions(1), [(2, CONFLICT)]);
    assert_eq!(ended.try_recv(), Ok(Some(())));
    rig.answer(of_write, &[1; 4 * BLOCK as usize]);
    rig.answer(of_half, &data);
    assert_eq!(rig.completions(3), [(3, CONFLICT), (4, Code::FUSED_FAILED), (5, CONFLICT)]);
    assert_eq!((control.count(Op::Write), control.count(Op::CompareAndWrite)), (1, 0));
    for (cid, opcode) in [(6, io::WRITE), (7, io::WRITE_ZEROES), (8, io::FLUSH)] {
        rig.send(&command_with(entry(cid, opcode, 0, 1), if opcode == io::WRITE { &data } else { &[] }));
        assert_eq!(rig.completions(1), [(cid, CONFLICT)]);
    }

    let verify = entry(9, io::VERIFY, 0, 1).with_sgl(Sgl::Transport { len: 0 }.encode());
    rig.send(&command(verify));
    rig.turns(20);
    assert_eq!(control.count(Op::Read), 2, "it is a read");

    // The reads go on until the host may not read either.
    let mut ended = rig.restrict(Rights::None, Loss::Rights).unwrap();
    assert_eq!(rig.completions(2), [(1, CONFLICT), (9, CONFLICT)]);
    assert_eq!(ended.try_recv(), Ok(Some(())));
    rig.send(&[command(entry(1, io::READ, 0, 1)), command(verify)].concat());
    assert_eq!(rig.completions(2), [(1, CONFLICT), (9, CONFLICT)]);
    assert!(rig.restrict(Rights::All, Loss::Rights).is_none());
    control.is_held.store(false, Relaxed);
    rig.send(&command_with(entry(2, io::WRITE, 0, 1), &data));
    assert_eq!(rig.completions(1), [(2, Code::SUCCESS)]);
    rig.end();
}

#[test]
fn a_preempted_host_has_no_command_left() {
    let (mut rig, control) = Rig::new();
    control.is_held.store(true, Relaxed);
    let range = |lba: u64| [&[0; 4], &1_u32.to_le_bytes()[..], &lba.to_le_bytes()].concat();
    let ranges: Vec<u8> = (0..32).flat_map(range).collect();
    let discard = SubmissionEntry::new(io::DATASET_MANAGEMENT, 1).with_cid(2).with_cdw10_11(31, 4);
    rig.send(&[command(entry(1, io::READ, 0, 1)), command_with(discard, &ranges)].concat());
    rig.send(&command(entry(3, io::WRITE, 0, 4)));
    let [requested] = rig.requested();
    let mut ended = rig.restrict(Rights::All, Loss::All).unwrap();
    let preempted = Code::PREEMPTED;
    assert_eq!(rig.completions(2), [(1, preempted), (2, preempted)]);
    assert_eq!((ended.try_recv(), control.count(Op::Unmap)), (Ok(Some(())), 16));
    rig.answer(requested, &[1; 4 * BLOCK as usize]);
    assert_eq!((rig.completions(1), control.count(Op::Write)), (vec![(3, preempted)], 0));
    // New commands are not those that were aborted.
    rig.send(&command(entry(1, io::READ, 0, 1)));
    rig.turns(20);
    assert_eq!(control.count(Op::Read), 2);

    // What the disk does not abort ends as it does, and the drain with it. A second one waits for the same command.
    control.is_stuck.store(true, Relaxed);
    let mut drains = [(); 2].map(|()| rig.restrict(Rights::All, Loss::All).unwrap());
    rig.turns(20);
    assert!(drains.iter_mut().all(|ended| ended.try_recv() == Ok(None)));
    control.is_held.store(false, Relaxed);
    assert!(matches!(rig.receive(2)[..], [Got::Data(BLOCK), Got::Completion(1, Code::SUCCESS)]));
    assert!(drains.iter_mut().all(|ended| ended.try_recv() == Ok(Some(()))));
    rig.end();
}

#[test]
fn a_queue_that_ends_drains_first() {
    let (mut rig, control) = Rig::new();
    control.is_held.store(true, Relaxed);
    control.is_stuck.store(true, Relaxed);
    rig.send(&command(entry(1, io::READ, 0, 1)));
    rig.turns(20);
    let mut ended = rig.restrict(Rights::None, Loss::Rights).unwrap();
    {
        let (mut queue, cx) = rig.queue();
        queue.close(cx);
    }
    rig.turns(20);
    assert!(matches!((ended.try_recv(), rig.ended.try_recv()), (Ok(None), Ok(None))));
    control.is_held.store(false, Relaxed);
    rig.turns(20);
    assert!(matches!((ended.try_recv(), rig.ended.try_recv()), (Ok(Some(())), Ok(Some(Ended::Closed)))));
}

#[test]
fn a_namespace_that_a_queue_loses_is_drained_too() {
    let (mut rig, control) = Rig::new();
    control.is_held.store(true, Relaxed);
    control.is_stuck.store(true, Relaxed);
    rig.send(&command_with(entry(1, io::WRITE, 0, 1), &[1; BLOCK as usize]));
    rig.turns(20);
    {
        let (mut queue, cx) = rig.queue();
        queue.remove(1, 0, oneshot::channel().0, cx);
    }
    let mut ended = rig.restrict(Rights::Read, Loss::Rights).unwrap();
    rig.turns(20);
    assert_eq!(ended.try_recv(), Ok(None));
    control.is_held.store(false, Relaxed);
    assert_eq!(rig.completions(1), [(1, Code::SUCCESS)]);
    assert_eq!(ended.try_recv(), Ok(Some(())));
    rig.end();
}
