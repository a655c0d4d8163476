//! A queue whose connection uses TLS.

use super::*;
use aryk_tls::{Hash, Progress, Psk, Psks, Session};

/// Both sides after their handshake: the host's and the queue's.
pub(super) fn sessions() -> (Session, Session) {
    let key = Psk::new("host", &[7; 32], Hash::Sha256).unwrap();
    let known = Psks::from([("host".into(), key.clone())]);
    let (mut host, mut queue) =
        (Session::connect(vec![key]).unwrap(), Session::accept(Arc::new(known)).unwrap());
    let (mut to_queue, mut to_host) = (Vec::new(), Vec::new());
    assert_eq!(host.handshake(&mut &[][..], &mut to_queue), Ok(Progress::Pending));
    assert_eq!(queue.handshake(&mut &to_queue[..], &mut to_host), Ok(Progress::Pending));
    to_queue.clear();
    assert_eq!(host.handshake(&mut &to_host[..], &mut to_queue), Ok(Progress::Complete));
    assert_eq!(queue.handshake(&mut &to_queue[..], &mut to_host), Ok(Progress::Complete));
    (host, queue)
}

/// Adds what a host has received to `plain`.
pub(super) fn open(session: &mut Session, mut received: &[u8], plain: &mut Vec<u8>) {
    let mut bytes = [0; 1 << 14];
    loop {
        match session.read(&mut received, &mut bytes).unwrap() {
            0 => return,
            len => plain.extend_from_slice(&bytes[..len]),
        }
    }
}

#[test]
fn a_host_that_reads_late_gets_all_its_data() {
    let (mut rig, _) = Rig::with(false, true);
    // More than the sockets hold.
    let blocks = (TRANSFER_MAX / BLOCK as usize) as u32;
    for _ in 0..3 {
        let reads: Vec<u8> = (0..100).flat_map(|cid| command(entry(cid, io::READ, 0, blocks))).collect();
        let mut records = Vec::new();
        rig.tls.as_mut().unwrap().write(&reads, &mut records).unwrap();
        rig.host.write_all(&records).unwrap();
        rig.turns(100);
        {
            let (queue, _) = rig.queue();
            let tcp = tcp_of(&queue);
            let tcp::Means::Polled(polled) = &tcp.means else { panic!("TLS does not use the ring") };
            let sealed = polled.sealed.as_ref().unwrap();
            assert!(polled.is_blocked && sealed.has_unsent() && sealed.unsent_len() <= 65 << 10);
        }
        let mut got = Vec::new();
        while got.iter().filter(|got| matches!(got, Got::Completion(_, Code::SUCCESS))).count() < 100 {
            rig.turns(1);
            got.extend(rig.received());
        }
        let data: u32 = got.iter().map(|got| if let Got::Data(len) = got { *len } else { 0 }).sum();
        assert_eq!(data as usize, 100 * TRANSFER_MAX);
    }
}

#[test]
fn changed_bytes_end_a_queue() {
    let (mut rig, _) = Rig::with(false, true);
    let mut records = Vec::new();
    rig.tls.as_mut().unwrap().write(&command(entry(1, io::READ, 0, 1)), &mut records).unwrap();
    records[20] ^= 1;
    rig.host.write_all(&records).unwrap();
    rig.turns(10);
    assert!(matches!(rig.ended.try_recv(), Ok(Some(Ended::Closed))));
}

#[test]
fn output_shares_records() {
    let (mut rig, _) = Rig::with(false, true);
    let reads: Vec<u8> = (0..8).flat_map(|cid| command(entry(cid, io::READ, 0, 1))).collect();
    rig.send(&reads);
    let mut bytes = vec![0; 1 << 20];
    let mut len = 0;
    for _ in 0..100 {
        rig.turns(1);
        len += rig.host.read(&mut bytes[len..]).unwrap_or(0);
    }
    let (mut records, mut rest) = (0, &bytes[..len]);
    while let [23, 3, 3, high, low, ..] = *rest {
        records += 1;
        rest = &rest[5 + usize::from(u16::from_be_bytes([high, low]))..];
    }
    assert!(rest.is_empty());
    // 32 KiB and 16 small pieces.
    assert!(records <= 6, "{records} records");
}
