//! `cargo xtask bench crypto`: encryption.
//!
//! - [`cipher`]: AES-XTS alone, compared with libraries.
//! - [`path`]: what encryption adds to a request from a guest's queue to a disk in memory.
//! - [`crate::closed`]: `arykd` compared with `qemu-storage-daemon`, over one LUKS file in /dev/shm, and with itself over memory.

mod cipher;
mod isal;
mod path;

use crate::ceiling::Ceilings;
use crate::closed::{self, CRYPTO};
use crate::report::Report;
use crate::settings::Settings;
use anyhow::Result;

/// Measures the selected cases.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    cipher::measure(settings, report)?;
    path::measure(settings, report)?;
    let ceilings = Ceilings::measure(settings, &[CRYPTO], report)?;
    closed::measure(settings, CRYPTO, &ceilings, report)
}
