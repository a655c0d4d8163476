//! From what a session has learned about a queue to the queue. Control context.

use aryk_vhost_user::{F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, QueueSetup};
use aryk_virtqueue::{Config, ConfigError, Format, Virtqueue};

/// Descriptors of the largest queue that a guest may have, if nothing else is said: QEMU has no larger ones. What a queue can make us hold, and do when its requests are
/// aborted or its guest's memory changes, goes by its size.
pub const QUEUE_SIZE_MAX: u16 = 1024;

/// The queue that is to be set up, of at most so many descriptors.
///
/// # Errors
/// As [`Virtqueue::new`]; [`ConfigError::TooLarge`].
pub fn virtqueue(setup: &QueueSetup, size_max: u16) -> Result<Virtqueue, ConfigError> {
    if setup.size > size_max {
        return Err(ConfigError::TooLarge { size: setup.size, max: size_max });
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_dma::{Mapping, MemTable, Region};
    use aryk_vhost_user::Rings;
    use std::sync::Arc;

    #[test]
    fn a_queue_is_as_large_as_is_allowed() {
        const LEN: u64 = 1 << 20;
        let mapping = Arc::new(Mapping::anonymous(LEN).unwrap());
        let region = Region { guest_addr: 0, user_addr: 0, len: LEN, offset: 0, mapping };
        let memory = Arc::new(MemTable::new(vec![region]).unwrap());
        let area = |at| memory.area_at_guest(at, LEN / 4).unwrap();
        let setup = |size| QueueSetup {
            size,
            base: 0,
            features: 0,
            rings: Rings { desc: area(0), driver: area(LEN / 4), device: area(LEN / 2) },
            memory: Arc::clone(&memory),
            kick: None,
            call: None,
            err: None,
            inflight: None,
            log: None,
        };
        for (size, max) in [(2, 2), (1024, QUEUE_SIZE_MAX), (2048, 32_768)] {
            assert_eq!(virtqueue(&setup(size), max).unwrap().size(), size);
        }
        let refused = virtqueue(&setup(2048), QUEUE_SIZE_MAX).unwrap_err();
        assert_eq!(refused, ConfigError::TooLarge { size: 2048, max: 1024 });
        assert!(refused.to_string().contains("--queue-size-max"), "it says what to do: {refused}");
    }
}
