//! A driver on its own thread, and the device on the test's thread. Both sleep when they find no work, so a lost wake-up, or
//! memory that is seen out of order, shows as a time-out or as wrong bytes.
#![expect(clippy::disallowed_methods, reason = "a test's own time-out")]

use super::driver::{Desc, Guest, NEXT, WRITE};
use crate::Chain;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

const REQUESTS: u64 = 300_000;
/// The maximum duration: on a busy machine, where a switch between the threads can take milliseconds, the test runs fewer
/// requests.
const TIME_MAX: Duration = Duration::from_secs(2);
const SIZE: u16 = 8;

/// An event with the semantics of an eventfd: any number of signals before a wait counts as one. Waiting is spinning, so that
/// both sides run within nanoseconds of each other if there are cores for both.
#[derive(Default)]
struct Event(AtomicBool);

impl Event {
    fn signal(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn wait(&self, who: &str) {
        let deadline = Instant::now() + Duration::from_secs(20);
        for spins in 1_u32.. {
            if self.0.swap(false, Ordering::Acquire) {
                return;
            }
            std::hint::spin_loop();
            if spins.is_multiple_of(1000) {
                std::thread::yield_now();
                assert!(Instant::now() < deadline, "{who} was not woken");
            }
        }
    }
}

/// Submits up to `SIZE / 2` requests at a time, two descriptors each: a number, and room for twice that number.
fn drive(guest: &Guest, event_idx: bool, kick: &Event, call: &Event, ended: &AtomicBool) {
    let (mut offered, mut done, mut last) = (0_u64, 0_u64, REQUESTS);
    let deadline = Instant::now() + TIME_MAX;
    let mut free: Vec<u16> = (0..SIZE / 2).collect();
    while done < last {
        if Instant::now() > deadline {
            last = last.min(offered);
        }
        let old = guest.avail_idx();
        let batch = 1 + offered % 3;
        while offered < last && u64::from(guest.avail_idx().wrapping_sub(old)) < batch {
            let Some(slot) = free.pop() else { break };
            let at = 0x1000 * u64::from(slot);
            guest.write_u64(at, offered);
            guest.set_desc(2 * slot, Desc { addr: at, len: 8, flags: NEXT, next: 2 * slot + 1 });
            guest.set_desc(2 * slot + 1, Desc { addr: at + 8, len: 8, flags: WRITE, next: 0 });
            guest.offer(2 * slot);
            offered += 1;
        }
        let new = guest.avail_idx();
        // Section 2.7.13.4: write the index, then read whether the device requests a kick.
        fence(Ordering::SeqCst);
        let wanted = if event_idx {
            super::naive::wanted(guest.avail_event(), old, new)
        } else {
            new != old && guest.used_flags() & 1 == 0
        };
        if wanted {
            kick.signal();
        }
        done += reap(guest, done, &mut free);
        delay(done % 127);
        // Section 2.7.14: request a call, then check the used ring again.
        guest.set_used_event(done as u16);
        guest.set_avail_flags(0);
        fence(Ordering::SeqCst);
        if guest.used_idx() == done as u16 && (free.is_empty() || offered == last) && done < last {
            call.wait("the driver");
        }
        guest.set_avail_flags(u16::from(!event_idx));
    }
    ended.store(true, Ordering::Release);
    kick.signal();
}

/// Varies the moments at which the two sides meet.
fn delay(steps: u64) {
    for step in 0..steps {
        black_box(step);
    }
}

/// Takes the completed requests, and checks them.
fn reap(guest: &Guest, done: u64, free: &mut Vec<u16>) -> u64 {
    let new = guest.used_idx().wrapping_sub(done as u16);
    for i in 0..new {
        let (head, len) = guest.used((done as u16).wrapping_add(i) % SIZE);
        let slot = head as u16 / 2;
        let at = 0x1000 * u64::from(slot);
        assert_eq!((guest.read_u64(at + 8), len), (2 * guest.read_u64(at) + 1, 8));
        free.push(slot);
    }
    new.into()
}

fn serve(guest: &Guest, event_idx: bool, kick: &Event, call: &Event, ended: &AtomicBool) {
    let mut queue = guest.queue(event_idx);
    let mut chain = Chain::default();
    let mut served = 0;
    let (mut sleeps, mut empty_polls) = (0_u64, 0);
    while !ended.load(Ordering::Acquire) {
        let before = served;
        while let Some(head) = queue.pop(&guest.memory, &mut chain).unwrap() {
            let number: u64 = chain.take_header(&guest.memory).unwrap().unwrap();
            guest.memory.write(chain.writable()[0].addr, &(2 * number + 1)).unwrap();
            queue.push_used(head, 8);
            served += 1;
        }
        delay(served % 61);
        if queue.publish() {
            call.signal();
        }
        empty_polls = if served > before { 0 } else { empty_polls + 1 };
        // Sleeps at once half of the time, so that both ways of finding work are used often.
        if empty_polls > 50 * (served % 2) {
            if !queue.enable_kicks() {
                sleeps += 1;
                kick.wait("the device");
            }
            queue.disable_kicks();
        }
    }
    assert!(sleeps > 0, "the device never slept, so no wake-up was tested");
}

fn both_sides(event_idx: bool) {
    let guest = Guest::new(SIZE);
    let (kick, call, ended) = (Event::default(), Event::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (driver, kick, call, ended) = (guest.clone(), &kick, &call, &ended);
        scope.spawn(move || drive(&driver, event_idx, kick, call, ended));
        serve(&guest, event_idx, kick, call, ended);
    });
}

/// One after the other, because each of them needs two cores.
#[test]
fn no_wake_up_is_lost() {
    both_sides(false);
    both_sides(true);
}
