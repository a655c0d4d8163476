//! Injected faults, delays and reordering, and what a full completion queue does.

use super::host::{Host, PAGE, command, io, is_ok, status, with_prps};
use crate::{Action, Config, Distortion, Queue, Random, Rule, Status, SubmissionEntry, Timing, admin, nvm};

fn flush() -> SubmissionEntry {
    command(nvm::FLUSH, 1, [0; 6])
}

fn inject(host: &Host, action: Action) {
    host.model.with(|c| c.faults().add(Rule::once(Queue::Io, nvm::FLUSH, action)));
}

#[test]
fn a_rule_fails_the_commands_that_it_names() {
    let mut host = Host::ready(Config::default());
    let media = Status::new(2, 0x80);
    let rule = Rule {
        queue: Queue::Id(1),
        opcode: Some(nvm::FLUSH),
        nsid: Some(1),
        skip: 1,
        times: 2,
        action: Action::Fail(media),
    };
    host.model.with(|c| c.faults().add(rule));
    let seen: Vec<_> = (0..4).map(|_| status(&host.run(flush()))).collect();
    assert_eq!(seen, [(0, 0), (2, 0x80), (2, 0x80), (0, 0)]);
    host.model.with(|c| assert_eq!((c.counts().faults, c.counts().failures), (2, 2)));
}

#[test]
fn a_failed_write_changes_nothing_and_a_lost_one_happens() {
    let mut host = Host::ready(Config::default());
    host.write_block(0, 1, 0);
    let rule = |action| Rule::once(Queue::Io, nvm::WRITE, action);
    host.model.with(|c| c.faults().add(rule(Action::Fail(Status::new(0, 6)))));
    assert!(!is_ok(&host.write_block(0, 2, 0)));
    assert_eq!(host.read_block(0), 1);
    host.model.with(|c| c.faults().add(rule(Action::Lose { after: 500 })));
    let page = host.pages(1);
    host.write(page, &[3; PAGE as usize]);
    host.submit(1, with_prps(io(nvm::WRITE, 1, 0, 1), host.iova + page, 0));
    assert_eq!(host.step(), 500);
    assert_eq!(host.read_block(0), 1, "not yet");
    host.now = 500;
    host.step();
    assert_eq!(host.read_block(0), 3, "the data has landed, without a completion");
}

#[test]
fn a_lost_read_lands_until_the_reset_is_over_and_not_after() {
    for (land, lands) in [(900, true), (1_500, false)] {
        let timing = Timing { disable: 1_000, ..Timing::IMMEDIATE };
        let mut host = Host::ready(Config { timing, ..Config::default() });
        host.write_block(0, 7, 0);
        let rule = Rule::once(Queue::Io, nvm::READ, Action::Lose { after: land });
        host.model.with(|c| c.faults().add(rule));
        let page = host.pages(1);
        host.submit(1, with_prps(io(nvm::READ, 1, 0, 1), host.iova + page, 0));
        host.step();
        host.disable();
        assert_eq!(host.now, 1_000);
        assert_eq!(host.read(page, 1)[0] == 7, lands);
        host.now += 10_000;
        host.step();
        assert_eq!(host.read(page, 1)[0] == 7, lands, "nothing lands after CSTS.RDY = 0");
        host.assert_clean();
    }
}

#[test]
fn a_wrong_entry_differs_where_it_should() {
    for (distortion, what) in [
        (Distortion::Cid, "CID"),
        (Distortion::Sqid, "SQ identifier"),
        (Distortion::SqHead, "SQ head"),
        (Distortion::Phase, "phase"),
        (Distortion::Doubled, "doubled"),
    ] {
        let mut host = Host::ready(Config::default());
        inject(&host, Action::Distort(distortion));
        let cid = host.submit(1, flush());
        host.step();
        let first = host.reap(1);
        let right = |entry: &crate::CompletionEntry| {
            (entry.cid.get() == cid, entry.sqid.get() == 1, entry.sq_head.get() < 64)
        };
        let expected = match distortion {
            Distortion::Cid => Some((false, true, true)),
            Distortion::Sqid => Some((true, false, true)),
            Distortion::SqHead => Some((true, true, false)),
            Distortion::Phase => None,
            Distortion::Doubled | Distortion::Random => Some((true, true, true)),
        };
        assert_eq!(first.as_ref().map(right), expected, "{what}");
        assert_eq!(host.reap(1).is_some(), distortion == Distortion::Doubled, "{what}");
    }
}

#[test]
fn a_fault_can_fail_the_controller_or_remove_it() {
    let mut host = Host::ready(Config::default());
    inject(&host, Action::FailController);
    host.submit(1, flush());
    host.step();
    assert_eq!(host.reg32(0x1c) & 2, 2);
    host.disable();
    host.enable();
    host.create_queue(1, 16);
    inject(&host, Action::PullOut);
    host.submit(1, flush());
    assert_eq!(host.step(), u64::MAX);
    assert_eq!(host.reg32(0x1c), u32::MAX);
}

#[test]
fn enabling_and_disabling_can_hang() {
    let mut host = Host::new(Config::default());
    host.model.with(|c| c.faults().never_ready = true);
    host.set32(0x14, 6 << 16 | 4 << 20 | 1);
    assert_eq!(host.step(), u64::MAX);
    assert_eq!(host.reg32(0x1c) & 1, 0);
    host.model.with(|c| c.faults().never_ready = false);
    host.disable();
    host.enable();
    host.model.with(|c| c.faults().never_disabled = true);
    host.set32(0x14, 0);
    assert_eq!(host.step(), u64::MAX);
    assert_eq!(host.reg32(0x1c) & 1, 1);
    use aryk_pci::Function as _;
    host.model.reset().unwrap();
    assert_eq!(host.reg32(0x1c) & 1, 0, "a function-level reset works");
}

#[test]
fn random_delays_reorder_by_the_seed() {
    let order = |seed: u64| {
        let timing = Timing { io: 1_000..=100_000, ..Timing::IMMEDIATE };
        let mut host = Host::ready(Config { seed, timing, ..Config::default() });
        for _ in 0..50 {
            host.prepare(1, flush());
        }
        host.ring(1);
        let order: Vec<u16> = (0..50).map(|_| host.wait(1).cid.get()).collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>(), "each command completes once");
        order
    };
    assert_ne!(order(1), (0..50).collect::<Vec<_>>());
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
}

#[test]
fn random_faults_follow_their_probabilities() {
    let mut host = Host::ready(Config::default());
    let random = Random { retryable: 1 << 13, media: 1 << 13, ..Random::default() };
    host.model.with(|c| c.faults().set_random(random));
    let mut seen = [0; 3];
    for _ in 0..2000 {
        seen[usize::from(status(&host.run(flush())).0)] += 1;
    }
    assert!((200..300).contains(&seen[2]), "1 of 8 is a media error: {seen:?}");
    assert!((1700..1800).contains(&seen[0]), "{seen:?}");
    let failures = host.model.with(|c| c.counts().failures);
    assert!((430..570).contains(&failures), "1 of 4 fails: {failures}");
    host.model.with(|c| c.faults().clear());
    assert!((0..100).all(|_| is_ok(&host.run(flush()))));
}

#[test]
fn a_cid_in_use_is_a_conflict() {
    let timing = Timing { io: 1_000..=1_000, ..Timing::IMMEDIATE };
    let mut host = Host::ready(Config { timing, ..Config::default() });
    for _ in 0..2 {
        host.prepare(1, flush());
    }
    // The second entry gets the first one's identifier.
    let at = host.queues[1].sq + 64 + 2;
    host.write(at, &0_u16.to_le_bytes());
    host.ring(1);
    host.step();
    let done = host.reap(1).unwrap();
    assert_eq!((done.cid.get(), status(&done)), (0, (0, 3)));
    assert!(is_ok(&host.wait(1)));
}

#[test]
fn a_full_completion_queue_holds_completions_back() {
    let mut host = Host::enabled(Config::default());
    let (sq, cq) = (host.pages(1), host.pages(1));
    let create = command(admin::CREATE_CQ, 0, [1 | 3 << 16, 3, 0, 0, 0, 0]);
    assert!(is_ok(&host.admin(with_prps(create, host.iova + cq, 0))));
    let create = command(admin::CREATE_SQ, 0, [1 | 31 << 16, 1 | 1 << 16, 0, 0, 0, 0]);
    assert!(is_ok(&host.admin(with_prps(create, host.iova + sq, 0))));
    host.add_queue(1, sq, cq, 32, 4);
    for _ in 0..20 {
        host.prepare(1, flush());
    }
    host.ring(1);
    for round in 0..20 {
        host.step();
        assert!(host.model.with(|c| c.counts().completions) <= 2 + round + 3, "four entries hold three");
        assert_eq!(host.reap(1).unwrap().cid.get(), round as u16);
    }
    host.step();
    assert!(host.reap(1).is_none());
    host.assert_clean();
}

#[test]
fn queues_are_served_in_turn() {
    let timing = Timing { io: 0..=0, ..Timing::IMMEDIATE };
    let mut host = Host::ready(Config { timing, commands_per_step: 8, ..Config::default() });
    host.create_queue(2, 64);
    // Bursts of 2: bits 2:0 of Arbitration.
    assert!(is_ok(&host.admin(command(admin::SET_FEATURES, 0, [1, 1, 0, 0, 0, 0]))));
    for queue in [1, 2] {
        for _ in 0..32 {
            host.prepare(queue, flush());
        }
        host.ring(queue);
    }
    assert_eq!(host.step(), host.now, "work is left over");
    let mut count = |queue| std::iter::from_fn(|| host.reap(queue)).count();
    assert_eq!((count(1), count(2)), (4, 4));
}

#[test]
fn a_controller_that_does_not_stop_is_fenced_by_its_bus_master_bit() {
    use aryk_pci::Function as _;
    for (is_fenced, violations, blocked) in [(false, 1, 0), (true, 0, 1)] {
        let mut host = Host::ready(Config::default());
        let other = std::sync::Arc::new(aryk_dma::Mapping::anonymous(PAGE).unwrap());
        let iova = host.model.map(&other.dma_range(0, PAGE).unwrap()).unwrap();
        let rule = Rule::once(Queue::Io, nvm::READ, Action::Lose { after: 1_000 });
        host.model.with(|c| {
            c.faults().add(rule);
            c.faults().never_disabled = true;
        });
        host.submit(1, with_prps(io(nvm::READ, 1, 0, 1), iova, 0));
        host.step();
        host.set32(0x14, 0);
        if is_fenced {
            host.model.set_bus_master(false).unwrap();
        }
        host.model.unmap(iova, PAGE).unwrap();
        host.now = 1_000;
        host.step();
        let seen = host.model.with(|c| (c.violations().count, c.violations().blocked));
        assert_eq!(seen, (violations, blocked), "fenced: {is_fenced}");
    }
}
