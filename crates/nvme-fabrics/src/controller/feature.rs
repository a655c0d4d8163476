//! Get and Set Features of a controller. NVMe 2.0 §5.15 and §5.27. Context: the controller's.

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::feature;
use aryk_nvme::spec::status::Code;

use super::{Controller, Outcome, Result, complete};
use crate::keep_alive::KeepAlive;
use crate::reservation;
use crate::subsystem::{Io, Namespace, Service, View};
use std::collections::BTreeMap;

/// Arbitration: no limit of a burst.
const ARBITRATION_DEFAULT: u32 = 7;
/// Temperature Threshold: none is ever exceeded.
const TEMPERATURE_DEFAULT: u32 = 0xffff;
/// Reservation Notification Mask: bit `n` masks the notice with the number `n`.
const MASK: u32 = 0b1110;
/// The NSID of all namespaces.
const ALL_NAMESPACES: u32 = u32::MAX;
/// Set Features, CDW10: save the value.
const SAVE: u32 = 1 << 31;

/// The values that the host can change.
#[derive(Debug)]
pub(super) struct Features {
    arbitration: u32,
    temperature: u32,
    recovery: u32,
    atomicity: u32,
    queues: u16,
    /// ACRE: the host waits as CRD says before it tries a command again.
    pub(super) has_retry_delays: bool,
    /// Masks of reservation notifications, by namespace. A namespace without one has the mask 0.
    masks: BTreeMap<u32, u32>,
}

impl Features {
    pub(super) const fn new(view: &View) -> Self {
        let queues = match &view.service {
            Service::Io(io) => io.queues,
            Service::Discovery(_) => 0,
        };
        Self {
            arbitration: ARBITRATION_DEFAULT,
            temperature: TEMPERATURE_DEFAULT,
            recovery: 0,
            atomicity: 0,
            queues,
            has_retry_delays: false,
            masks: BTreeMap::new(),
        }
    }

    pub(super) const fn io_queues(&self) -> u16 {
        self.queues
    }

    fn mask(&self, nsid: u32) -> u32 {
        self.masks.get(&nsid).copied().unwrap_or(0)
    }

    /// Whether the host wants to know this of a namespace.
    pub(super) fn admits(&self, nsid: u32, notice: reservation::Notice) -> bool {
        self.mask(nsid) >> notice as u32 & 1 == 0
    }

    /// The value of a feature that only I/O controllers have.
    const fn get(&self, id: u8, cdw11: u32) -> Result<u32> {
        Ok(match id {
            feature::ARBITRATION => self.arbitration,
            feature::POWER_MANAGEMENT => 0,
            feature::TEMPERATURE_THRESHOLD => match cdw11 >> 16 & 0x3f {
                // The composite temperature's upper and lower threshold; there are no other sensors.
                0 => self.temperature,
                0x10 => 0,
                _ => return Err(Code::INVALID_FIELD),
            },
            feature::ERROR_RECOVERY => self.recovery,
            feature::NUMBER_OF_QUEUES => feature::queue_counts(self.queues),
            feature::WRITE_ATOMICITY => self.atomicity,
            // Every disk may have a cache, which Flush makes durable.
            feature::VOLATILE_WRITE_CACHE => 1,
            _ => return Err(Code::INVALID_FIELD),
        })
    }

    /// Sets such a feature. Returns DW0.
    const fn set(&mut self, id: u8, cdw11: u32, queues_max: u16) -> Result<u32> {
        match id {
            feature::ARBITRATION => self.arbitration = cdw11,
            feature::POWER_MANAGEMENT if cdw11 & 0x1f == 0 => {}
            feature::TEMPERATURE_THRESHOLD if cdw11 >> 16 & 0x3f == 0 => self.temperature = cdw11 & 0xffff,
            // Bit 16, errors for deallocated blocks, is not supported.
            feature::ERROR_RECOVERY if cdw11 & 1 << 16 == 0 => self.recovery = cdw11 & 0xffff,
            feature::WRITE_ATOMICITY => self.atomicity = cdw11 & 1,
            feature::VOLATILE_WRITE_CACHE if cdw11 & 1 == 0 => return Err(Code::FEATURE_NOT_CHANGEABLE),
            feature::VOLATILE_WRITE_CACHE => {}
            feature::NUMBER_OF_QUEUES => {
                let (sqs, cqs) = (cdw11 as u16, (cdw11 >> 16) as u16);
                if sqs == u16::MAX || cqs == u16::MAX {
                    return Err(Code::INVALID_FIELD);
                }
                let wanted = feature::allowed_pairs(cdw11);
                self.queues = if wanted < queues_max { wanted } else { queues_max };
                return Ok(feature::queue_counts(self.queues));
            }
            _ => return Err(Code::INVALID_FIELD),
        }
        Ok(0)
    }
}

impl Controller {
    pub(super) fn get_features(&self, entry: &SubmissionEntry, data: &mut Vec<u8>) -> Result {
        let id = entry.cdw(10) as u8;
        // SEL: the current value, the default, the saved value, which is the default, or the capabilities.
        let select = entry.cdw(10) >> 8 & 7;
        let defaults = Features::new(&self.view);
        let features = if select == 0 { &self.features } else { &defaults };
        let mut of_namespace = false;
        let mut is_changeable = !matches!(
            id,
            feature::HOST_IDENTIFIER | feature::POWER_MANAGEMENT | feature::VOLATILE_WRITE_CACHE
        );
        let value = match (id, &self.view.service) {
            (feature::RESERVATION_MASK | feature::RESERVATION_PERSISTENCE, Service::Io(io))
                if io.commands.reservations =>
            {
                of_namespace = true;
                let namespace = find(io, entry.nsid())?;
                if id == feature::RESERVATION_PERSISTENCE {
                    is_changeable = namespace.can_persist;
                    u32::from(namespace.persists && select == 0)
                } else {
                    features.mask(entry.nsid())
                }
            }
            (feature::ASYNC_EVENT_CONFIGURATION, _) if select == 0 => self.events.enabled(),
            (feature::ASYNC_EVENT_CONFIGURATION, _) => 0,
            (feature::KEEP_ALIVE_TIMER, _) if select == 0 => self.keep_alive.timeout_ms(),
            (feature::KEEP_ALIVE_TIMER, _) => 0,
            // EXHID: over Fabrics, a host identifier has 16 bytes.
            (feature::HOST_IDENTIFIER, _) if select == 0 && entry.cdw(11) & 1 == 0 => {
                return Err(Code::INVALID_FIELD);
            }
            (feature::HOST_IDENTIFIER, _) => {
                if select == 0 {
                    data.extend(self.association.host_id);
                }
                0
            }
            (feature::HOST_BEHAVIOR_SUPPORT, Service::Io(_)) => {
                if select < 3 {
                    data.resize(feature::HOST_BEHAVIOR_LEN, 0);
                    data[0] = features.has_retry_delays.into();
                }
                0
            }
            (id, Service::Io(_)) => features.get(id, entry.cdw(11))?,
            (_, Service::Discovery(_)) => return Err(Code::INVALID_FIELD),
        };
        match select {
            0..=2 => Ok(value.into()),
            // Bit 2: changeable; bit 1: of a namespace. No feature can be saved.
            3 => Ok(u64::from(is_changeable) << 2 | u64::from(of_namespace) << 1),
            _ => Err(Code::INVALID_FIELD),
        }
    }

    pub(super) fn set_features(&mut self, entry: &SubmissionEntry, sent: &[u8], now: u64) -> Result<Outcome> {
        let (id, cdw11, nsid) = (entry.cdw(10) as u8, entry.cdw(11), entry.nsid());
        if entry.cdw(10) & SAVE != 0 {
            return Err(Code::FEATURE_NOT_SAVEABLE);
        }
        let result = match (id, &self.view.service) {
            (feature::RESERVATION_MASK, Service::Io(io)) if io.commands.reservations => {
                if nsid == ALL_NAMESPACES {
                    self.features.masks = io.namespaces.keys().map(|nsid| (*nsid, cdw11 & MASK)).collect();
                } else {
                    find(io, nsid)?;
                    self.features.masks.insert(nsid, cdw11 & MASK);
                }
                Ok(0)
            }
            (feature::RESERVATION_PERSISTENCE, Service::Io(io)) if io.commands.reservations => {
                let persists = cdw11 & 1 != 0;
                let can = |namespace: &Namespace| namespace.can_persist || !persists;
                let nsids: Vec<u32> = match nsid {
                    ALL_NAMESPACES => io.namespaces.keys().copied().collect(),
                    nsid => find(io, nsid).map(|_| vec![nsid])?,
                };
                return match nsids.iter().all(|nsid| can(&io.namespaces[nsid])) {
                    true => Ok(Outcome::Persist { nsids, persists }),
                    false => Err(Code::INVALID_FIELD),
                };
            }
            (feature::ASYNC_EVENT_CONFIGURATION, _) => self.events.enable(cdw11).map(|()| 0),
            (feature::KEEP_ALIVE_TIMER, _) => {
                self.keep_alive = KeepAlive::new(cdw11, now)?;
                Ok(0)
            }
            // Over Fabrics, Connect sets the host identifier.
            (feature::HOST_IDENTIFIER, _) => Err(Code::COMMAND_SEQUENCE_ERROR),
            (feature::HOST_BEHAVIOR_SUPPORT, Service::Io(_)) => {
                let page = sent.first_chunk::<{ feature::HOST_BEHAVIOR_LEN }>();
                // The fields after ACRE ask for nothing that a controller must do.
                self.features.has_retry_delays = match page.ok_or(Code::SGL_DATA_LENGTH_INVALID)?[0] {
                    0 => false,
                    1 => true,
                    _ => return Err(Code::INVALID_FIELD),
                };
                Ok(0)
            }
            (id, Service::Io(io)) => self.features.set(id, cdw11, io.queues).map(u64::from),
            (_, Service::Discovery(_)) => Err(Code::INVALID_FIELD),
        };
        result.map(complete)
    }
}

/// The namespace that a feature belongs to.
fn find(io: &Io, nsid: u32) -> Result<&Namespace> {
    io.namespaces.get(&nsid).ok_or(Code::INVALID_NAMESPACE_OR_FORMAT)
}
