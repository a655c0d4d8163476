//! Tests of reservations, by the commands of three hosts.

use super::*;
use crate::io::{Range, Request};

const A: HostId = [0xa; 16];
const B: HostId = [0xb; 16];
const C: HostId = [0xc; 16];
const CONFLICT: Result<Effects, Code> = Err(Code::RESERVATION_CONFLICT);
const INVALID: Result<Effects, Code> = Err(Code::INVALID_FIELD);

fn nothing() -> Result<Effects, Code> {
    Ok(Effects::default())
}

fn notices(notices: &[(HostId, Notice)]) -> Result<Effects, Code> {
    Ok(Effects { notices: notices.to_vec(), preempted: Vec::new() })
}

fn preempted(hosts: &[HostId], others: &[(HostId, Notice)]) -> Result<Effects, Code> {
    let gone = hosts.iter().map(|host| (*host, Notice::RegistrationPreempted));
    Ok(Effects { notices: gone.chain(others.iter().copied()).collect(), preempted: hosts.to_vec() })
}

/// The key of a host.
fn key(host: HostId) -> u64 {
    host[0].into()
}

impl Reservations {
    /// A and B are registered, and A holds a reservation of this type.
    fn held(kind: Kind) -> Self {
        let mut this = Self::default();
        for host in [A, B] {
            this.registers(host, key(host)).unwrap();
        }
        this.acquires(A, kind).unwrap();
        this
    }

    fn changes(&mut self, host: HostId, action: Action, key: Option<u64>) -> Result<Effects, Code> {
        self.execute(host, Command::Register { action, key, persists: None })
    }

    fn registers(&mut self, host: HostId, key: u64) -> Result<Effects, Code> {
        self.changes(host, Action::Register(key), Some(0))
    }

    fn unregisters(&mut self, host: HostId) -> Result<Effects, Code> {
        self.changes(host, Action::Unregister, Some(key(host)))
    }

    fn acquires(&mut self, host: HostId, kind: Kind) -> Result<Effects, Code> {
        self.execute(host, Command::Acquire { key: key(host), kind })
    }

    fn preempts(&mut self, host: HostId, victim: u64, kind: Kind) -> Result<Effects, Code> {
        self.execute(host, Command::Preempt { key: key(host), victim, kind, aborts: false })
    }

    fn releases(&mut self, host: HostId, kind: Kind) -> Result<Effects, Code> {
        self.execute(host, Command::Release { key: key(host), kind })
    }

    fn hosts(&self) -> Vec<HostId> {
        self.state.registrants.iter().map(|of| of.host).collect()
    }

    fn holder(&self) -> Option<(HostId, Kind)> {
        self.state.holder
    }
}

#[test]
fn each_type_leaves_hosts_the_accesses_of_the_specification() {
    let range = Range { lba: 0, blocks: 1 };
    let reads = [Request::Read(range), Request::Compare(range)];
    let writes = [
        Request::Write { range, fua: false },
        Request::WriteZeroes { range, fua: false, may_deallocate: false },
        Request::Deallocate { ranges: 1 },
        Request::Hint,
        Request::Flush,
    ];
    // Reads and writes of the holder, of another registrant, and of a host that is not registered.
    let table = [
        (Kind::WriteExclusive, [(true, true), (true, false), (true, false)]),
        (Kind::ExclusiveAccess, [(true, true), (false, false), (false, false)]),
        (Kind::WriteExclusiveRegistrants, [(true, true), (true, true), (true, false)]),
        (Kind::ExclusiveAccessRegistrants, [(true, true), (true, true), (false, false)]),
        (Kind::WriteExclusiveAll, [(true, true), (true, true), (true, false)]),
        (Kind::ExclusiveAccessAll, [(true, true), (true, true), (false, false)]),
    ];
    for (kind, expected) in table {
        let reservations = Reservations::held(kind);
        for (host, (may_read, may_write)) in [A, B, C].into_iter().zip(expected) {
            let rights = reservations.rights(&host);
            let are =
                |requests: &[Request], allowed| requests.iter().all(|of| of.is_allowed(rights) == allowed);
            assert!(are(&reads, may_read) && are(&writes, may_write), "{kind:?} {host:?}: {rights:?}");
            assert!(are(&[Request::Reserve, Request::Report { len: 4 }], true));
        }
    }
    let mut free = Reservations::default();
    free.registers(A, 1).unwrap();
    assert_eq!([A, C].map(|host| free.rights(&host)), [Rights::All; 2]);
}

#[test]
fn hosts_register_replace_and_unregister_their_keys() {
    let mut all = Reservations::default();
    assert_eq!(all.registers(A, 0), INVALID);
    assert_eq!(all.registers(A, 1), nothing());
    assert_eq!(
        (all.registers(A, 1), all.registers(A, 2)),
        (nothing(), CONFLICT),
        "the same key may come again"
    );
    assert_eq!(all.registers(B, 1), nothing(), "hosts may share a key");
    assert_eq!(all.changes(A, Action::Replace(3), Some(2)), CONFLICT);
    assert_eq!(all.changes(A, Action::Replace(0), Some(1)), INVALID);
    assert_eq!(all.changes(A, Action::Replace(3), Some(1)), nothing());
    assert_eq!(all.changes(A, Action::Replace(4), None), nothing(), "IEKEY");
    assert_eq!(all.key_of(&A), Some(4));
    assert_eq!(all.changes(C, Action::Replace(5), Some(0)), CONFLICT);
    assert_eq!(all.changes(C, Action::Replace(5), None), nothing(), "IEKEY registers");
    assert_eq!(all.changes(C, Action::Unregister, Some(4)), CONFLICT);
    assert_eq!(all.changes(C, Action::Unregister, None), nothing());
    assert_eq!(all.changes(C, Action::Unregister, None), CONFLICT);
    assert_eq!((all.hosts(), all.generation), (vec![A, B], 7), "what succeeds counts");

    for number in 0..254_u8 {
        all.registers([number, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 1).unwrap();
    }
    assert_eq!((all.hosts().len(), all.registers(C, 1)), (REGISTRANTS_MAX, Err(Code::INTERNAL_ERROR)));
    assert_eq!(all.changes(C, Action::Replace(1), None), Err(Code::INTERNAL_ERROR));
}

#[test]
fn a_reservation_has_one_holder_unless_all_registrants_hold_it() {
    let mut free = Reservations::default();
    assert_eq!(free.acquires(A, Kind::WriteExclusive), CONFLICT, "not registered");
    for kind in Kind::ALL {
        let mut held = Reservations::held(kind);
        assert_eq!(held.acquires(A, kind), nothing());
        let is_all = kind as u8 >= 5;
        assert_eq!(held.acquires(B, kind), if is_all { nothing() } else { CONFLICT });
        let other = Kind::ALL[(kind as usize) % 6];
        assert_eq!(held.acquires(A, other), CONFLICT, "the type does not change");
        assert_eq!(held.execute(A, Command::Acquire { key: 1, kind }), CONFLICT);
        assert_eq!(held.acquires(C, kind), CONFLICT);

        assert_eq!(held.releases(A, other), INVALID);
        assert_eq!(held.releases(C, kind), CONFLICT);
        if !is_all {
            assert_eq!(held.releases(B, kind), nothing(), "B has nothing to release");
            assert_eq!(held.holder(), Some((A, kind)));
        }
        let releases = if kind as u8 >= 3 { notices(&[(B, Notice::ReservationReleased)]) } else { nothing() };
        assert_eq!(held.releases(A, kind), releases);
        assert_eq!((held.holder(), held.releases(A, kind)), (None, nothing()));
    }
}

#[test]
fn the_reservation_ends_with_the_registration_of_its_last_holder() {
    for kind in Kind::ALL {
        let mut held = Reservations::held(kind);
        let told = matches!(kind as u8, 3 | 4);
        let expected = if told { notices(&[(B, Notice::ReservationReleased)]) } else { nothing() };
        assert_eq!(held.unregisters(A), expected);
        let is_all = kind as u8 >= 5;
        assert_eq!(held.holder(), is_all.then_some((B, kind)));
        assert_eq!((held.unregisters(B), held.holder()), (nothing(), None));
    }
    let mut held = Reservations::held(Kind::WriteExclusive);
    held.unregisters(B).unwrap();
    assert_eq!(held.holder(), Some((A, Kind::WriteExclusive)));
}

#[test]
fn a_registrant_preempts_the_holder_or_other_registrants() {
    let next = Kind::ExclusiveAccess;
    for kind in [Kind::WriteExclusive, Kind::ExclusiveAccessRegistrants] {
        let mut held = Reservations::held(kind);
        held.registers(C, key(C)).unwrap();
        assert_eq!(held.preempts(B, 0, next), INVALID);
        assert_eq!(held.preempts(B, 99, next), CONFLICT);
        let released: &[_] = if kind as u8 >= 3 { &[(C, Notice::ReservationReleased)] } else { &[] };
        assert_eq!(held.preempts(B, key(A), next), preempted(&[A], released));
        assert_eq!((held.holder(), held.hosts()), (Some((B, next)), vec![B, C]));
        assert_eq!(held.preempts(A, key(B), next), CONFLICT, "A is registered no more");
        // A registrant that is no holder loses its registration only.
        assert_eq!(held.preempts(B, key(C), kind), preempted(&[C], &[]));
        assert_eq!((held.holder(), held.hosts()), (Some((B, next)), vec![B]));
        // The holder changes the type.
        assert_eq!(held.preempts(B, key(B), kind), nothing());
        assert_eq!((held.holder(), held.hosts()), (Some((B, kind)), vec![B]));
    }
    let mut all = Reservations::held(Kind::WriteExclusiveAll);
    all.registers(C, key(C)).unwrap();
    assert_eq!(all.preempts(B, key(A), next), preempted(&[A], &[]));
    assert_eq!(all.holder(), Some((B, Kind::WriteExclusiveAll)), "the others hold it");
    assert_eq!(all.preempts(C, 0, next), preempted(&[B], &[]));
    assert_eq!((all.holder(), all.hosts()), (Some((C, next)), vec![C]));

    let mut free = Reservations::default();
    free.registers(A, key(A)).unwrap();
    free.registers(B, key(B)).unwrap();
    assert_eq!((free.preempts(A, 0, next), free.preempts(A, 99, next)), (INVALID, CONFLICT));
    assert_eq!(free.preempts(A, key(B), next), preempted(&[B], &[]));
    assert_eq!((free.holder(), free.hosts()), (None, vec![A]));
}

#[test]
fn a_registrant_clears_everything() {
    let mut held = Reservations::held(Kind::WriteExclusive);
    assert_eq!(held.execute(C, Command::Clear { key: key(C) }), CONFLICT);
    assert_eq!(held.execute(B, Command::Clear { key: key(A) }), CONFLICT);
    let cleared = held.execute(B, Command::Clear { key: key(B) });
    assert_eq!(cleared, notices(&[(A, Notice::ReservationPreempted)]));
    assert_eq!((held.holder(), held.hosts(), held.generation), (None, Vec::new(), 3));
}

#[test]
fn a_report_has_the_registrants_with_their_identifiers() {
    let mut held = Reservations::held(Kind::WriteExclusive);
    let persists = Command::Register { action: Action::Register(key(C)), key: None, persists: Some(true) };
    held.execute(C, persists).unwrap();
    let report = held.report(300);
    assert_eq!((&report[..5], &report[5..7], report[9]), (&[3, 0, 0, 0, 1][..], &[3, 0][..], 1));
    for (number, host) in [A, B, C].into_iter().enumerate() {
        let registrant = &report[64 * (number + 1)..][..64.min(300 - 64 * (number + 1))];
        assert_eq!(registrant[..8], [0xff, 0xff, u8::from(host == A), 0, 0, 0, 0, 0]);
        assert_eq!(registrant[8..16], key(host).to_le_bytes());
        assert_eq!(registrant[16..32], host);
    }
    assert_eq!(held.report(8), report[..8]);
    let all = Reservations::held(Kind::ExclusiveAccessAll).report(200);
    assert_eq!((all[66], all[130], all.len()), (1, 1, 200), "both hold it");

    let command = |dwords: u32, extended| {
        SubmissionEntry::new(io::RESERVATION_REPORT, 1).with_cdw10_11(dwords, extended)
    };
    assert_eq!(report_len(&command(15, 1), 4096), Ok(64));
    assert_eq!(report_len(&command(15, 1), 63), Err(Code::SGL_DATA_LENGTH_INVALID));
    assert_eq!(report_len(&command(u32::MAX, 1), u32::MAX), Err(Code::SGL_DATA_LENGTH_INVALID));
    assert_eq!(report_len(&command(15, 0), 4096), Err(Code::HOST_ID_INCONSISTENT));
}

#[test]
fn commands_are_decoded() {
    let mut data = [0; DATA_LEN];
    (data[0], data[8]) = (7, 9);
    let decode = |opcode, cdw10| {
        let entry = SubmissionEntry::new(opcode, 1).with_cdw10_11(cdw10, 0);
        Command::decode(&entry, &data)
    };
    let register = |action, key, persists| Ok(Command::Register { action, key, persists });
    let (invalid, ignore) = (Err(Code::INVALID_FIELD), 1 << 3);
    assert_eq!(decode(io::RESERVATION_REGISTER, 0), register(Action::Register(9), Some(7), None));
    assert_eq!(decode(io::RESERVATION_REGISTER, 1 | ignore), register(Action::Unregister, None, None));
    assert_eq!(
        decode(io::RESERVATION_REGISTER, 2 | 2 << 30),
        register(Action::Replace(9), Some(7), Some(false))
    );
    assert_eq!(
        decode(io::RESERVATION_REGISTER, 2 | 3 << 30),
        register(Action::Replace(9), Some(7), Some(true))
    );
    assert_eq!(
        (decode(io::RESERVATION_REGISTER, 3), decode(io::RESERVATION_REGISTER, 1 << 30)),
        (invalid, invalid)
    );

    let kind = Kind::ExclusiveAccessAll;
    assert_eq!(decode(io::RESERVATION_ACQUIRE, 6 << 8), Ok(Command::Acquire { key: 7, kind }));
    for (action, aborts) in [(1, false), (2, true)] {
        let preempt = Command::Preempt { key: 7, victim: 9, kind, aborts };
        assert_eq!(
            (decode(io::RESERVATION_ACQUIRE, action | 6 << 8), preempt.aborts()),
            (Ok(preempt), aborts)
        );
    }
    assert_eq!(decode(io::RESERVATION_RELEASE, 6 << 8), Ok(Command::Release { key: 7, kind }));
    assert_eq!(decode(io::RESERVATION_RELEASE, 1), Ok(Command::Clear { key: 7 }));
    for cdw10 in [0, 7 << 8, 0xff << 8, 6 << 8 | ignore, 6 << 8 | 7] {
        assert_eq!(decode(io::RESERVATION_ACQUIRE, cdw10), invalid, "{cdw10:x}");
        assert_eq!(decode(io::RESERVATION_RELEASE, cdw10), invalid, "{cdw10:x}");
    }
    assert_eq!(
        (decode(io::RESERVATION_ACQUIRE, 3 | 6 << 8), decode(io::RESERVATION_RELEASE, 2)),
        (invalid, invalid)
    );
    assert_eq!(decode(io::WRITE, 0), Err(Code::INVALID_OPCODE));
}

#[test]
fn what_is_stored_comes_back_as_far_as_it_is_consistent() {
    let held = Reservations::held(Kind::WriteExclusiveRegistrants);
    assert_eq!(Reservations::restored(held.state().clone()).state(), held.state());
    let of = |host, key| Registrant { host, key };
    let holder = Some((C, Kind::WriteExclusive));
    let wrong = State { registrants: vec![of(A, 1), of(A, 2), of(B, 0)], holder, persists: true };
    let expected = State { registrants: vec![of(A, 1)], holder: None, persists: true };
    assert_eq!(Reservations::restored(wrong).state(), &expected);
    let many =
        (0..300_u16).map(|n| of([n as u8, (n >> 8) as u8, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 1));
    let many = State { registrants: many.collect(), holder: None, persists: false };
    assert_eq!(Reservations::restored(many).hosts().len(), REGISTRANTS_MAX);
}
