//! Handshakes of both sides, by pieces; data; damaged and hostile bytes; memory.

use crate::*;

fn key(identity: &str, byte: u8, hash: Hash) -> Psk {
    Psk::new(identity, &[byte; 48], hash).expect("a key")
}

fn set(keys: &[Psk]) -> Arc<Psks> {
    Arc::new(keys.iter().map(|key| (key.identity().into(), key.clone())).collect())
}

/// Both sides of a handshake that ends: what each of them found.
struct Ended {
    host: Session,
    target: Session,
    found_by_host: Result<Progress, TlsError>,
    found_by_target: Result<Progress, TlsError>,
}

/// A handshake whose bytes arrive in pieces of `piece` bytes.
fn shake(offered: Vec<Psk>, known: &[Psk], piece: usize) -> Ended {
    let mut host = Session::connect(offered).expect("a host");
    let mut target = Session::accept(set(known)).expect("a target");
    let (mut to_host, mut to_target) = (Vec::new(), Vec::new());
    let (mut found_by_host, mut found_by_target) = (Ok(Progress::Pending), Ok(Progress::Pending));
    for _ in 0..10_000 {
        let bytes: Vec<u8> = to_host.drain(..piece.min(to_host.len())).collect();
        if found_by_host == Ok(Progress::Pending) {
            let mut input = &bytes[..];
            found_by_host = host.handshake(&mut input, &mut to_target);
            assert!(input.is_empty() || found_by_host != Ok(Progress::Pending));
        }
        let bytes: Vec<u8> = to_target.drain(..piece.min(to_target.len())).collect();
        if found_by_target == Ok(Progress::Pending) {
            let mut input = &bytes[..];
            found_by_target = target.handshake(&mut input, &mut to_host);
        }
        let is_over = to_host.is_empty() && to_target.is_empty();
        if is_over {
            break;
        }
    }
    Ended { host, target, found_by_host, found_by_target }
}

fn agreed(ended: &Ended) -> [&str; 2] {
    assert_eq!(
        (ended.found_by_host, ended.found_by_target),
        (Ok(Progress::Complete), Ok(Progress::Complete))
    );
    [&ended.host, &ended.target].map(|side| side.agreed().expect("a key").identity())
}

#[test]
fn sides_with_the_same_key_agree_whatever_the_pieces() {
    for hash in Hash::ALL {
        for piece in [1, 7, 1 << 16] {
            let known = [key("other", 1, hash), key("this", 2, hash)];
            let ended = shake(vec![key("this", 2, hash)], &known, piece);
            assert_eq!(agreed(&ended), ["this", "this"]);
        }
    }
}

#[test]
fn the_first_of_several_offers_that_is_known_is_taken() {
    let offered = vec![key("new", 1, Hash::Sha256), key("old", 2, Hash::Sha256)];
    let ended = shake(offered.clone(), &[key("old", 2, Hash::Sha256)], 1 << 16);
    assert_eq!(agreed(&ended), ["old", "old"]);
    let ended = shake(offered.clone(), &offered, 1 << 16);
    assert_eq!(agreed(&ended), ["new", "new"]);
    let mixed = vec![key("short", 1, Hash::Sha256), key("long", 2, Hash::Sha384)];
    let ended = shake(mixed.clone(), &mixed[1..], 1 << 16);
    assert_eq!(agreed(&ended), ["long", "long"]);
}

#[test]
fn both_sides_learn_why_a_handshake_fails() {
    let offered = vec![key("this", 1, Hash::Sha256)];
    let ended = shake(offered.clone(), &[key("this", 2, Hash::Sha256)], 1 << 16);
    assert_eq!(ended.found_by_target, Err(TlsError::WrongKey));
    assert_eq!(ended.found_by_host, Err(TlsError::Refused(51)));
    let ended = shake(offered, &[key("that", 1, Hash::Sha256)], 1 << 16);
    assert_eq!(ended.found_by_target, Err(TlsError::UnknownIdentity));
    assert_eq!(ended.found_by_host, Err(TlsError::Refused(115)));
    // The same key with another hash.
    let ended = shake(vec![key("this", 1, Hash::Sha256)], &[key("this", 1, Hash::Sha384)], 1 << 16);
    assert!(ended.found_by_target.is_err() && ended.found_by_host.is_err());
}

#[test]
fn bytes_that_are_not_of_tls_are_found_at_once() {
    let mut output = Vec::new();
    let mut target = Session::accept(set(&[])).expect("a target");
    // The first bytes of an ICReq.
    assert_eq!(target.handshake(&mut &[0, 0, 128, 0, 128][..], &mut output), Err(TlsError::NotTls));
    assert_eq!(output, [21, 3, 3, 0, 2, 2, 10]);
    let mut host = Session::connect(vec![key("this", 1, Hash::Sha256)]).expect("a host");
    assert_eq!(host.handshake(&mut &[][..], &mut output), Ok(Progress::Pending));
    assert_eq!(host.handshake(&mut &[3, 0, 24, 0, 24][..], &mut output), Err(TlsError::NotTls));
}

/// Sends `bytes` from one side to the other.
fn send(from: &mut Session, to: &mut Session, bytes: &[u8], wire: &mut Vec<u8>, plain: &mut [u8]) {
    wire.clear();
    from.write(bytes, wire).expect("sent");
    assert!(wire.len() <= bytes.len() + overhead(bytes.len()), "{} of {}", wire.len(), bytes.len());
    let (mut input, mut len) = (&wire[..], 0);
    loop {
        match to.read(&mut input, &mut plain[len..]).expect("received") {
            0 => break,
            read => len += read,
        }
        if len == plain.len() {
            break;
        }
    }
    assert!(input.is_empty());
    assert_eq!(&plain[..len], bytes);
}

#[test]
fn data_of_all_lengths_arrives_in_both_directions() {
    for hash in Hash::ALL {
        let Ended { mut host, mut target, .. } =
            shake(vec![key("a", 1, hash)], &[key("a", 1, hash)], 1 << 16);
        let bytes: Vec<u8> = (0..300_000u32).map(|at| (at * 7) as u8).collect();
        let (mut wire, mut plain) = (Vec::new(), vec![0; 300_001]);
        for len in [1, 2, 24, 4096, 16383, 16384, 16385, 65536, 300_000] {
            send(&mut host, &mut target, &bytes[..len], &mut wire, &mut plain);
            send(&mut target, &mut host, &bytes[..len], &mut wire, &mut plain);
        }
    }
}

#[test]
fn a_session_allocates_nothing_for_data_and_stays_within_its_memory() {
    let made = std::cell::RefCell::new(None);
    let set_up = allocation_counter::measure(|| {
        let mut ended = shake(vec![key("a", 1, Hash::Sha384)], &[key("a", 1, Hash::Sha384)], 1 << 16);
        let (mut wire, mut plain) = (Vec::with_capacity(80_000), vec![0; 65_537]);
        let bytes = vec![7; 65_536];
        for _ in 0..3 {
            send(&mut ended.host, &mut ended.target, &bytes, &mut wire, &mut plain);
            send(&mut ended.target, &mut ended.host, &bytes, &mut wire, &mut plain);
        }
        *made.borrow_mut() = Some((ended.host, ended.target));
    });
    let (mut host, mut target) = made.into_inner().expect("made");
    // What is left is that of both sides, of the two configurations and of the keys.
    assert!(set_up.bytes_current < 2 * SESSION_BYTES as i64, "{} bytes", set_up.bytes_current);
    let (mut wire, mut plain) = (Vec::with_capacity(80_000), vec![0; 65_537]);
    let bytes = vec![7; 65_536];
    let used = allocation_counter::measure(|| {
        for len in [24, 4096, 65_536, 24, 100] {
            send(&mut host, &mut target, &bytes[..len], &mut wire, &mut plain);
            send(&mut target, &mut host, &bytes[..len], &mut wire, &mut plain);
        }
    });
    assert_eq!(used.count_total, 0);
    let session = allocation_counter::measure(|| drop(host));
    println!("a session has {} bytes", -session.bytes_current);
    assert!(-session.bytes_current <= SESSION_BYTES as i64, "{} bytes", -session.bytes_current);
}

#[test]
fn changed_records_end_a_session_and_give_no_data() {
    let mut rng = fastrand::Rng::with_seed(7);
    for round in 0..200 {
        let Ended { mut host, mut target, .. } =
            shake(vec![key("a", 1, Hash::Sha256)], &[key("a", 1, Hash::Sha256)], 1 << 16);
        let mut wire = Vec::new();
        host.write(&[1; 100], &mut wire).expect("sent");
        let at = rng.usize(..wire.len());
        wire[at] ^= 1 << rng.u8(..8);
        let (mut input, mut plain) = (&wire[..], [0; 200]);
        // A longer length makes it wait for the rest.
        let found = target.read(&mut input, &mut plain);
        assert!(matches!(found, Err(TlsError::Protocol(_)) | Ok(0)), "round {round}: {found:?}");
        assert!(found.is_err() || (3..5).contains(&at));
        assert_eq!(plain, [0; 200]);
    }
}

#[test]
fn any_bytes_end_a_handshake_without_harm() {
    let mut rng = fastrand::Rng::with_seed(3);
    let known = [key("a", 1, Hash::Sha256)];
    let mut hello = Vec::new();
    let mut host = Session::connect(known.to_vec()).expect("a host");
    host.handshake(&mut &[][..], &mut hello).expect("begun");
    for _ in 0..2000 {
        let mut bytes = hello.clone();
        for _ in 0..rng.usize(1..8) {
            let at = rng.usize(..bytes.len());
            bytes[at] = rng.u8(..);
        }
        let mut output = Vec::new();
        let mut target = Session::accept(set(&known)).expect("a target");
        let found = target.handshake(&mut &bytes[..], &mut output);
        assert_ne!(found, Ok(Progress::Complete));
        // The first answer has a ServerHello and more, or an alert.
        assert!(output.len() < 4096);
    }
}

#[test]
fn an_endless_handshake_ends() {
    let mut target = Session::accept(set(&[])).expect("a target");
    let mut output = Vec::new();
    let mut taken = 0;
    // A record of a handshake message that promises 60,000 bytes.
    let mut first = vec![22, 3, 1, 0x40, 0, 1, 0, 0xea, 0x60];
    first.resize(5 + 0x4000, 0);
    let found = loop {
        let mut input = &first[..];
        let found = target.handshake(&mut input, &mut output);
        taken += first.len() - input.len();
        if found != Ok(Progress::Pending) {
            break found;
        }
        first = [&[22, 3, 1, 0x40, 0][..], &[0; 0x4000]].concat();
    };
    assert!(found.is_err(), "{found:?}");
    assert!(taken <= 2 * HANDSHAKE_MAX + 10, "{taken} bytes");
}

#[test]
fn keys_are_not_printed() {
    let printed = format!("{:?} {:?}", key("name", 0xab, Hash::Sha256), Session::accept(set(&[])));
    assert!(printed.contains("name") && !printed.contains("171") && !printed.contains("ab, "), "{printed}");
    assert!(matches!(Psk::new("", &[1; 32], Hash::Sha256), Err(TlsError::Key)));
    assert!(matches!(Psk::new("a", &[1; 8], Hash::Sha256), Err(TlsError::Key)));
}
