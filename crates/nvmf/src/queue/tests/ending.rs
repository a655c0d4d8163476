//! Queues that end, and whose hosts must learn why.

use super::*;

/// Data for a request that there is not.
fn violation() -> Vec<u8> {
    pdu(&Header::H2cData(H2cData { cid: 1, tag: 100, offset: 0, len: BLOCK, is_last: true }), &[0; 4096])
}

impl Rig {
    /// Passes time, and runs turns.
    fn pass(&mut self, ms: u64) {
        self.clock.fetch_add(ms * 1_000_000, Relaxed);
        self.turns(20);
    }

    fn has_ended(&mut self) -> bool {
        matches!(self.ended.try_recv(), Ok(Some(Ended::Closed)))
    }

    /// Whether the queue has ended its side of the connection.
    fn is_at_end(&mut self) -> bool {
        matches!(self.host.read(&mut [0; 1]), Ok(0))
    }
}

#[test]
fn a_reason_is_sent_behind_replies_for_which_the_host_makes_no_room() {
    for uses_tls in [false, true] {
        let (mut rig, control) = Rig::with(false, uses_tls);
        control.is_held.store(true, Relaxed);
        let blocks = TRANSFER_MAX as u32 / BLOCK;
        let mut commands: Vec<u8> =
            (0..64).flat_map(|cid| command(entry(cid, io::READ, 0, blocks))).collect();
        // The disk still has this one at the end.
        commands.extend(command_with(entry(64, io::WRITE, 0, 1), &[0; BLOCK as usize]));
        rig.send(&commands);
        rig.turns(50);
        for _ in 0..64 {
            control.complete_one();
            rig.turns(2);
        }
        rig.turns(200);
        {
            let (queue, _) = rig.queue();
            assert!(tcp_of(&queue).waiting_since().is_some());
        }
        // The host still sends, also what would be a command.
        rig.send(&[violation(), command(entry(65, io::READ, 0, 1))].concat());
        rig.turns(50);
        let got = rig.receive(129);
        let field = aryk_nvme_fabrics::tcp::Fatal::of(FatalStatus::INVALID_FIELD).status;
        assert!(matches!(got[128], Got::Terminated(fatal) if fatal.status == field), "{:?}", got[128]);
        control.is_held.store(false, Relaxed);
        rig.turns(20);
        assert!(rig.is_at_end() && !rig.has_ended());
        assert_eq!(control.count(Op::Read), 64);
        // The host has a second to end the connection.
        rig.pass(999);
        assert!(!rig.has_ended());
        rig.pass(2);
        assert!(rig.has_ended());
    }
}

#[test]
fn a_host_that_never_reads_the_reason_loses_its_queue() {
    let (mut rig, _) = Rig::new();
    let blocks = TRANSFER_MAX as u32 / BLOCK;
    rig.send(&(0..100).flat_map(|cid| command(entry(cid, io::READ, 0, blocks))).collect::<Vec<_>>());
    rig.turns(1000);
    let (mut queue, cx) = rig.queue();
    queue.close_behind_output(cx);
    drop(queue);
    rig.pass(29_000);
    assert!(!rig.has_ended());
    rig.pass(1001);
    rig.turns(100);
    assert!(rig.has_ended());
}

#[test]
fn a_queue_ends_when_its_host_has_read_the_last_reply_and_ends_the_connection() {
    let (mut rig, _) = Rig::new();
    rig.send(&command(entry(1, io::READ, 0, 1)));
    rig.receive(2);
    let (mut queue, cx) = rig.queue();
    queue.close_behind_output(cx);
    drop(queue);
    rig.turns(20);
    assert!(rig.is_at_end() && !rig.has_ended());
    rig.host.shutdown(std::net::Shutdown::Write).unwrap();
    rig.turns(50);
    assert!(rig.has_ended());
}

#[test]
fn a_refused_host_can_do_nothing_and_loses_its_queue() {
    let (mut rig, control) = Rig::new();
    let (mut queue, cx) = rig.queue();
    queue.refuse(cx);
    drop(queue);
    let required = aryk_nvme_fabrics::status::AUTHENTICATION_REQUIRED;
    rig.send(
        &[command(entry(1, io::READ, 0, 1)), command_with(entry(2, io::WRITE, 0, 1), &[0; 4096])].concat(),
    );
    assert_eq!(rig.completions(2), [(1, required), (2, required)]);
    assert_eq!((control.count(Op::Read), control.count(Op::Write)), (0, 0));
    rig.pass(29_999);
    let (mut queue, cx) = rig.queue();
    // This puts nothing off.
    queue.refuse(cx);
    drop(queue);
    assert!(!rig.has_ended());
    rig.pass(2);
    assert!(rig.has_ended());
}
