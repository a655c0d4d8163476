//! A model NVMe controller: a PCI function in this process, for tests and measurements of drivers.
//!
//! The model was written from the NVM Express Base Specification 2.0, the NVM Command Set Specification 1.0 and the NVMe
//! over PCIe Transport Specification 1.0, and shares no definition with the driver, so that an error in one is found by
//! the other. It executes the commands of a data-centre SSD, checks its host as an IOMMU would, and injects faults.
//!
//! - [`Config`]: what the controller offers: capabilities, namespaces, timing.
//! - [`Model`]: the controller as an [`aryk_pci::Function`]. A test steps it in virtual time ([`Model::step`]), or a
//!   thread runs it in real time ([`Model::run`]).
//! - [`Controller`], through [`Model::with`]: what a test does to the device (pull it out, fail its power, grow a
//!   namespace) and asks it ([`Violations`], [`Counts`]).
//! - [`Faults`]: errors, delays, lost and hostile completions, hostile identify data and registers, by rule or by seed.
//!
//! **To read the code**, take the modules in this order:
//!
//! 1. `wire`, `registers`: what is exchanged. `config`: what a controller offers.
//! 2. `bus`: the host's memory by IOVA, and interrupts. `transfer`: PRPs and SGLs.
//! 3. `queue`, `in_flight`, `namespace`: the controller's state.
//! 4. `controller`: its life and the order of a step; in it `fetch` (doorbells to completions), `admin`, `queues`,
//!    `identify`, `features`, `logs`, `events`, `firmware`, `management`, and `io`.
//! 5. `faults`; `model`: locks, threads, configuration space.
//!
//! Time is a parameter: only the thread of [`Model::run`] reads a clock. With the same configuration, seed and calls, a
//! stepped model does the same. Its host may be hostile: no access makes it panic, and each step does bounded work.
//!
//! What the model does not have: a controller memory buffer, queues that are not physically contiguous (CAP.CQR is 1),
//! weighted round robin, reservations, directives, end-to-end protection, metadata (offered by formats whose commands
//! fail), boot partitions, security commands, and more than one controller in its subsystem.
#![forbid(unsafe_code)]

mod bus;
mod config;
mod controller;
mod faults;
#[cfg(any(test, fuzzing))]
pub mod hostile;
mod in_flight;
mod model;
mod namespace;
mod queue;
mod registers;
mod transfer;
mod wire;

#[cfg(test)]
mod tests;

pub use bus::{Violation, Violations};
pub use config::{Config, Data, FORMATS, LbaFormat, NamespaceConfig, Nanos, Timing};
pub use controller::{Controller, Counts, FIRMWARE_MAGIC, Health};
pub use faults::{Action, Distortion, Faults, Hostile, Patch, Queue, Random, Rule};
pub use model::{Model, Running};
pub use registers::DOORBELLS;
pub use wire::{CompletionEntry, Status, SubmissionEntry, admin, nvm};
