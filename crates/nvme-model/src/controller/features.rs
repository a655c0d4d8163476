//! Set Features and Get Features (NVMe 2.0 §5.15 and §5.27). Context: the holder of the controller.

use super::{Controller, Status};
use crate::config::Config;
use crate::namespace::Namespace;
use crate::wire::{SubmissionEntry, first};

const ARBITRATION: u8 = 0x01;
const POWER: u8 = 0x02;
const TEMPERATURE: u8 = 0x04;
const ERROR_RECOVERY: u8 = 0x05;
const WRITE_CACHE: u8 = 0x06;
const QUEUES: u8 = 0x07;
const COALESCING: u8 = 0x08;
const VECTOR: u8 = 0x09;
const WRITE_ATOMICITY: u8 = 0x0a;
const EVENTS: u8 = 0x0b;
const TIMESTAMP: u8 = 0x0e;
const KEEP_ALIVE: u8 = 0x0f;
const HOST_BEHAVIOR: u8 = 0x16;
/// All of them, in the order of [`Features::current`].
const ALL: [u8; 13] = [
    ARBITRATION,
    POWER,
    TEMPERATURE,
    ERROR_RECOVERY,
    WRITE_CACHE,
    QUEUES,
    COALESCING,
    VECTOR,
    WRITE_ATOMICITY,
    EVENTS,
    TIMESTAMP,
    KEEP_ALIVE,
    HOST_BEHAVIOR,
];

/// Values of CDW11 (for data features, of the first bytes), one for each feature.
type Values = [u64; ALL.len()];

#[derive(Debug)]
pub(super) struct Features {
    current: Values,
    saved: Values,
    defaults: Values,
}

fn index_of(fid: u8) -> Option<usize> {
    ALL.iter().position(|&other| other == fid)
}

const fn is_saveable(fid: u8) -> bool {
    matches!(fid, ARBITRATION | TEMPERATURE | ERROR_RECOVERY | WRITE_CACHE | WRITE_ATOMICITY | EVENTS)
}

impl Features {
    pub(super) fn new(config: &Config) -> Self {
        let queues = u64::from(config.io_queues.max(1) - 1);
        let defaults = ALL.map(|fid| match fid {
            ARBITRATION => 5,
            TEMPERATURE => 343,
            WRITE_CACHE => u64::from(config.volatile_write_cache),
            QUEUES => queues | queues << 16,
            _ => 0,
        });
        Self { current: defaults, saved: defaults, defaults }
    }

    /// After a controller reset, saved values are current.
    pub(super) const fn reset(&mut self) {
        self.current = self.saved;
    }

    fn get(&self, fid: u8) -> u64 {
        index_of(fid).map_or(0, |index| self.current[index])
    }

    /// Commands that arbitration fetches from a queue in its turn.
    pub(super) fn arbitration_burst(&self) -> u32 {
        match self.get(ARBITRATION) & 7 {
            7 => u32::MAX,
            burst => 1 << burst,
        }
    }

    /// I/O queue pairs that the host may create.
    pub(super) fn queues_granted(&self, config: &Config) -> u16 {
        let granted = (self.get(QUEUES) as u16).saturating_add(1);
        granted.min(config.io_queues)
    }

    pub(super) fn has_write_cache(&self) -> bool {
        self.get(WRITE_CACHE) & 1 != 0
    }

    pub(super) fn enabled_events(&self) -> u32 {
        self.get(EVENTS) as u32
    }

    /// Composite temperature, in kelvins, from which on an event is raised.
    pub(super) fn temperature_threshold(&self) -> u16 {
        self.get(TEMPERATURE) as u16
    }

    /// 0: the timer is off.
    pub(super) fn keep_alive_ns(&self) -> u64 {
        self.get(KEEP_ALIVE) * 1_000_000
    }

    /// Advanced Command Retry Enable: without it, CRD is 0 in every completion.
    pub(super) fn has_retry_delays(&self) -> bool {
        self.get(HOST_BEHAVIOR) & 0xff == 1
    }
}

impl Controller {
    pub(super) fn get_features(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let fid = entry.cdw10.get() as u8;
        let index = self.feature_index(fid)?;
        let select = entry.cdw10.get() >> 8 & 7;
        let has_select = self.config.oncs & 1 << 4 != 0;
        let value = match select {
            0 => self.features.current[index],
            1 if has_select => self.features.defaults[index],
            2 if has_select => self.features.saved[index],
            3 if has_select => {
                let is_changeable = fid != COALESCING;
                return Ok(u32::from(is_saveable(fid))
                    | u32::from(fid == ERROR_RECOVERY) << 1
                    | u32::from(is_changeable) << 2);
            }
            _ => return Err(Status::INVALID_FIELD),
        };
        match fid {
            TIMESTAMP => self.send(entry, &value.to_le_bytes())?,
            HOST_BEHAVIOR => {
                let mut data = [0; 512];
                data[..8].copy_from_slice(&value.to_le_bytes());
                self.send(entry, &data)?;
            }
            VECTOR => {
                let vector = entry.cdw11.get() & 0xffff;
                if vector >= self.bus.vector_count().into() {
                    return Err(Status::INVALID_FIELD);
                }
                return Ok(vector);
            }
            _ => {}
        }
        let is_data = matches!(fid, TIMESTAMP | HOST_BEHAVIOR);
        Ok(self.faults.change_feature(if is_data { 0 } else { value as u32 }))
    }

    pub(super) fn set_features(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let fid = entry.cdw10.get() as u8;
        let saves = entry.cdw10.get() >> 31 != 0;
        let index = self.feature_index(fid)?;
        if saves && (self.config.oncs & 1 << 4 == 0 || !is_saveable(fid)) {
            return Err(Status::FEATURE_NOT_SAVEABLE);
        }
        let nsid = entry.nsid.get();
        if fid != ERROR_RECOVERY && nsid != 0 && nsid != u32::MAX {
            return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC);
        }
        let value = entry.cdw11.get();
        let mut result = 0;
        let stored = match fid {
            COALESCING if value & 0xffff != 0 => return Err(Status::FEATURE_NOT_CHANGEABLE),
            POWER if value & 0x1f != 0 => return Err(Status::INVALID_FIELD),
            TEMPERATURE => self.set_temperature(value)?,
            VECTOR if value & 0xffff >= self.bus.vector_count().into() => return Err(Status::INVALID_FIELD),
            WRITE_CACHE => self.set_write_cache(value)?,
            QUEUES => {
                result = self.set_queues(value)?;
                result.into()
            }
            TIMESTAMP => u64::from_le_bytes(first(&self.receive(entry, 8)?)) & 0xffff_ffff_ffff,
            HOST_BEHAVIOR => u64::from_le_bytes(first(&self.receive(entry, 512)?)),
            KEEP_ALIVE => self.round_keep_alive(value)?,
            _ => value.into(),
        };
        self.features.current[index] = stored;
        if saves {
            self.features.saved[index] = stored;
        }
        if fid == KEEP_ALIVE {
            self.restart_keep_alive();
        }
        if fid == TEMPERATURE {
            self.check_temperature();
        }
        Ok(self.faults.change_feature(result))
    }

    fn feature_index(&self, fid: u8) -> Result<usize, Status> {
        let is_absent = match fid {
            WRITE_CACHE => !self.config.volatile_write_cache,
            KEEP_ALIVE => self.config.kas == 0,
            _ => false,
        };
        index_of(fid).filter(|_| !is_absent).ok_or(Status::INVALID_FIELD)
    }

    /// Temperature Threshold: the model has one sensor, the composite temperature (TMPSEL 0, or 15 for all), and no events for
    /// temperatures that are too low (THSEL 1).
    fn set_temperature(&self, value: u32) -> Result<u64, Status> {
        let (sensor, threshold_type) = (value >> 16 & 0xf, value >> 20 & 3);
        match (sensor, threshold_type) {
            (0 | 15, 0) => Ok(u64::from(value & 0xffff)),
            (0 | 15, 1) => Ok(u64::from(self.features.temperature_threshold())),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Without a write cache, what was written is durable.
    fn set_write_cache(&mut self, value: u32) -> Result<u64, Status> {
        if value & 1 == 0 {
            self.namespaces.values_mut().for_each(Namespace::flush);
        }
        Ok(u64::from(value & 1))
    }

    /// Number of Queues: what the host requests, 0's based, limited to what the controller has. Only before queues exist.
    fn set_queues(&self, value: u32) -> Result<u32, Status> {
        let (sqs, cqs) = (value & 0xffff, value >> 16);
        if sqs == 0xffff || cqs == 0xffff {
            return Err(Status::INVALID_FIELD);
        }
        if !self.io_sqs.is_empty() || self.cqs.iter().skip(1).any(Option::is_some) {
            return Err(Status::COMMAND_SEQUENCE);
        }
        let max = u32::from(self.config.io_queues.max(1) - 1);
        Ok(sqs.min(max) | cqs.min(max) << 16)
    }

    /// The timeout in milliseconds, rounded up to the granularity of the timer.
    fn round_keep_alive(&self, value: u32) -> Result<u64, Status> {
        let unit = u64::from(self.config.kas) * 100;
        if unit == 0 {
            return Err(Status::INVALID_FIELD);
        }
        Ok(u64::from(value).next_multiple_of(unit))
    }
}
