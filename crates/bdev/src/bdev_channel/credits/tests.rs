//! Credits of channels, alone and of a pool: who has one, and who is next.

use super::*;
use aryk_reactor::{Clock, CoreSet, Engine, Reactor, Root, SleepPolicy};
use std::convert::Infallible;

struct Nothing;

impl Root for Nothing {
    fn poll(&mut self, _: &mut Cx) -> bool {
        false
    }
}

fn reactor() -> Reactor {
    Reactor::new(0, SleepPolicy::Poll, Engine::Epoll, Clock::Monotonic).unwrap()
}

/// Channels that share `pool`, of `depth` credits each.
fn channels<const N: usize>(reactor: &mut Reactor, depth: u32, pool: &CreditPool) -> [Credits; N] {
    let cx = reactor.cx();
    let thread = cx.add_thread("test", CoreSet::allowed());
    std::array::from_fn(|_| {
        let root = cx.add_root(thread, "channel", |_, _| Ok::<_, Infallible>(Nothing)).unwrap();
        Credits::new(depth, Some(pool.clone()), root.id(), cx.local())
    })
}

#[test]
fn a_channel_has_its_depth_and_its_bytes() {
    let mut reactor = reactor();
    let cx = reactor.cx();
    let thread = cx.add_thread("test", CoreSet::allowed());
    let root = cx.add_root(thread, "channel", |_, _| Ok::<_, Infallible>(Nothing)).unwrap();
    let mut credits = Credits::new(2, None, root.id(), cx.local());
    assert!(credits.try_take() && credits.try_take() && !credits.try_take());
    credits.give_back(cx);
    credits.spend(POLL_BYTES + Bytes(1));
    assert!(!credits.try_take() && credits.is_out_of_bytes());
    credits.begin_poll();
    assert!(credits.try_take() && !credits.is_out_of_bytes());
    assert_eq!(credits.at_device(), 2);
}

#[test]
fn channels_that_are_short_have_their_turns_round_robin() {
    let (mut reactor, pool) = (reactor(), CreditPool::new(2));
    let [mut a, mut b, mut c] = channels(&mut reactor, 8, &pool);
    assert!(a.try_take() && a.try_take());
    assert!(!b.try_take() && !c.try_take() && !a.try_take());
    // The credit is b's, though a asks before b does.
    a.give_back(reactor.cx());
    assert!(!a.try_take() && !c.try_take() && b.try_take());
    assert!(!b.try_take(), "it stands behind c and a");
    a.give_back(reactor.cx());
    assert!(!a.try_take() && !b.try_take() && c.try_take());
    b.give_back(reactor.cx());
    assert!(!b.try_take() && a.try_take());
    c.give_back(reactor.cx());
    assert!(b.try_take());
    a.give_back(reactor.cx());
    b.give_back(reactor.cx());
    assert_eq!(pool.free(), 2);
}

#[test]
fn a_credit_that_is_not_wanted_goes_to_the_next_channel() {
    let (mut reactor, pool) = (reactor(), CreditPool::new(1));
    let [mut a, mut b, mut c, d] = channels(&mut reactor, 8, &pool);
    assert!(a.try_take() && !b.try_take() && !c.try_take());
    a.give_back(reactor.cx());
    b.decline(reactor.cx());
    assert!(!b.try_take() && c.try_take());
    // Closed channels leave the line, and give back what they were granted.
    drop(b);
    c.give_back(reactor.cx());
    assert_eq!(pool.free(), 1);
    assert!(a.try_take() && !c.try_take());
    a.give_back(reactor.cx());
    drop(c);
    assert_eq!(pool.free(), 1);
    drop(d);
}

#[test]
fn a_channel_that_has_nothing_to_send_leaves_the_line() {
    let (mut reactor, pool) = (reactor(), CreditPool::new(1));
    let [mut a, mut b, mut c] = channels(&mut reactor, 8, &pool);
    assert!(a.try_take() && !b.try_take() && !c.try_take());
    // However often it joins and leaves, it has one place.
    for _ in 0..100 {
        b.decline(reactor.cx());
        assert!(!b.try_take());
    }
    b.decline(reactor.cx());
    assert_eq!(pool.0.line.borrow().len(), 2);
    a.give_back(reactor.cx());
    assert!(!b.try_take() && c.try_take(), "the credit went past it");
    c.give_back(reactor.cx());
    assert!(b.try_take());
    b.give_back(reactor.cx());
    assert_eq!((pool.free(), pool.0.line.borrow().len()), (1, 0));
}

#[test]
#[should_panic(expected = "a device completes a piece once")]
fn a_credit_does_not_come_back_twice() {
    let (mut reactor, pool) = (reactor(), CreditPool::new(1));
    let [mut a] = channels(&mut reactor, 8, &pool);
    assert!(a.try_take());
    a.give_back(reactor.cx());
    a.give_back(reactor.cx());
}

#[test]
fn a_channel_has_its_own_pieces_beside_a_pool_that_others_have_taken() {
    let (mut reactor, pool) = (reactor(), CreditPool::own(2, 1));
    let [mut a, mut b] = channels(&mut reactor, 8, &pool);
    assert!(a.try_take() && a.try_take() && a.try_take());
    assert!(b.try_take() && !b.try_take(), "its own one");
    b.give_back(reactor.cx());
    assert_eq!((pool.free(), b.at_device()), (0, 0), "nothing of the pool came back");
    assert!(b.try_take() && !b.try_take());
    a.give_back(reactor.cx());
    assert!(b.try_take() && !b.try_take(), "the credit of a");
    for _ in 0..2 {
        a.give_back(reactor.cx());
        b.give_back(reactor.cx());
    }
    assert_eq!((a.at_device(), b.at_device()), (0, 0));
    a.decline(reactor.cx());
    b.decline(reactor.cx());
    assert_eq!(pool.free(), 2);
}
