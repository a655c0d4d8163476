//! The mailbox's protocols and the trace ring, in every order of execution that loom distinguishes.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p aryk-reactor --release --test loom`
#![cfg(loom)]
#![expect(dead_code, reason = "the models need only some of what the files have")]

mod sync {
    pub use loom::sync::Mutex;
    pub use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
}
#[path = "../src/clock.rs"]
mod clock;
#[path = "../src/mailbox.rs"]
mod mailbox;
#[path = "../src/trace.rs"]
mod trace;

use clock::Nanos;
use loom::sync::Notify;
use loom::thread;
use mailbox::{Mailbox, Refused, Taken};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize as Count, Ordering::SeqCst};
use std::task::{Wake, Waker};
use trace::{Layer, Point, Record, Trace, Traced};

/// Runs `test` in every order, with up to `preemptions` forced switches of a thread.
fn model(preemptions: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(test);
}

/// The sleep of a reactor. A wait for a signal that no thread sends is a deadlock, which loom reports.
struct Bed(Notify);

impl Bed {
    fn new() -> Arc<Self> {
        Arc::new(Self(Notify::new()))
    }
}

impl Wake for Bed {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }
}

/// Sends, as a handle does, and waits while there is no room.
fn send<T>(mailbox: &Mailbox<T>, receiver: &Bed, mut message: T) {
    let own = Bed::new();
    loop {
        match mailbox.push_or_wait(message, &Waker::from(Arc::clone(&own))) {
            Ok(Taken::MustWake) => return receiver.0.notify(),
            Ok(Taken::Awake) => return,
            Err(Refused::Full(again)) => message = again,
            Err(Refused::Closed(_)) => panic!("no thread closed the mailbox"),
        }
        own.0.wait();
    }
}

/// Sleeps as a reactor does, unless there is work.
fn sleep<T>(mailbox: &Mailbox<T>, bed: &Bed) {
    mailbox.about_to_sleep();
    if mailbox.is_idle() {
        bed.0.wait();
    }
    mailbox.awake();
}

#[test]
fn messages_of_each_sender_come_once_and_in_order() {
    model(2, || {
        let mailbox = Arc::new(Mailbox::new(2));
        let bed = Bed::new();
        let senders = [0, 1].map(|who| {
            let (mailbox, bed) = (Arc::clone(&mailbox), Arc::clone(&bed));
            thread::spawn(move || (0..2 - who).for_each(|i| send(&mailbox, &bed, (who, i))))
        });
        let mut next = [0, 0];
        while next != [2, 1] {
            match mailbox.pop() {
                Some((who, i)) => {
                    assert_eq!(i, next[who]);
                    next[who] += 1;
                    mailbox.made_room();
                }
                None => sleep(&mailbox, &bed),
            }
        }
        senders.into_iter().for_each(|s| s.join().unwrap());
        assert!(mailbox.is_idle());
    });
}

#[test]
fn no_message_is_slept_through() {
    model(3, || {
        let mailbox = Arc::new(Mailbox::new(2));
        let bed = Bed::new();
        let senders = [0, 1].map(|who| {
            let (mailbox, bed) = (Arc::clone(&mailbox), Arc::clone(&bed));
            thread::spawn(move || send(&mailbox, &bed, who))
        });
        let mut got = 0;
        while got < 2 {
            match mailbox.pop() {
                Some(_) => got += 1,
                None => sleep(&mailbox, &bed),
            }
        }
        senders.into_iter().for_each(|s| s.join().unwrap());
    });
}

#[test]
fn no_other_event_is_slept_through() {
    model(3, || {
        let mailbox = Arc::new(Mailbox::<()>::new(2));
        let bed = Bed::new();
        let events = Arc::new(loom::sync::Mutex::new(0));
        let notifiers = [1, 2].map(|event| {
            let (mailbox, bed, events) = (Arc::clone(&mailbox), Arc::clone(&bed), Arc::clone(&events));
            thread::spawn(move || {
                *events.lock().unwrap() += event;
                if mailbox.notify() == Taken::MustWake {
                    bed.0.notify();
                }
            })
        });
        let mut got = 0;
        while got < 3 {
            if mailbox.take_attention() {
                got += std::mem::take(&mut *events.lock().unwrap());
            } else {
                sleep(&mailbox, &bed);
            }
        }
        notifiers.into_iter().for_each(|n| n.join().unwrap());
    });
}

#[test]
fn no_sender_waits_beside_a_free_cell() {
    model(3, || {
        let mailbox = Arc::new(Mailbox::new(2));
        let _ = mailbox.push(0).unwrap();
        let _ = mailbox.push(1).unwrap();
        let sender = {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || {
                let bed = Bed::new();
                let mut message = 2;
                while let Err(refused) = mailbox.push_or_wait(message, &Waker::from(Arc::clone(&bed))) {
                    let Refused::Full(again) = refused else { panic!("no thread closed the mailbox") };
                    message = again;
                    bed.0.wait();
                }
            })
        };
        // One turn, and then no other until the sender has ended.
        assert_eq!(mailbox.pop(), Some(0));
        mailbox.made_room();
        sender.join().unwrap();
        assert_eq!([mailbox.pop(), mailbox.pop(), mailbox.pop()], [Some(1), Some(2), None]);
    });
}

/// Counts the messages that were dropped.
struct Message(Arc<Count>);

impl Drop for Message {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

#[test]
fn no_message_stays_after_the_end() {
    model(3, || {
        let mailbox = Arc::new(Mailbox::new(2));
        let dropped = Arc::new(Count::new(0));
        let senders = [0, 1].map(|_| {
            let (mailbox, dropped) = (Arc::clone(&mailbox), Arc::clone(&dropped));
            thread::spawn(move || drop(mailbox.push(Message(dropped))))
        });
        mailbox.close();
        senders.into_iter().for_each(|s| s.join().unwrap());
        assert_eq!(dropped.load(SeqCst), 2);
    });
}

#[test]
fn no_sender_waits_after_the_end() {
    model(3, || {
        let mailbox = Arc::new(Mailbox::new(2));
        let _ = mailbox.push(0).unwrap();
        let _ = mailbox.push(1).unwrap();
        let sender = {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || {
                let bed = Bed::new();
                let waker = Waker::from(Arc::clone(&bed));
                while let Err(Refused::Full(_)) = mailbox.push_or_wait(2, &waker) {
                    bed.0.wait();
                }
            })
        };
        mailbox.close();
        sender.join().unwrap();
    });
}

#[test]
fn no_trace_record_is_torn() {
    model(3, || {
        let record = |i: u64| Record {
            at: Nanos(i),
            layer: Layer::Bdev,
            point: Point::Submit,
            object: i as u16,
            tag: i as u32,
        };
        let mut trace = Trace::new();
        let what = |i: u64| Traced::new(Layer::Bdev, i as u16);
        trace.record(Nanos(1), what(1), Point::Submit, 1);
        let reader = trace.reader();
        let reading = thread::spawn(move || {
            for r in reader.read().into_iter().chain(reader.last()) {
                assert_eq!(r, record(r.at.0));
                assert_ne!(r.at.0, 0);
            }
        });
        (2..5).for_each(|i| trace.record(Nanos(i), what(i), Point::Submit, i as u32));
        reading.join().unwrap();
    });
}
