//! Packets of multicast DNS: bytes of any content, from any host of a link.
//!
//! For any input, no code panics; what is accepted means the same when it is written and read again; what is kept of it has its
//! limits, and so have questions and answers.
#![no_main]

use aryk_mdns::wire::Message;
use aryk_mdns::{ADDRESSES_MAX, Browser, Name, Offer, Responder, SERVICES_MAX, TEXT_MAX, text, text_value};
use libfuzzer_sys::fuzz_target;
use std::net::Ipv4Addr;
use std::time::Duration;
use tokio::time::Instant;

const LINK: [Ipv4Addr; 1] = [Ipv4Addr::new(192, 0, 2, 1)];
/// The longest packet.
const PACKET_MAX: usize = 9000;

fn offer() -> Offer {
    let of_kind = Name::parse("_nvme-disc._tcp.local").unwrap();
    Offer {
        name: of_kind.within("a").unwrap(),
        of_kind,
        host: Name::parse("h.local").unwrap(),
        port: 8009,
        text: text([("p", "tcp")]),
        address: None,
    }
}

// Packets that follow one another, each with its length in two bytes before it.
fuzz_target!(|data: &[u8]| {
    let start = Instant::now();
    let mut browser = Browser::new(offer().of_kind, start);
    let mut responder = Responder::default();
    responder.offer(vec![offer()], &LINK, start);
    let (mut rest, mut seconds) = (data, 0);
    while let Some(([high, low], after)) = rest.split_first_chunk() {
        let len = usize::from(u16::from_be_bytes([*high, *low])).min(after.len());
        let (packet, after) = after.split_at(len);
        (rest, seconds) = (after, seconds + 1);
        let now = start + Duration::from_secs(seconds);
        let Ok(message) = Message::parse(packet) else { continue };
        assert_eq!(Message::parse(&message.encode()).as_ref(), Ok(&message));
        browser.take(&message, now);
        browser.expire(now);
        let services: Vec<_> = browser.services().collect();
        assert!(services.len() <= SERVICES_MAX);
        for service in services {
            assert!((1..=ADDRESSES_MAX).contains(&service.places.len()) && service.text.len() <= TEXT_MAX);
            assert!(text_value(&service.text, "nqn").is_none_or(|value| value.len() <= 255));
        }
        let question = browser.ask(now);
        let answer = responder.take(&message, seconds % 2 == 0, &LINK, now);
        for sent in question.into_iter().chain(responder.announce(&LINK, now)) {
            assert!(sent.encode().len() <= PACKET_MAX);
        }
        // An answer to one host has its questions.
        assert!(answer.is_none_or(|answer| answer.encode().len() <= PACKET_MAX + 64 * 260));
    }
});
