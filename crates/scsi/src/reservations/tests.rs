//! Persistent reservations against the standard's sections.

use super::*;
use Attention::{RegistrationsPreempted, ReservationsPreempted, ReservationsReleased};

/// Three nexuses with keys 10, 11 and 12; nexus 3 has none.
fn three() -> Reservations {
    let mut all = Reservations::default();
    (0..3).for_each(|n| drop(all.register(n, 0, 10 + u64::from(n), false).unwrap()));
    all
}

fn attentions(effects: &Effects) -> Vec<(u32, Attention)> {
    effects.attentions.clone()
}

#[test]
fn registering_requires_the_current_key() {
    let mut all = three();
    assert_eq!(all.register(0, 9, 20, false), Err(Refused::Conflict));
    assert_eq!(all.register(3, 9, 20, false), Err(Refused::Conflict));
    assert_eq!(all.generation(), 3);
    all.register(0, 10, 20, false).unwrap();
    all.register(1, 0, 21, true).unwrap();
    assert_eq!((all.key_of(0), all.key_of(1), all.generation()), (Some(20), Some(21), 5));
    all.register(3, 0, 0, false).unwrap();
    assert_eq!((all.registrations().len(), all.generation()), (3, 5), "nothing has changed");
}

#[test]
fn aptpl_of_an_unregistered_initiator_has_no_effect() {
    let change = |new, aptpl| Change::Register { new, ignore: false, aptpl };
    let mut all = Reservations::default();
    all.make(0, 0, change(10, true)).unwrap();
    all.make(3, 0, change(0, false)).unwrap();
    all.make(3, 0, Change::Register { new: 0, ignore: true, aptpl: false }).unwrap();
    assert!(all.aptpl(), "the initiator is not registered before or after");
    all.make(3, 0, change(13, false)).unwrap();
    assert!(!all.aptpl(), "the initiator registers");
    all.make(0, 10, change(20, true)).unwrap();
    assert!(all.aptpl(), "the initiator changes its key");
    all.make(3, 13, change(0, false)).unwrap();
    assert!(!all.aptpl(), "the initiator unregisters");
}

/// The holder, another registered initiator, and an unregistered one, against reading and changing (SPC-4, table 60).
#[test]
fn reservation_types_allow_what_the_table_says() {
    let (all, read, none) = ((true, true), (true, false), (false, false));
    let table = [
        (Kind::WriteExclusive, [all, read, read]),
        (Kind::ExclusiveAccess, [all, none, none]),
        (Kind::WriteExclusiveRegistrants, [all, all, read]),
        (Kind::ExclusiveAccessRegistrants, [all, all, none]),
        (Kind::WriteExclusiveAll, [all, all, read]),
        (Kind::ExclusiveAccessAll, [all, all, none]),
    ];
    for (kind, expected) in table {
        let mut r = three();
        r.reserve(0, 10, kind).unwrap();
        let may = |n| (r.allows(n, Access::Read), r.allows(n, Access::Change));
        assert_eq!([0, 1, 3].map(may), expected, "{kind:?}");
        assert!([0, 1, 3].into_iter().all(|n| r.allows(n, Access::None)));
        assert_eq!(Kind::from_code(kind as u8), Some(kind));
        let key = if kind.is_all() { 0 } else { 10 };
        assert_eq!(r.reservation(), Some((key, kind)));
    }
}

#[test]
fn only_the_holder_reserves_again_or_releases() {
    let mut r = three();
    assert_eq!(
        r.reserve(3, 0, Kind::WriteExclusive),
        Err(Refused::Conflict),
        "the initiator is not registered"
    );
    r.reserve(0, 10, Kind::WriteExclusiveRegistrants).unwrap();
    r.reserve(0, 10, Kind::WriteExclusiveRegistrants).unwrap();
    assert_eq!(r.reserve(0, 10, Kind::WriteExclusive), Err(Refused::Conflict));
    assert_eq!(r.reserve(1, 11, Kind::WriteExclusiveRegistrants), Err(Refused::Conflict));
    assert_eq!(r.release(1, 11, Kind::WriteExclusiveRegistrants), Ok(Effects::default()));
    assert!(r.holder().is_some(), "a release by a non-holder changes nothing");
    assert_eq!(r.release(0, 10, Kind::WriteExclusive), Err(Refused::Release));
    let effects = r.release(0, 10, Kind::WriteExclusiveRegistrants).unwrap();
    assert_eq!(attentions(&effects), [(1, ReservationsReleased), (2, ReservationsReleased)]);
    assert!(r.holder().is_none());
}

#[test]
fn a_reservation_ends_with_its_holder_or_with_the_last_of_all_registrants() {
    let mut r = three();
    r.reserve(0, 10, Kind::WriteExclusive).unwrap();
    assert_eq!(attentions(&r.register(0, 10, 0, false).unwrap()), []);
    assert!(r.holder().is_none());
    r.reserve(1, 11, Kind::ExclusiveAccessRegistrants).unwrap();
    assert_eq!(attentions(&r.register(1, 11, 0, false).unwrap()), [(2, ReservationsReleased)]);
    let mut r = three();
    r.reserve(0, 10, Kind::WriteExclusiveAll).unwrap();
    for (nexus, key) in [(0, 10), (1, 11)] {
        r.register(nexus, key, 0, false).unwrap();
        assert!(r.holder().is_some());
    }
    r.register(2, 12, 0, false).unwrap();
    assert!(r.holder().is_none());
}

#[test]
fn preempting_the_holder_takes_its_place() {
    let mut r = three();
    r.reserve(0, 10, Kind::WriteExclusiveRegistrants).unwrap();
    let effects = r.preempt(1, 11, 10, Kind::ExclusiveAccess).unwrap();
    assert_eq!(effects.removed, [0]);
    assert_eq!(attentions(&effects), [(0, RegistrationsPreempted), (2, ReservationsReleased)]);
    assert_eq!(r.reservation(), Some((11, Kind::ExclusiveAccess)));
    assert_eq!((r.key_of(0), r.key_of(2)), (None, Some(12)));
}

#[test]
fn preempting_others_leaves_the_reservation() {
    let mut r = three();
    r.reserve(0, 10, Kind::WriteExclusive).unwrap();
    let effects = r.preempt(1, 11, 12, Kind::WriteExclusive).unwrap();
    assert_eq!(effects.removed, [2]);
    assert_eq!(r.reservation(), Some((10, Kind::WriteExclusive)));
    assert_eq!(
        r.preempt(1, 11, 99, Kind::WriteExclusive),
        Err(Refused::Conflict),
        "no registration has that key"
    );
    assert_eq!(r.preempt(1, 11, 0, Kind::WriteExclusive), Err(Refused::Key));
    assert_eq!(
        r.preempt(1, 99, 10, Kind::WriteExclusive),
        Err(Refused::Conflict),
        "the initiator's own key differs"
    );
}

#[test]
fn key_0_preempts_all_of_an_all_registrants_reservation() {
    let mut r = three();
    r.reserve(0, 10, Kind::WriteExclusiveAll).unwrap();
    let effects = r.preempt(2, 12, 0, Kind::ExclusiveAccess).unwrap();
    assert_eq!(effects.removed, [0, 1]);
    assert_eq!(r.reservation(), Some((12, Kind::ExclusiveAccess)));
    // A holder may preempt itself, to change the type of its reservation.
    let effects = r.preempt(2, 12, 12, Kind::WriteExclusive).unwrap();
    assert_eq!((effects.removed, r.reservation()), (vec![], Some((12, Kind::WriteExclusive))));
}

#[test]
fn clearing_leaves_nothing() {
    let mut r = three();
    r.reserve(0, 10, Kind::ExclusiveAccess).unwrap();
    let effects = r.clear(1, 11).unwrap();
    assert_eq!(attentions(&effects), [(0, ReservationsPreempted), (2, ReservationsPreempted)]);
    assert!(r.holder().is_none() && r.registrations().is_empty());
    assert_eq!(r.clear(1, 11), Err(Refused::Conflict));
}
