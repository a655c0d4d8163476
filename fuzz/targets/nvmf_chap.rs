//! Messages of DH-HMAC-CHAP, of any content, to both sides, among those that the sides send each other.
//!
//! For any input, no code panics, messages have a bounded length, and a side that knows the secrets accepts nobody that does not.
#![no_main]

use aryk_nvme_fabrics::chap::{
    Action, Allowed, Controller, Group, Hash, Host, MESSAGE_MAX, Parties, Progress, Secret, Secrets,
};
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, LazyLock};

const OF_HOST: &str = "DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const OF_CONTROLLER: &str =
    "DHHC-1:03:QEFCQ0RFRkdISUpLTE1OT1BRUlNUVVZXWFlaW1xdXl9gYWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXp7fH1+fx/Gj1o=:";

fn secret(text: &str) -> Secret {
    Secret::parse(text.as_bytes()).expect("valid")
}

static RIGHT: LazyLock<Arc<Secrets>> =
    LazyLock::new(|| Arc::new(Secrets { host: secret(OF_HOST), controller: Some(secret(OF_CONTROLLER)) }));
/// The secrets of a peer that knows none of them.
static WRONG: LazyLock<Arc<Secrets>> =
    LazyLock::new(|| Arc::new(Secrets { host: secret(OF_CONTROLLER), controller: Some(secret(OF_HOST)) }));

fuzz_target!(|input: &[u8]| {
    let _ = Secret::parse(input);
    let parties = Parties {
        host: "nqn.2016-06.io.spdk:host1".parse().expect("valid"),
        subsystem: "nqn.2016-06.io.spdk:cnode1".parse().expect("valid"),
    };
    let Some((&[is_host, count], mut rest)) = input.split_first_chunk() else { return };
    // Of the groups, the quickest.
    let groups = vec![Group::Null, Group::Ffdhe2048];
    let allowed = Allowed { hashes: Hash::ALL.to_vec(), groups };
    let (of_controller, of_host) = if is_host & 1 != 0 { (&WRONG, &RIGHT) } else { (&RIGHT, &WRONG) };
    let mut controller = Controller::new(Arc::clone(of_controller), parties.clone(), allowed.clone());
    let mut host = Host::new(Arc::clone(of_host), parties, 1, &allowed);
    for _ in 0..count % 12 {
        // A byte says who sends, and whether it is the message of the other side, changed in one place, or one of the input.
        let Some((&[kind, at, byte], after)) = rest.split_first_chunk() else { return };
        rest = after;
        let own = if kind & 1 != 0 {
            match host.action() {
                Action::Send(message) => Some(message),
                Action::Done if is_host & 1 != 0 => panic!("the controller does not know its secret"),
                Action::Receive | Action::Failed(_) | Action::Done => None,
            }
        } else {
            controller.send()
        };
        assert!(own.as_ref().is_none_or(|own| own.len() <= MESSAGE_MAX));
        let message = match own {
            Some(mut own) if kind & 2 != 0 => {
                let at = usize::from(at) % own.len();
                own[at] ^= byte;
                own
            }
            _ => {
                let (message, after) = rest.split_at(rest.len().min(usize::from(at) * 4));
                rest = after;
                message.to_vec()
            }
        };
        if kind & 1 != 0 {
            controller.receive(&message)
        } else {
            host.receive(&message)
        }
        let is_authenticated = controller.progress() == Progress::Authenticated;
        assert!(is_host & 1 != 0 || !is_authenticated, "the host does not know its secret");
    }
});
