//! What a front-end says to a back-end that it meets, for the first time or after a crash. Test tool, the front-end's thread.
//!
//! The order is QEMU's. What a back-end must do after a crash follows from the in-flight region, which is the same for all of them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};

use crate::memory::Memory;
use crate::ring::{Format, Ring};
use crate::shape::Shape;
use crate::wire::{Wire, code, payload};

/// Feature bits (virtio 1.2, sections 5.2.3 and 6; vhost-user's own is 30).
mod feature {
    pub(super) const BLK_SIZE: u64 = 1 << 6;
    pub(super) const FLUSH: u64 = 1 << 9;
    pub(super) const MQ: u64 = 1 << 12;
    pub(super) const DISCARD: u64 = 1 << 13;
    pub(super) const WRITE_ZEROES: u64 = 1 << 14;
    pub(super) const INDIRECT: u64 = 1 << 28;
    pub(super) const EVENT_IDX: u64 = 1 << 29;
    pub(super) const PROTOCOL: u64 = 1 << 30;
    pub(super) const VERSION_1: u64 = 1 << 32;
    pub(super) const PACKED: u64 = 1 << 34;
}

/// Protocol feature bits: "Protocol features".
mod protocol {
    pub(super) const MQ: u64 = 1 << 0;
    pub(super) const REPLY_ACK: u64 = 1 << 3;
    pub(super) const CONFIG: u64 = 1 << 9;
    pub(super) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(super) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

/// The region in which a back-end keeps what is in flight, on behalf of its successor.
#[derive(Debug)]
pub struct Inflight {
    fd: OwnedFd,
    /// "Inflight description", as the back-end gave it.
    description: Vec<u8>,
}

/// A queue as a session announces it.
#[derive(Debug)]
pub struct Announced<'a> {
    /// Its ring.
    pub ring: &'a Ring,
    /// For the device.
    pub kick: BorrowedFd<'a>,
    /// For the driver.
    pub call: BorrowedFd<'a>,
}

/// Negotiates, hands everything over, and starts the queues.
///
/// # Errors
/// The back-end is gone, refuses, or does not offer what the shape needs.
pub fn establish(
    stream: UnixStream,
    shape: &Shape,
    capacity: u64,
    memory: &Memory,
    queues: &[Announced<'_>],
    inflight: &mut Option<Inflight>,
) -> Result<Wire> {
    let mut wire = Wire::new(stream)?;
    let features = wanted_features(shape);
    let offered = wire.ask_u64(code::GET_FEATURES)?;
    ensure!(offered & features == features, "features {features:#x} wanted, {offered:#x} offered");
    let offered = wire.ask_u64(code::GET_PROTOCOL_FEATURES)?;
    let chosen = offered & wanted_protocol(shape);
    let needed = protocol::MQ | protocol::CONFIG | protocol::REPLY_ACK | protocol::INFLIGHT_SHMFD;
    ensure!(chosen & needed == needed, "protocol features {offered:#x} offered");
    wire.tell(code::SET_PROTOCOL_FEATURES, &payload![chosen], &[])?;
    wire.acknowledged = true;
    let most = wire.ask_u64(code::GET_QUEUE_NUM)?;
    ensure!(most >= shape.queues.into(), "{} queues wanted, {most} offered", shape.queues);
    wire.tell(code::SET_OWNER, &[], &[])?;
    check_config(&wire, shape, capacity)?;
    // The format of rings is known from here on, and with it that of the region.
    wire.tell(code::SET_FEATURES, &payload![features], &[])?;
    let region = match inflight.take() {
        Some(region) => region,
        None => ask_for_inflight(&wire, shape)?,
    };
    let region = inflight.insert(region);
    wire.tell(code::SET_INFLIGHT_FD, &region.description, &[region.fd.as_fd()])?;
    announce_memory(&wire, memory, chosen & protocol::CONFIGURE_MEM_SLOTS != 0)?;
    for (index, queue) in (0..).zip(queues) {
        start_queue(&wire, shape, index, queue)?;
    }
    for index in 0..u32::from(shape.queues) {
        wire.tell(code::SET_VRING_ENABLE, &payload![index, 1_u32], &[])?;
    }
    Ok(wire)
}

const fn wanted_features(shape: &Shape) -> u64 {
    let mut features = feature::BLK_SIZE | feature::FLUSH | feature::MQ | feature::DISCARD;
    features |= feature::WRITE_ZEROES | feature::PROTOCOL | feature::VERSION_1;
    if shape.indirect {
        features |= feature::INDIRECT;
    }
    if shape.event_idx {
        features |= feature::EVENT_IDX;
    }
    if matches!(shape.format, Format::Packed) {
        features |= feature::PACKED;
    }
    features
}

const fn wanted_protocol(shape: &Shape) -> u64 {
    let slots = if shape.memory_slots { protocol::CONFIGURE_MEM_SLOTS } else { 0 };
    slots | protocol::MQ | protocol::REPLY_ACK | protocol::CONFIG | protocol::INFLIGHT_SHMFD
}

/// Whether the configuration space (section 5.2.4) is that of the disk.
fn check_config(wire: &Wire, shape: &Shape, capacity: u64) -> Result<()> {
    const SIZE: usize = 60;
    let request = [payload![0_u32, SIZE as u32, 0_u32], vec![0; SIZE]].concat();
    let (reply, _) = wire.ask(code::GET_CONFIG, &request)?;
    ensure!(reply.len() == request.len(), "a configuration space of {} bytes", reply.len());
    let field = |at: usize| u32::from_le_bytes(reply[12 + at..16 + at].try_into().expect("4 bytes"));
    let sectors = u64::from(field(0)) | u64::from(field(4)) << 32;
    ensure!(sectors == capacity, "a disk of {sectors} sectors, not {capacity}");
    ensure!(field(20) == shape.block_size, "blocks of {}, not {}", field(20), shape.block_size);
    Ok(())
}

fn ask_for_inflight(wire: &Wire, shape: &Shape) -> Result<Inflight> {
    let request = payload![0_u64, 0_u64, shape.queues, shape.size, 0_u32];
    let (description, fd) = wire.ask(code::GET_INFLIGHT_FD, &request)?;
    ensure!(description.len() >= 20, "an in-flight region described by {description:?}");
    Ok(Inflight { fd: fd.context("GET_INFLIGHT_FD was answered without a file")?, description })
}

fn announce_memory(wire: &Wire, memory: &Memory, by_slot: bool) -> Result<()> {
    let [guest, len, user, offset] = memory.region();
    let region = payload![guest, len, user, offset];
    if by_slot {
        wire.tell(code::ADD_MEM_REG, &[payload![0_u64], region].concat(), &[memory.fd()])
    } else {
        wire.tell(code::SET_MEM_TABLE, &[payload![1_u32, 0_u32], region].concat(), &[memory.fd()])
    }
}

fn start_queue(wire: &Wire, shape: &Shape, index: u32, queue: &Announced<'_>) -> Result<()> {
    let parts = queue.ring.parts();
    wire.tell(code::SET_VRING_NUM, &payload![index, u32::from(shape.size)], &[])?;
    wire.tell(code::SET_VRING_BASE, &payload![index, queue.ring.base()], &[])?;
    let [desc, used, avail] = [parts.desc, parts.device, parts.driver].map(Memory::user_addr);
    wire.tell(code::SET_VRING_ADDR, &payload![index, 0_u32, desc, used, avail, 0_u64], &[])?;
    wire.tell(code::SET_VRING_KICK, &payload![u64::from(index)], &[queue.kick])?;
    wire.tell(code::SET_VRING_CALL, &payload![u64::from(index)], &[queue.call])
}
