//! Tests random messages in random order: the device's checks must hold, and no session may leave a queue running.

use crate::on_local_set;
use crate::peer::{FrontEnd, Guest, eventfd, memfd, message};
use crate::{bytes, start};
use proptest::prelude::*;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

#[derive(Clone, Debug)]
struct Step {
    code: u32,
    flags: u32,
    payload: Payload,
    fds: Vec<u8>,
}

#[derive(Clone, Debug)]
enum Payload {
    Empty,
    U64(u64),
    State(u32, u32),
    Ring(u32),
    Table,
    Region(u64),
    Bytes(Vec<u8>),
}

fn payload() -> impl Strategy<Value = Payload> {
    let features = [(1 << 32) | (1 << 30), 1 << 32, (1 << 32) | (1 << 29), 1 << 3, 0x100, 0x101];
    prop_oneof![
        Just(Payload::Empty),
        prop_oneof![0..4_u64, proptest::sample::select(features.to_vec()), any::<u64>()]
            .prop_map(Payload::U64),
        (0..5_u32, prop_oneof![0..3_u32, Just(8), Just(16), any::<u32>()])
            .prop_map(|(index, num)| Payload::State(index, num)),
        (0..5_u32).prop_map(Payload::Ring),
        Just(Payload::Table),
        (0..3_u64).prop_map(Payload::Region),
        proptest::collection::vec(any::<u8>(), 0..80).prop_map(Payload::Bytes),
    ]
}

/// A message whose code and payload match more often than by chance.
fn step() -> impl Strategy<Value = Step> {
    let any_of =
        (0..42_u32, prop_oneof![Just(1_u32), Just(9)], payload(), proptest::collection::vec(0..4_u8, 0..3));
    let fitting = (0..12_usize, 0..3_u32, any::<bool>()).prop_map(|(kind, index, flag)| {
        let (code, payload, fds) = match kind {
            0 => (2, Payload::U64((1 << 32) | u64::from(flag) << 30), vec![]),
            1 => (16, Payload::U64(0x8009), vec![]),
            2 => (5, Payload::Table, vec![0]),
            3 => (8, Payload::State(index, if flag { 8 } else { 16 }), vec![]),
            4 => (10, Payload::State(index, 5), vec![]),
            5 => (9, Payload::Ring(index), vec![]),
            6 => (12, Payload::U64(index.into()), vec![1]),
            7 => (18, Payload::State(index, flag.into()), vec![]),
            8 => (11, Payload::State(index, 0), vec![]),
            9 => (13, Payload::U64(index.into()), vec![1]),
            10 => (37, Payload::Region(index.into()), vec![0]),
            _ => (38, Payload::Region(index.into()), vec![]),
        };
        Step { code, flags: 9, payload, fds }
    });
    let anything = any_of.prop_map(|(code, flags, payload, fds)| Step { code, flags, payload, fds });
    prop_oneof![12 => fitting, 1 => anything]
}

fn bytes_of(payload: &Payload, guest: &Guest) -> Vec<u8> {
    match payload {
        Payload::Empty => vec![],
        Payload::U64(value) => bytes![*value],
        Payload::State(index, num) => bytes![*index, *num],
        Payload::Ring(index) => guest.ring_addr(*index),
        Payload::Table => guest.mem_table(),
        Payload::Region(n) => {
            let at = guest.guest_addr + n * 0x8000;
            bytes![0_u64, at, 0x1_0000_u64, guest.user_addr + n * 0x8000, 0_u64]
        }
        Payload::Bytes(bytes) => bytes.clone(),
    }
}

fn send(fe: &FrontEnd, step: &Step, guest: &Guest, fds: &[OwnedFd]) {
    let fds: Vec<BorrowedFd<'_>> = step.fds.iter().map(|i| fds[usize::from(*i)].as_fd()).collect();
    let bytes = message(step.code, step.flags, &bytes_of(&step.payload, guest));
    // The session may have ended, or its socket may be full.
    let _ = fe.try_send_raw(&bytes, &fds);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn any_messages(steps in proptest::collection::vec(step(), 1..60)) {
        on_local_set(async {
            let (guest, (fe, session)) = (Guest::new(), start());
            let null = std::fs::File::open("/dev/null").expect("/dev/null");
            let fds = [guest.memory.try_clone().expect("dup"), eventfd(), memfd(100), null.into()];
            for step in &steps {
                send(&fe, step, &guest, &fds);
                tokio::task::yield_now().await;
            }
            drop(fe);
            // No panic is a success; `end` checks that no queue runs.
            let _ = session.end().await;
        });
    }
}
