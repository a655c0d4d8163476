//! Both sides against each other, and against values that Python's `hashlib`, `hmac`, `base64`, `zlib` and `pow` have computed.

use super::group::Private;
use super::message::{self, OfHost, Reply, failure2, success2};
use super::*;

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:0e4d9f5a-11aa-4c3b-8ad4-0a1b2c3d4e5f";
const SUBSYSTEM: &str = "nqn.2016-06.io.spdk:cnode1";
/// The bytes 0 to 31, transformed by SHA-256.
const OF_HOST: &str = "DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
/// The bytes 64 to 127, transformed by SHA-512.
const OF_CONTROLLER: &str =
    "DHHC-1:03:QEFCQ0RFRkdISUpLTE1OT1BRUlNUVVZXWFlaW1xdXl9gYWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXp7fH1+fx/Gj1o=:";
/// The bytes 0 to 47, which are not transformed.
const PLAIN: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:";

fn parties() -> Parties {
    Parties { host: HOST.parse().unwrap(), subsystem: SUBSYSTEM.parse().unwrap() }
}

fn secrets(host: &str, controller: Option<&str>) -> Arc<Secrets> {
    let parse = |text: &str| Secret::parse(text.as_bytes()).unwrap();
    Arc::new(Secrets { host: parse(host), controller: controller.map(parse) })
}

fn only(hash: Hash, group: Group) -> Allowed {
    Allowed { hashes: vec![hash], groups: vec![group] }
}

/// A controller and a host, which have these secrets.
fn sides(of_controller: Arc<Secrets>, of_host: Arc<Secrets>, allowed: &Allowed) -> (Controller, Host) {
    let controller = Controller::new(of_controller, parties(), allowed.clone());
    (controller, Host::new(of_host, parties(), 77, allowed))
}

/// Carries messages, which `change` may change, until both sides have ended. Returns how.
fn run(
    (controller, host): &mut (Controller, Host),
    mut change: impl FnMut(&mut Vec<u8>),
) -> (Progress, Action) {
    for _ in 0..10 {
        match host.action() {
            Action::Send(mut message) => {
                change(&mut message);
                controller.receive(&message);
            }
            Action::Receive => {
                let mut message = controller.send().expect("the host is told what comes");
                change(&mut message);
                host.receive(&message);
            }
            ended => return (controller.progress(), ended),
        }
    }
    panic!("it does not end");
}

#[test]
fn both_sides_agree_with_every_hash_and_group() {
    let both = secrets(OF_HOST, Some(OF_CONTROLLER));
    let combinations = Hash::ALL.map(|hash| (hash, Group::Null)).into_iter();
    for (hash, group) in combinations.chain(Group::ALL.map(|group| (Hash::Sha384, group))) {
        for of_host in [Arc::clone(&both), secrets(OF_HOST, None)] {
            let mut sides = sides(Arc::clone(&both), of_host, &only(hash, group));
            let done = (Progress::Authenticated, Action::Done);
            assert_eq!(run(&mut sides, |_| {}), done, "{hash:?} {group:?}");
        }
    }
}

#[test]
fn a_side_without_the_secret_fails() {
    let fine = || secrets(OF_HOST, Some(OF_CONTROLLER));
    let failed = (Progress::Failed(Failure::Failed), Action::Failed(Failure::Failed));
    for group in [Group::Null, Group::Ffdhe2048] {
        let allowed = only(Hash::Sha256, group);
        for (of_controller, of_host) in [
            (fine(), secrets(PLAIN, None)),
            (fine(), secrets(PLAIN, Some(OF_CONTROLLER))),
            (fine(), secrets(OF_HOST, Some(PLAIN))),
            (secrets(OF_HOST, None), fine()),
        ] {
            assert_eq!(run(&mut sides(of_controller, of_host, &allowed), |_| {}), failed);
        }
    }
    // The same secrets, but another host.
    let (controller, _) = sides(fine(), fine(), &only(Hash::Sha256, Group::Null));
    let other = Parties { host: "nqn.2016-06.io.spdk:other".parse().unwrap(), ..parties() };
    let host = Host::new(fine(), other, 1, &only(Hash::Sha256, Group::Null));
    assert_eq!(run(&mut (controller, host), |_| {}), failed);
}

#[test]
fn what_both_sides_have_in_common_is_chosen() {
    let both = secrets(OF_HOST, None);
    let choose = |of_controller: Allowed, of_host: Allowed| {
        let mut controller = Controller::new(Arc::clone(&both), parties(), of_controller);
        let mut host = Host::new(Arc::clone(&both), parties(), 1, &of_host);
        let Action::Send(message) = host.action() else { panic!("a host begins") };
        controller.receive(&message);
        let message = controller.send().unwrap();
        (message[0] == 1).then(|| (message[8], message[9])).ok_or(message[7])
    };
    let sha = only(Hash::Sha384, Group::Ffdhe2048);
    assert_eq!(choose(Allowed::default(), Allowed::default()), Ok((3, 2)));
    assert_eq!(choose(Allowed::default(), sha.clone()), Ok((2, 1)));
    assert_eq!(choose(sha.clone(), Allowed::default()), Ok((2, 1)));
    assert_eq!(choose(sha.clone(), only(Hash::Sha256, Group::Ffdhe2048)), Err(Failure::Hash as u8));
    assert_eq!(choose(sha, only(Hash::Sha384, Group::Null)), Err(Failure::Group as u8));
}

#[test]
fn a_host_authenticates_again() {
    let both = secrets(OF_HOST, Some(OF_CONTROLLER));
    let allowed = only(Hash::Sha512, Group::Null);
    let (mut controller, mut host) = sides(Arc::clone(&both), Arc::clone(&both), &allowed);
    for transaction in 1..4 {
        let mut sides = (controller, host);
        assert_eq!(run(&mut sides, |_| {}), (Progress::Authenticated, Action::Done));
        (controller, _) = sides;
        host = Host::new(Arc::clone(&both), parties(), transaction, &allowed);
    }
    // An authentication that was not ended is begun again.
    let mut left = Host::new(Arc::clone(&both), parties(), 9, &allowed);
    let Action::Send(message) = left.action() else { panic!("a host begins") };
    controller.receive(&message);
    assert_eq!(controller.progress(), Progress::Pending);
    assert_eq!(run(&mut (controller, host), |_| {}), (Progress::Authenticated, Action::Done));
}

#[test]
fn any_changed_byte_that_counts_is_noticed() {
    let both = || secrets(OF_HOST, Some(OF_CONTROLLER));
    let allowed = only(Hash::Sha256, Group::Null);
    // Bytes of heads that are reserved, or only describe the failure, may differ.
    let lens = [72, 48, 80, 48, 16];
    let reserved = |number: usize, at: usize| match number {
        0 => !matches!(at, 0 | 1 | 4..=8 | 10..=12 | 42),
        1 => matches!(at, 2 | 3 | 7),
        2 => matches!(at, 2 | 3 | 7 | 9),
        3 => matches!(at, 2 | 3 | 7 | 9..16),
        _ => !matches!(at, 0 | 1 | 4 | 5),
    };
    for (number, len) in lens.into_iter().enumerate() {
        for at in (0..len).filter(|at| !reserved(number, *at)) {
            let mut sides = sides(both(), both(), &allowed);
            let mut count = 0;
            let (progress, action) = run(&mut sides, |message| {
                if count == number {
                    assert_eq!(message.len(), len, "{number}");
                    message[at] ^= 0x81;
                }
                count += 1;
            });
            let is_noticed = matches!(progress, Progress::Failed(_) | Progress::Pending);
            assert!(is_noticed, "message {number}, byte {at}: {progress:?} {action:?}");
        }
    }
}

#[test]
fn messages_at_the_wrong_time_fail() {
    let both = secrets(OF_HOST, None);
    let reply = Reply { transaction: 77, proof: vec![0; 32], challenge: None, public: Vec::new() }.encode();
    let failed = |progress, code| {
        assert_eq!(progress, Progress::Failed(code));
    };
    for message in [reply.clone(), success2(77), vec![1, 1, 0, 0, 77, 0, 0, 0]] {
        let (mut controller, _) = sides(Arc::clone(&both), Arc::clone(&both), &Allowed::default());
        assert_eq!((controller.send(), controller.progress()), (None, Progress::Pending));
        controller.receive(&message);
        assert_eq!(controller.send().unwrap()[..8], [0, 0xf1, 0, 0, 0, 0, 1, Failure::Message as u8]);
        failed(controller.progress(), Failure::Message);
        controller.receive(&Negotiated::bytes());
        assert!(controller.send().unwrap()[1] == 0xf1, "a failure is the end");
    }
    // A reply before the challenge was read.
    let (mut controller, mut host) = sides(Arc::clone(&both), Arc::clone(&both), &Allowed::default());
    let Action::Send(message) = host.action() else { panic!("a host begins") };
    controller.receive(&message);
    controller.receive(&reply);
    let _ = controller.send();
    failed(controller.progress(), Failure::Message);
    // The host gives up.
    let (mut controller, _) = sides(Arc::clone(&both), both, &Allowed::default());
    controller.receive(&failure2(77, Failure::Group));
    failed(controller.progress(), Failure::Group);
}

/// A Negotiate as Linux sends it.
struct Negotiated;

impl Negotiated {
    fn bytes() -> Vec<u8> {
        let mut bytes = vec![0; 72];
        bytes[4..12].copy_from_slice(&[77, 0, 0, 1, 1, 0, 3, 6]);
        bytes[12..15].copy_from_slice(&[1, 2, 3]);
        bytes[42..48].copy_from_slice(&[0, 1, 2, 3, 4, 5]);
        bytes
    }
}

#[test]
fn negotiate_is_read_as_linux_writes_it() {
    let Ok(OfHost::Negotiate(negotiate)) = OfHost::decode(&Negotiated::bytes()) else { panic!("valid") };
    assert_eq!((negotiate.transaction, negotiate.hashes.len(), negotiate.groups.len()), (77, 3, 6));
    assert_eq!(message::OfHost::decode(&negotiate.encode()), Ok(OfHost::Negotiate(negotiate)));
    let with = |at: usize, byte: u8| {
        let mut bytes = Negotiated::bytes();
        bytes[at] = byte;
        OfHost::decode(&bytes).unwrap_err()
    };
    assert_eq!(with(6, 1), Failure::Concatenation);
    assert_eq!(
        (with(7, 0), with(7, 2), with(8, 2)),
        (Failure::Protocol, Failure::Payload, Failure::Protocol)
    );
    assert_eq!((with(10, 31), with(11, 31)), (Failure::Payload, Failure::Payload));
    for len in 0..72 {
        assert!(OfHost::decode(&Negotiated::bytes()[..len]).is_err(), "{len}");
    }
}

#[test]
fn proofs_are_those_of_the_specification() {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    for (hash, of_host, of_controller) in [
        (
            Hash::Sha256,
            "b6d440711319c0287e6a6775f0b770a567fda4ef8e87a5b373bb3b3f7a3830d5",
            "c6830fe545eed9d4c08958479163518c96fa5c27346935d254e12ea5c8174ea2",
        ),
        (
            Hash::Sha384,
            "494d70db997f424c80af31da500cfe08384b44436a76a3533ce4c6cd01b52221e7e35cc514f282ec293e2438d038dc65",
            "d74974bae5011bd057106cd48be6f542485d03e9220415321d2e1d049a9e3cafd3c2ca9cf66fdc22fd0642c0ed2872e0",
        ),
        (
            Hash::Sha512,
            "2b9e9e7f862932cfd0213733c94b4c74b6446f560e0c39d59ca94edb129a2b5e\
             72cd0289abc05c4f4675212dde07eef235b48de073a7709e5de1049534d71780",
            "59ca5ea1b8259a5c687a984d68b76e9c22e7256f44a0cbc3d9536fa0b3819a87\
             59de275d333cb11d8c2762f17e34859da692e63cede3fb68f469e175dc29aa35",
        ),
    ] {
        let secrets = secrets(OF_HOST, Some(OF_CONTROLLER));
        let mut session = Session { secrets, parties: parties(), transaction: 0x0506, hash, shared: None };
        let challenge = vec![0xa0 + hash as u8; hash.value_len()];
        let (key, proved) = session.of_host(&challenge, 0x0102_0304);
        assert_eq!(hex(hmac::sign(&key, &proved).as_ref()), of_host);
        session.share(&(0..=255).collect::<Vec<u8>>());
        let (key, proved) = session.of_controller(&challenge, 0x0102_0304).unwrap();
        assert_eq!(hex(hmac::sign(&key, &proved).as_ref()), of_controller);
    }
}

#[test]
fn powers_are_those_of_the_groups() {
    let of = |bytes: &[u8]| -> String {
        let hash = digest::digest(&digest::SHA256, bytes);
        hash.as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    };
    let private: [u8; 50] = std::array::from_fn(|at| at as u8 + 1);
    for (group, public, shared) in [
        (Group::Ffdhe2048, "456035a85351f974", "4028d65d7e4de922"),
        (Group::Ffdhe3072, "0f26665a0d295d02", "1c887e2b3fab8c7a"),
        (Group::Ffdhe4096, "a05c0869d18e5a00", "32239cf144c2509a"),
        (Group::Ffdhe6144, "b81335fea9f63411", "a53c8a279142177e"),
        (Group::Ffdhe8192, "a11aac1d123c220b", "8e8e36d279ee985c"),
    ] {
        let private = Private::with(group, &private).unwrap();
        assert_eq!((of(&private.public()), private.public().len()), (public.into(), group.value_len()));
        let other = vec![0x5a; group.value_len()];
        assert_eq!(of(&private.agree(&other).unwrap()), shared);
    }
}

#[test]
fn public_values_without_a_secret_are_refused() {
    let private = Private::random(Group::Ffdhe2048).unwrap();
    let mut last = vec![0xff; 256];
    last[..8].fill(0);
    let small = |byte| [vec![0; 255], vec![byte]].concat();
    for wrong in [small(0), small(1), vec![0xff; 256], vec![1; 257], Vec::new()] {
        assert_eq!(private.agree(&wrong).map(drop), Err(Failure::Payload), "{wrong:?}");
    }
    assert!(private.agree(&small(2)).is_ok() && private.agree(&last).is_ok());
}

#[test]
fn secrets_are_read_and_never_printed() {
    for text in [OF_HOST, OF_CONTROLLER, PLAIN] {
        let secret = Secret::parse(format!("{text}\n").as_bytes()).unwrap();
        assert!(!format!("{secret:?}").contains('['), "{secret:?}");
    }
    let with = |from: &str, to: &str| Secret::parse(OF_HOST.replace(from, to).as_bytes()).map(drop);
    assert_eq!(with("AAEC", "AAED"), Err(SecretError::Checksum));
    assert_eq!(with(":01:", ":04:"), Err(SecretError::Hash));
    assert_eq!(with(":01:", ":11:"), Err(SecretError::Form));
    assert_eq!(with("DHHC-1", "DHHC-2"), Err(SecretError::Form));
    assert_eq!(with("iaR:", "iaR"), Err(SecretError::Form));
    assert_eq!(with("AAEC", "A*EC"), Err(SecretError::Form));
    assert_eq!(with("AAEC", ""), Err(SecretError::Length));
    assert_eq!(Secret::parse(&[b'A'; 1000]).map(drop), Err(SecretError::Form));
    assert_eq!(Secret::parse(b"").map(drop), Err(SecretError::Form));
}
