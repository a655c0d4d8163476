//! After a restart: what was configured is made again. Control context.
//!
//! The calls that made it are made in their order. What fails, because a file is not there or its lock is still held by the last requests of a daemon
//! that was killed, stays in the store, is reported, and is tried again for as long as it is not there.

use crate::{Control, Methods};
use serde_json::value::to_raw_value;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// How long until what could not be made is tried again: at first, and at last.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);

/// What was made again, and what was not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Restored {
    /// Objects that are there again.
    pub made: usize,
    /// Objects that are not.
    pub absent: usize,
}

/// Makes what `control` has notes of and is not there. What cannot be made now is tried again in the background. Needs a tokio `LocalSet`.
pub async fn restore(control: &Rc<Control>, methods: &Rc<Methods<Control>>) -> Restored {
    let all = control.config.absent().len();
    // An object that was made anew under an old one's name may stand before what it is made of: as long as a round gets anywhere, there is another.
    let mut absent = all;
    while absent > 0 {
        round(control, methods).await;
        let left = control.config.absent().len();
        if std::mem::replace(&mut absent, left) == left {
            break;
        }
    }
    for (key, _) in control.config.absent() {
        tell(control, key);
    }
    if absent > 0 {
        tokio::task::spawn_local(retry(Rc::downgrade(control), Rc::downgrade(methods)));
    }
    Restored { made: all - absent, absent }
}

fn tell(control: &Control, key: u64) {
    let (object, why) = (control.config.describe(key), control.config.why_absent(key));
    tracing::error!(%object, why, "cannot be made again; it stays in the state store, and is tried again");
}

/// Tries again and again, until nothing is absent but what waits for a disk, or the daemon ends.
async fn retry(control: Weak<Control>, methods: Weak<Methods<Control>>) {
    let mut delay = RETRY_MIN;
    loop {
        tokio::time::sleep(delay).await;
        delay = (delay * 2).min(RETRY_MAX);
        let (Some(control), Some(methods)) = (control.upgrade(), methods.upgrade()) else { return };
        for key in round(&control, &methods).await {
            tell(&control, key);
        }
        if control.config.absent().iter().all(|(key, _)| control.config.is_waiting(*key)) {
            tracing::info!("all that was configured is there again");
            return;
        }
    }
}

/// Tries each absent object once, but for those that wait for a disk; gives those that fail for another reason than before.
pub(crate) async fn round(control: &Control, methods: &Methods<Control>) -> Vec<u64> {
    let (config, mut news) = (&control.config, Vec::new());
    for (key, call) in config.absent() {
        // It may have been made, or forgotten, by a client meanwhile.
        if !config.is_absent(key) || config.is_waiting(key) {
            continue;
        }
        let (object, was_told) = (config.describe(key), config.has_failed(key));
        let params = to_raw_value(&call.params).expect("it was JSON");
        match methods.restore(&call.method, params).await {
            Ok(_) if was_told => tracing::info!(%object, "is there again"),
            Ok(_) => {}
            Err(error) => {
                if config.failed(key, &error.to_string()) {
                    news.push(key);
                }
            }
        }
    }
    news
}
