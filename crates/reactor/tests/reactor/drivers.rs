//! Drivers: when they are reaped, by which events they are woken, how channels share them. In virtual time, with both engines.

use crate::support::{ENGINES, Time, add, kick, reactor, settle};
use aryk_reactor::{
    Armed, Cx, Driver, DriverId, DriverKey, DriverRef, Nanos, Outbox, Reactor, Root, RootId, RootRef,
    SleepPolicy, Step, ThreadId,
};
use rustix::event::{EventfdFlags, eventfd};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

/// The device of the driver: a queue pair whose interrupt is an eventfd.
struct Device {
    key: DriverKey,
    interrupt: OwnedFd,
    is_armed: Cell<bool>,
    /// Requests that are submitted and not flushed; below, all requests that were ever flushed.
    queued: Cell<u32>,
    started: Cell<u32>,
    /// Completions to be reaped, each by the number of its channel.
    done: RefCell<VecDeque<usize>>,
    reaps: Cell<u32>,
}

impl Device {
    fn new() -> Rc<Self> {
        Rc::new(Self {
            key: DriverKey::unique(),
            interrupt: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
            is_armed: Cell::new(false),
            queued: Cell::new(0),
            started: Cell::new(0),
            done: RefCell::default(),
            reaps: Cell::new(0),
        })
    }

    fn complete(&self, channel: usize, count: u32) {
        self.done.borrow_mut().extend((0..count).map(|_| channel));
        if self.is_armed.take() {
            kick(&self.interrupt);
        }
    }
}

struct QueuePair {
    device: Rc<Device>,
    outboxes: Vec<Outbox<u32>>,
    in_flight: u32,
}

impl QueuePair {
    fn submit(&mut self, count: u32) {
        self.in_flight += count;
        self.device.queued.update(|queued| queued + count);
    }
}

impl Driver for QueuePair {
    fn reap(&mut self, budget: u32, cx: &mut Cx) -> u32 {
        let device = Rc::clone(&self.device);
        device.reaps.update(|reaps| reaps + 1);
        device.is_armed.set(false);
        let mut done = device.done.borrow_mut();
        let count = done.len().min(budget as usize);
        done.drain(..count).for_each(|channel| self.outboxes[channel].push(1, cx));
        self.in_flight -= count as u32;
        count as u32
    }

    fn flush(&mut self, _: &mut Cx) {
        self.device.started.update(|started| started + self.device.queued.take());
    }

    fn arm(&mut self, _: &mut Cx) -> Armed {
        assert_eq!(self.device.queued.get(), 0, "a driver is flushed before it is armed");
        self.device.is_armed.set(true);
        if self.device.done.borrow().is_empty() { Armed::Yes } else { Armed::Busy }
    }

    fn in_flight(&self) -> u32 {
        self.in_flight
    }
}

struct Channel {
    driver: DriverRef<QueuePair>,
    number: usize,
    got: u32,
}

impl Root for Channel {
    fn poll(&mut self, _: &mut Cx) -> bool {
        let mut new = Vec::new();
        self.driver.borrow_mut().outboxes[self.number].take(&mut new);
        self.got += new.len() as u32;
        !new.is_empty()
    }
}

fn driver(device: &Rc<Device>, cx: &mut Cx) -> DriverRef<QueuePair> {
    let make = |id: DriverId, cx: &mut Cx| {
        cx.watch_driver(device.interrupt.try_clone()?, id)?;
        Ok::<_, io::Error>(QueuePair { device: Rc::clone(device), outboxes: Vec::new(), in_flight: 0 })
    };
    cx.driver(device.key, make).unwrap()
}

fn channel(device: &Rc<Device>, thread: ThreadId, cx: &mut Cx) -> RootRef<Channel> {
    let make = |root: RootId, cx: &mut Cx| {
        let driver = driver(device, cx);
        let mut pair = driver.borrow_mut();
        let number = pair.outboxes.len();
        pair.outboxes.push(Outbox::new(root));
        drop(pair);
        Ok::<_, Infallible>(Channel { driver, number, got: 0 })
    };
    let Ok(channel) = cx.add_root(thread, "channel", make);
    channel
}

fn submit(channel: &RootRef<Channel>, count: u32, cx: &mut Cx) {
    let channel = cx.root::<Channel>(channel.id()).unwrap();
    channel.borrow().driver.activate(cx).submit(count);
}

fn got(channel: &RootRef<Channel>, reactor: &mut Reactor) -> u32 {
    reactor.cx().root::<Channel>(channel.id()).unwrap().borrow().got
}

#[test]
fn a_descriptor_wakes_its_driver_which_is_reaped_in_the_same_turn() {
    for engine in ENGINES {
        let (mut reactor, thread) = reactor(SleepPolicy::Interrupt, engine, &Time::default());
        let device = Device::new();
        let channel = channel(&device, thread, reactor.cx());
        for round in 1..=3 {
            settle(&mut reactor);
            assert!(device.is_armed.get());
            submit(&channel, 3, reactor.cx());
            reactor.turn();
            assert_eq!(device.started.get(), 3 * round);
            settle(&mut reactor);
            let reaps = device.reaps.get();
            (0..10).for_each(|_| assert_eq!(reactor.step(), Step::Slept(None)));
            assert_eq!((device.reaps.get(), device.is_armed.get()), (reaps, true));
            device.complete(0, 3);
            // The kernel may take a moment to report the descriptor.
            let mut turns = 0;
            while device.reaps.get() == reaps {
                assert!(turns < 1000, "{engine:?}: the driver is not woken");
                turns += 1;
                reactor.turn();
            }
            assert_eq!((device.reaps.get(), got(&channel, &mut reactor)), (reaps + 1, 3 * round));
        }
    }
}

#[test]
fn a_reactor_polls_longer_while_a_driver_has_requests_in_flight() {
    for engine in ENGINES {
        for in_flight in [0, 1] {
            let time = Time::default();
            let (mut reactor, thread) = reactor(SleepPolicy::Adaptive, engine, &time);
            let device = Device::new();
            let channel = channel(&device, thread, reactor.cx());
            settle(&mut reactor);
            submit(&channel, in_flight, reactor.cx());
            let mut slept = Vec::new();
            for _ in 0..20 {
                // Longer than the window without requests in flight.
                let at = Nanos(time.nanos()).after(Duration::from_micros(150));
                reactor.cx().call_at(at, |_| ());
                let mut did_sleep = false;
                loop {
                    match reactor.step() {
                        Step::Worked => break,
                        Step::Polled => time.pass(Duration::from_micros(1)),
                        Step::Slept(until) => {
                            did_sleep = true;
                            time.set(until.unwrap().0);
                        }
                    }
                }
                slept.push(did_sleep);
            }
            assert_eq!(slept[12..], [in_flight == 0; 8], "{engine:?} {in_flight} {slept:?}");
        }
    }
}

#[test]
fn channels_share_a_driver_and_the_last_removes_it() {
    for engine in ENGINES {
        let (mut reactor, thread) = reactor(SleepPolicy::Interrupt, engine, &Time::default());
        let device = Device::new();
        let open = |reactor: &mut Reactor| channel(&device, thread, reactor.cx());
        let id = |channel: &RootRef<Channel>, reactor: &mut Reactor| {
            reactor.cx().root::<Channel>(channel.id()).unwrap().borrow().driver.id()
        };
        let (first, second) = (open(&mut reactor), open(&mut reactor));
        let shared = id(&first, &mut reactor);
        assert_eq!(id(&second, &mut reactor), shared);
        submit(&first, 1, reactor.cx());
        submit(&second, 2, reactor.cx());
        device.complete(1, 2);
        device.complete(0, 1);
        settle(&mut reactor);
        assert_eq!((got(&first, &mut reactor), got(&second, &mut reactor)), (1, 2));
        reactor.cx().remove_root(first.id());
        settle(&mut reactor);
        // A channel that is opened before the driver is removed shares the same driver.
        reactor.cx().remove_root(second.id());
        let third = open(&mut reactor);
        settle(&mut reactor);
        let another = open(&mut reactor);
        assert_eq!((id(&third, &mut reactor), id(&another, &mut reactor)), (shared, shared));
        reactor.cx().remove_root(third.id());
        reactor.cx().remove_root(another.id());
        settle(&mut reactor);
        assert_eq!(Rc::strong_count(&device), 1, "the driver is still there");
        let reaps = device.reaps.get();
        kick(&device.interrupt);
        settle(&mut reactor);
        assert_eq!(device.reaps.get(), reaps);
        let fourth = open(&mut reactor);
        assert_ne!(id(&fourth, &mut reactor), shared);
    }
}

#[test]
#[should_panic(expected = "drops its driver after its requests have completed")]
fn a_driver_with_requests_in_flight_is_not_removed() {
    let (mut reactor, thread) = reactor(SleepPolicy::Interrupt, ENGINES[0], &Time::default());
    let device = Device::new();
    let channel = channel(&device, thread, reactor.cx());
    submit(&channel, 1, reactor.cx());
    reactor.cx().remove_root(channel.id());
    reactor.turn();
}

#[test]
fn a_driver_that_cannot_be_made_leaves_nothing() {
    for engine in ENGINES {
        let (mut reactor, thread) = reactor(SleepPolicy::Interrupt, engine, &Time::default());
        let device = Device::new();
        for _ in 0..3 {
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            let refuse = |id: DriverId, cx: &mut Cx| {
                cx.watch_driver(reader, id).unwrap();
                Err::<QueuePair, _>("no queue pair")
            };
            assert_eq!(reactor.cx().driver(device.key, refuse).err(), Some("no queue pair"));
            settle(&mut reactor);
            assert_eq!(
                rustix::io::write(&writer, b"x"),
                Err(rustix::io::Errno::PIPE),
                "the descriptor is still watched"
            );
        }
        let channel = channel(&device, thread, reactor.cx());
        settle(&mut reactor);
        submit(&channel, 1, reactor.cx());
        device.complete(0, 1);
        settle(&mut reactor);
        assert_eq!(got(&channel, &mut reactor), 1);
    }
}

#[test]
fn a_watch_of_a_driver_may_end_before_the_driver() {
    for engine in ENGINES {
        let (mut reactor, thread) = reactor(SleepPolicy::Interrupt, engine, &Time::default());
        let device = Device::new();
        let channel = channel(&device, thread, reactor.cx());
        let driver = driver(&device, reactor.cx());
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let watch = reactor.cx().watch_driver(reader, driver.id()).unwrap();
        settle(&mut reactor);
        assert!(reactor.cx().unwatch(watch).is_some() && reactor.cx().unwatch(watch).is_none());
        settle(&mut reactor);
        assert_eq!(
            rustix::io::write(&writer, b"x"),
            Err(rustix::io::Errno::PIPE),
            "the descriptor is still watched"
        );
        submit(&channel, 1, reactor.cx());
        settle(&mut reactor);
        device.complete(0, 1);
        settle(&mut reactor);
        assert_eq!(got(&channel, &mut reactor), 1);
        drop(driver);
        reactor.cx().remove_root(channel.id());
        settle(&mut reactor);
        assert_eq!(Rc::strong_count(&device), 1);
    }
}

#[test]
fn drivers_that_are_parked_cost_a_turn_nothing() {
    for engine in ENGINES {
        let time = Time::default();
        let (mut reactor, thread) = reactor(SleepPolicy::Adaptive, engine, &time);
        let devices: Vec<_> = (0..300).map(|_| Device::new()).collect();
        let channels: Vec<_> = devices.iter().map(|d| channel(d, thread, reactor.cx())).collect();
        let reaps = || devices.iter().map(|d| d.reaps.get()).collect::<Vec<_>>();
        // The drivers are parked one by one, since other work keeps the reactor from sleeping.
        let poller = reactor.cx().add_poller(thread, "busy", None, |_| true);
        for _ in 0..100 {
            reactor.turn();
            time.pass(Duration::from_micros(10));
        }
        assert!(devices.iter().all(|d| d.is_armed.get()));
        let before = reaps();
        assert!(before.iter().all(|&reaps| reaps < 100), "{before:?}");
        submit(&channels[7], 1, reactor.cx());
        for _ in 0..1000 {
            reactor.turn();
            time.pass(Duration::from_micros(10));
        }
        let expected = |i| before[i] + if i == 7 { 1000 } else { 0 };
        assert_eq!(reaps(), (0..300).map(expected).collect::<Vec<_>>());
        // The drivers are parked together, before a sleep, with or without requests in flight.
        reactor.cx().remove_poller(poller);
        channels.iter().for_each(|channel| submit(channel, 1, reactor.cx()));
        settle(&mut reactor);
        reactor.cx().add_poller(thread, "busy", None, |_| true);
        let before = reaps();
        (0..1000).for_each(|_| assert!(reactor.turn()));
        assert_eq!(reaps(), before);
    }
}

#[test]
fn drivers_take_turns() {
    let (mut reactor, thread) = reactor(SleepPolicy::Poll, ENGINES[0], &Time::default());
    let devices: Vec<_> = (0..10).map(|_| Device::new()).collect();
    let channels: Vec<_> = devices.iter().map(|d| channel(d, thread, reactor.cx())).collect();
    for (device, channel) in devices.iter().zip(&channels) {
        submit(channel, 100_000, reactor.cx());
        device.complete(0, 100_000);
    }
    let left = || devices.iter().map(|d| d.done.borrow().len()).collect::<Vec<_>>();
    for _ in 0..50 {
        let before: usize = left().iter().sum();
        assert!(reactor.turn());
        assert_eq!(before - left().iter().sum::<usize>(), 512);
    }
    assert_eq!(left(), [100_000 - 50 * 512 / 10; 10]);
}

/// A root that submits a request when it is parked.
struct Late(DriverRef<QueuePair>, bool);

impl Root for Late {
    fn poll(&mut self, _: &mut Cx) -> bool {
        false
    }

    fn park(&mut self, cx: &mut Cx) -> Armed {
        if !std::mem::replace(&mut self.1, true) {
            self.0.activate(cx).submit(1);
        }
        Armed::Yes
    }
}

#[test]
fn requests_that_are_submitted_before_a_sleep_are_flushed() {
    for engine in ENGINES {
        let (mut reactor, thread) = reactor(SleepPolicy::Adaptive, engine, &Time::default());
        let device = Device::new();
        let driver = driver(&device, reactor.cx());
        let root = add(reactor.cx(), thread, |_| Late(driver, false));
        settle(&mut reactor);
        reactor.cx().kick(root.id());
        assert_eq!(reactor.step(), Step::Slept(None));
        assert_eq!((device.queued.get(), device.started.get()), (0, 1));
        assert!(device.is_armed.get());
    }
}
