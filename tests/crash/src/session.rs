//! The messages of a front-end to a back-end, at the first connection or after a crash. Test tool, the front-end's
//! thread.
//!
//! The order is QEMU's. After a crash, the back-end must follow the in-flight region, which is the same region for all
//! back-ends.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_front_end::blk::{self, Config};
use aryk_front_end::scsi;
use aryk_front_end::{Announced, Request, Session, Wanted, feature, payload, protocol};

use crate::memory::Memory;
use crate::shape::{Device, Format, Shape};

/// Longer than any reply takes here, shorter than the timeouts of the test.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The region in which a back-end records requests in flight for its successor.
#[derive(Debug)]
pub struct Inflight {
    fd: OwnedFd,
    /// "Inflight description", as the back-end sent it.
    description: Vec<u8>,
}

/// Negotiates features, shares memory and rings, and starts the queues.
///
/// # Errors
/// The back-end is gone, refuses a message, or lacks a feature of the shape.
pub fn establish(
    stream: UnixStream,
    shape: &Shape,
    capacity: u64,
    memory: &Memory,
    queues: &[Announced<'_>],
    inflight: &mut Option<Inflight>,
) -> Result<Session> {
    let session = Session::open(stream, &wanted(shape))?;
    check_config(&session, shape, capacity)?;
    // From here on, the back-end knows the ring format, which determines the region's format.
    session.set_features()?;
    let region = match inflight.take() {
        Some(region) => region,
        None => ask_for_inflight(&session, shape)?,
    };
    let region = inflight.insert(region);
    session.wire().send(Request::SET_INFLIGHT_FD, &region.description, &[region.fd.as_fd()])?;
    session.share(memory.guest())?;
    queues.iter().try_for_each(|queue| session.start(queue))?;
    session.enable(shape.first_queue() + shape.queues)?;
    Ok(session)
}

fn wanted(shape: &Shape) -> Wanted {
    let mut features = feature::PROTOCOL | feature::VERSION_1;
    if shape.device == Device::Blk {
        features |= blk::feature::BLK_SIZE | blk::feature::FLUSH | blk::feature::MQ;
        features |= blk::feature::WRITE_ZEROES;
        if !shape.encrypted {
            features |= blk::feature::DISCARD;
        }
    }
    if shape.indirect {
        features |= feature::INDIRECT;
    }
    if shape.event_idx {
        features |= feature::EVENT_IDX;
    }
    if shape.format == Format::Packed {
        features |= feature::PACKED;
    }
    let protocol = protocol::MQ | protocol::CONFIG | protocol::REPLY_ACK | protocol::INFLIGHT_SHMFD;
    let optional_protocol = if shape.memory_slots { protocol::CONFIGURE_MEM_SLOTS } else { 0 };
    let queues = shape.first_queue() + shape.queues;
    Wanted { features, optional: 0, protocol, optional_protocol, queues, patience: TIMEOUT }
}

/// Checks that the configuration space is that of the disk, or of a SCSI host.
fn check_config(session: &Session, shape: &Shape, capacity: u64) -> Result<()> {
    if shape.device == Device::Scsi {
        let config = session.config(scsi::CONFIG_LEN)?;
        ensure!(scsi::is_config(&config), "a SCSI host's configuration of {config:?}");
        return Ok(());
    }
    let config = Config::parse(&session.config(blk::CONFIG_LEN)?, session.features())?;
    let expected = Config { capacity, block_size: shape.block_size };
    ensure!(config == expected, "a disk of {config:?}, not {expected:?}");
    Ok(())
}

fn ask_for_inflight(session: &Session, shape: &Shape) -> Result<Inflight> {
    let request = payload![0_u64, 0_u64, shape.first_queue() + shape.queues, shape.size, 0_u32];
    let (description, fd) = session.wire().ask(Request::GET_INFLIGHT_FD, &request)?;
    ensure!(description.len() >= 20, "an in-flight region described by {description:?}");
    Ok(Inflight { fd: fd.context("GET_INFLIGHT_FD was answered without a file")?, description })
}
