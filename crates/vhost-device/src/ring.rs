//! From what a session has learned about a queue to the queue. Control context.

use aryk_vhost_user::{F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, QueueSetup};
use aryk_virtqueue::{Config, ConfigError, Format, Virtqueue};

/// The queue that is to be set up.
///
/// # Errors
/// As [`Virtqueue::new`].
pub(crate) fn virtqueue(setup: &QueueSetup) -> Result<Virtqueue, ConfigError> {
    let has = |feature| setup.features & feature != 0;
    Virtqueue::new(Config {
        format: if has(F_RING_PACKED) { Format::Packed } else { Format::Split },
        size: setup.size,
        desc: setup.rings.desc.clone(),
        driver: setup.rings.driver.clone(),
        device: setup.rings.device.clone(),
        event_idx: has(F_EVENT_IDX),
        indirect: has(F_INDIRECT_DESC),
        base: setup.base,
        inflight: setup.inflight.clone(),
    })
}
