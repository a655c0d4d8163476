//! The tasks that browse and publish. Control context.

use crate::browser::{Browser, Service};
use crate::responder::{Offer, Responder};
use crate::socket::{PORT, Received, Socket};
use crate::wire::Name;
use aryk_log_limit::{LogLimit, limited};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

/// Time between two looks at the links of this host.
const LOOK: Duration = Duration::from_secs(5);
/// The least time after the kernel has refused something.
const RETRY: Duration = Duration::from_secs(1);
/// Time between two lines about the same.
const LINE_PERIOD: Duration = Duration::from_secs(60);

/// Lines about what the kernel refuses.
fn lines() -> LogLimit {
    LogLimit::new(1, LINE_PERIOD)
}

/// When to look at the links of this host.
fn looks() -> tokio::time::Interval {
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    looks
}

async fn pause(lines: &LogLimit, error: &io::Error) {
    limited!(lines, warn, %error, "multicast DNS does not work now");
    sleep_until(Instant::now() + RETRY).await;
}

/// Browses the services of a kind, and sends those that are announced now, again whenever they change. Ends with the receivers.
pub async fn browse(mut socket: Socket, of_kind: Name, found: watch::Sender<BTreeSet<Service>>) {
    let mut browsers: BTreeMap<String, Browser> = BTreeMap::new();
    let (lines, mut looks) = (lines(), looks());
    loop {
        let now = Instant::now();
        browsers.retain(|link, _| socket.links().contains_key(link));
        for link in socket.links().keys() {
            let browser = browsers.entry(link.clone()).or_insert_with(|| Browser::new(of_kind.clone(), now));
            browser.expire(now);
            if let Some(question) = browser.ask(now) {
                socket.announce(link, &question.encode());
            }
        }
        let services: BTreeSet<Service> = browsers.values().flat_map(Browser::services).collect();
        found.send_if_modified(|before| {
            let is_new = *before != services;
            *before = services;
            is_new
        });
        let next = browsers.values().map(Browser::next).fold(now + LOOK, Instant::min);
        let failed = tokio::select! {
            received = socket.receive() => match received {
                Ok(Received { link, message, .. }) => {
                    if let Some(browser) = browsers.get_mut(&link) {
                        browser.take(&message, Instant::now());
                    }
                    None
                }
                Err(error) => Some(error),
            },
            _ = looks.tick() => socket.refresh().err(),
            () = sleep_until(next) => None,
            () = found.closed() => return,
        };
        if let Some(error) = failed {
            pause(&lines, &error).await;
        }
    }
}

/// Publishes services, as they are now. Takes them back, and ends, with the sender.
pub async fn publish(mut socket: Socket, mut offers: watch::Receiver<Vec<Offer>>) {
    let mut responders: BTreeMap<String, Responder> = BTreeMap::new();
    let (lines, mut looks) = (lines(), looks());
    let mut has_ended = false;
    loop {
        let now = Instant::now();
        responders.retain(|link, _| socket.links().contains_key(link));
        let all = if has_ended { Vec::new() } else { offers.borrow_and_update().clone() };
        for (link, of_link) in socket.links() {
            let responder = responders.entry(link.clone()).or_default();
            let there = all.iter().filter(|offer| offer.is_at(&of_link.addresses)).cloned().collect();
            let goodbyes = responder.offer(there, &of_link.addresses, now);
            let due = responder.announce(&of_link.addresses, now);
            goodbyes.iter().chain(&due).for_each(|message| socket.announce(link, &message.encode()));
        }
        if has_ended {
            return;
        }
        let next = responders.values().filter_map(Responder::next).fold(now + LOOK, Instant::min);
        let failed = tokio::select! {
            changed = offers.changed() => {
                has_ended = changed.is_err();
                None
            }
            received = socket.receive() => match received {
                Ok(received) => {
                    answer(&socket, &mut responders, &received);
                    None
                }
                Err(error) => Some(error),
            },
            _ = looks.tick() => match socket.refresh() {
                Ok(new) => {
                    responders.extract_if(.., |link, _| new.contains(link)).for_each(drop);
                    None
                }
                Err(error) => Some(error),
            },
            () = sleep_until(next) => None,
        };
        if let Some(error) = failed {
            pause(&lines, &error).await;
        }
    }
}

/// Takes a message of a host; its answer comes later, unless the sender knows only DNS.
fn answer(socket: &Socket, responders: &mut BTreeMap<String, Responder>, received: &Received) {
    let Received { link, from, message } = received;
    let Some((responder, of_link)) = responders.get_mut(link).zip(socket.links().get(link)) else { return };
    let is_legacy = from.port() != PORT;
    if let Some(answer) = responder.take(message, is_legacy, &of_link.addresses, Instant::now()) {
        socket.answer(*from, &answer.encode());
    }
}
