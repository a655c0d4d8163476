//! A hostile host, made from arbitrary bytes: for the fuzzer and the model's own tests. Context: any.
//!
//! The host writes arbitrary registers, doorbells, queue entries and memory. The model must not panic, each step must do
//! bounded work, and the controller must serve an honest host afterwards.

use crate::config::{Config, NamespaceConfig, Timing};
use crate::faults::{Hostile, Random};
use crate::model::Model;
use crate::wire::{CompletionEntry, SubmissionEntry, admin, first, nvm};
use aryk_dma::{DmaRange, Mapping};
use aryk_pci::{Function as _, PciError, Width};
use std::sync::Arc;
use zerocopy::{FromBytes as _, IntoBytes as _};

const MEMORY: u64 = 256 << 10;
const PAGE: u64 = 4096;
const COMMANDS_PER_STEP: u32 = 64;
/// Steps without the passage of time after which the controller must be done: all queues full of commands.
const STEPS_MAX: u32 = 40_000;
const QUEUES: u16 = 4;
const ADMIN: [u8; 18] = [
    admin::DELETE_SQ,
    admin::CREATE_SQ,
    admin::GET_LOG_PAGE,
    admin::DELETE_CQ,
    admin::CREATE_CQ,
    admin::IDENTIFY,
    admin::ABORT,
    admin::SET_FEATURES,
    admin::GET_FEATURES,
    admin::ASYNC_EVENT,
    admin::NAMESPACE_MANAGEMENT,
    admin::FIRMWARE_COMMIT,
    admin::FIRMWARE_DOWNLOAD,
    admin::NAMESPACE_ATTACHMENT,
    admin::KEEP_ALIVE,
    admin::DOORBELL_BUFFER,
    admin::FORMAT_NVM,
    admin::SANITIZE,
];
const NVM: [u8; 9] = [
    nvm::FLUSH,
    nvm::WRITE,
    nvm::READ,
    nvm::WRITE_UNCORRECTABLE,
    nvm::COMPARE,
    nvm::WRITE_ZEROES,
    nvm::DATASET_MANAGEMENT,
    nvm::VERIFY,
    nvm::COPY,
];

/// Takes numbers from bytes; zeroes after their end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn u8(&mut self) -> u8 {
        let Some((byte, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *byte
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes([self.u8(), self.u8(), self.u8(), self.u8()])
    }

    fn below(&mut self, end: u32) -> u32 {
        (u32::from(self.u8()) | u32::from(self.u8()) << 8) % end
    }

    /// A number that is small in most cases.
    fn small(&mut self) -> u32 {
        match self.u8() {
            0 => u32::MAX,
            1 => self.u32(),
            n if n < 192 => u32::from(n) % 9,
            n => u32::from(n),
        }
    }
}

struct Host {
    model: Arc<Model>,
    memory: DmaRange,
    mapping: Arc<Mapping>,
    iova: u64,
    now: u64,
}

/// Lets a host made from `bytes` loose on a model, then checks that the model serves an honest host.
///
/// # Errors
/// Without memory or descriptors.
///
/// # Panics
/// If the model breaks a promise.
pub fn attack(bytes: &[u8]) -> Result<(), PciError> {
    let mut bytes = Bytes(bytes);
    let mut host = Host::new(&mut bytes)?;
    host.enable(32);
    while !bytes.0.is_empty() {
        host.act(&mut bytes)?;
    }
    host.check_recovery()
}

impl Host {
    fn new(bytes: &mut Bytes<'_>) -> Result<Self, PciError> {
        let slow =
            Timing { admin: 0..=1_000, io: 0..=10_000, format: 5_000, sanitize: 5_000, ..Timing::IMMEDIATE };
        let config = Config {
            seed: u64::from(bytes.u32()),
            io_queues: QUEUES,
            vectors: 5,
            queue_entries: 64,
            in_flight: 100,
            commands_per_step: COMMANDS_PER_STEP,
            timing: if bytes.u8() & 1 == 0 { Timing::IMMEDIATE } else { slow },
            tnvmcap: 4 << 20,
            namespaces: vec![
                (1, NamespaceConfig::new(256, 0, 1)),
                (2, NamespaceConfig::new(64, 1, 2)),
                (3, NamespaceConfig::new(64, 2, 3)),
            ],
            ..Config::default()
        };
        let model = Model::new("hostile", config)?;
        let mapping = Mapping::anonymous(MEMORY).map_err(|_| PciError::Unsupported("memory"))?;
        let mapping = Arc::new(mapping);
        let memory = mapping.dma_range(0, MEMORY).ok_or(PciError::Unsupported("memory"))?;
        let iova = model.map(&memory)?;
        model.set_bus_master(true)?;
        Ok(Self { model, memory, mapping, iova, now: 0 })
    }

    fn set(&self, offset: u64, value: u64, width: Width) {
        // A register that does not exist is an error of the transport, which changes nothing.
        let _ = self.model.write_register(offset, width, value);
    }

    /// Enables the controller with an admin queue pair in the first two pages.
    fn enable(&mut self, entries: u32) {
        self.set(0x24, u64::from(entries - 1) << 16 | u64::from(entries - 1), Width::Four);
        self.set(0x28, self.iova, Width::Eight);
        self.set(0x30, self.iova + PAGE, Width::Eight);
        self.set(0x14, 6 << 16 | 4 << 20 | 1, Width::Four);
        self.settle();
    }

    /// Steps until the controller waits for the host or for time; each step does bounded work.
    fn settle(&mut self) {
        for _ in 0..STEPS_MAX {
            let before = self.fetched();
            let next = self.model.step(self.now);
            let fetched = self.fetched() - before;
            assert!(fetched <= u64::from(COMMANDS_PER_STEP), "{fetched} commands in one step");
            if next > self.now {
                return;
            }
        }
        panic!("the controller does not come to rest");
    }

    fn fetched(&self) -> u64 {
        self.model.with(|c| c.counts().admin_commands + c.counts().io_commands)
    }

    fn act(&mut self, bytes: &mut Bytes<'_>) -> Result<(), PciError> {
        match bytes.u8() % 16 {
            0 => {
                let offset = [0x14, 0x24, 0x28, 0x30, 0x1c, 0x20, 0x0c, 0x100][bytes.below(8) as usize];
                self.set(offset, u64::from(bytes.u32()), Width::Four);
            }
            1 => {
                let offset = u64::from(bytes.below(0x2000));
                let width = if bytes.u8() & 1 == 0 { Width::Four } else { Width::Eight };
                let _ = self.model.read_register(offset, width);
                self.set(offset, u64::from(bytes.u32()) << 32 | u64::from(bytes.u32()), width);
            }
            2..=4 => {
                let doorbell = u64::from(bytes.below(2 * u32::from(QUEUES) + 4));
                self.set(0x1000 + 4 * doorbell, bytes.small().into(), Width::Four);
            }
            5..=9 => self.put_command(bytes),
            10 => {
                let at = u64::from(bytes.below((MEMORY - 8) as u32));
                let value = u64::from(bytes.u32()) << 32 | u64::from(bytes.u32());
                let _ = self.memory.write(at, &value.to_le_bytes());
            }
            11 => {
                self.now += u64::from(bytes.below(20_000));
                self.settle();
            }
            12 => self.settle(),
            13 => self.enable(2 + bytes.below(60)),
            14 => self.change_transport(bytes)?,
            _ => self.change_device(bytes),
        }
        Ok(())
    }

    /// Writes a command that is well formed in most of its fields, and moves the doorbell of the admin queue to it.
    fn put_command(&mut self, bytes: &mut Bytes<'_>) {
        let mut entry = SubmissionEntry::default();
        for byte in entry.as_mut_bytes() {
            *byte = if bytes.u8() < 240 { 0 } else { bytes.u8() };
        }
        let page = bytes.below(5);
        entry.opcode = match bytes.u8() {
            0..=7 => bytes.u8(),
            _ if page == 0 => ADMIN[bytes.below(ADMIN.len() as u32) as usize],
            _ => NVM[bytes.below(NVM.len() as u32) as usize],
        };
        entry.flags = if bytes.u8() < 200 { 0 } else { bytes.u8() };
        entry.nsid = bytes.small().into();
        for word in [&mut entry.cdw10, &mut entry.cdw11, &mut entry.cdw12, &mut entry.cdw13] {
            *word = (bytes.small() | bytes.small() << 16).into();
        }
        for half in 0..2 {
            let address = self.iova + u64::from(bytes.below(64)) * PAGE + u64::from(bytes.small()) * 4;
            let address = if bytes.u8() < 16 { u64::from(bytes.u32()) } else { address };
            entry.dptr[8 * half..8 * half + 8].copy_from_slice(&address.to_le_bytes());
        }
        // The admin queue is in page 0, and queues that the host creates are in any page.
        let at =
            u64::from(if page == 0 { 0 } else { bytes.below(64) }) * PAGE + u64::from(bytes.below(64)) * 64;
        let _ = self.memory.write(at, entry.as_bytes());
        if page == 0 {
            self.set(0x1000, u64::from(bytes.below(32)), Width::Four);
        }
    }

    fn change_transport(&mut self, bytes: &mut Bytes<'_>) -> Result<(), PciError> {
        match bytes.u8() % 6 {
            0 => self.model.set_bus_master(bytes.u8() & 1 == 0)?,
            1 => {
                self.model.unmap(self.iova, MEMORY)?;
                self.settle();
                self.iova = self.model.map(&self.memory)?;
            }
            2 => {
                if let Some(mask) = self.model.vector_mask(bytes.u8().into()) {
                    if bytes.u8() & 1 == 0 { mask.mask() } else { mask.unmask() }
                }
            }
            3 => {
                let _ = self.model.reset();
            }
            4 => {
                let data = [bytes.u8(), bytes.u8()];
                let _ = self.model.write_config(bytes.below(5000) as u16, &data);
            }
            _ => {
                let other = self.mapping.dma_range(0, PAGE).ok_or(PciError::Unsupported("memory"))?;
                self.model.map(&other)?;
            }
        }
        Ok(())
    }

    fn change_device(&mut self, bytes: &mut Bytes<'_>) {
        let probability = bytes.u32() as u16 / 4;
        let kind = bytes.u8() % 9;
        let nsid = 1 + bytes.below(4);
        self.model.with(|c| match kind {
            0 => c.pull_out(),
            1 => c.plug_in(),
            2 => c.fail_power(),
            3 => c.fail_fatally(),
            4 => c.resize_namespace(nsid, u64::from(probability) % 512),
            5 => c.remove_namespace(nsid),
            6 => c.add_namespace(nsid, NamespaceConfig::new(64, (probability % 6) as u8, 9)),
            7 => {
                let all = Hostile {
                    registers: probability & 1 == 0,
                    events: probability & 2 == 0,
                    identify: true,
                    logs: true,
                    features: true,
                };
                c.faults().hostile = all;
            }
            _ => c.faults().set_random(Random {
                any_status: probability,
                delay: probability,
                delay_max: 5_000,
                lose: probability,
                stick: probability / 8,
                distort: probability / 2,
                ..Random::default()
            }),
        });
    }

    /// Resets the controller and reads a register page's worth of identify data, as an honest host does.
    fn check_recovery(&mut self) -> Result<(), PciError> {
        self.model.with(|c| {
            c.plug_in();
            c.faults().clear();
        });
        self.model.set_bus_master(true)?;
        self.set(0x14, 0, Width::Four);
        self.now += 1_000_000_000;
        self.settle();
        let _ = self.memory.write(0, &[0; 2 * PAGE as usize]);
        self.enable(32);
        let status = self.model.read_register(0x1c, Width::Four)?;
        assert_eq!(status & 0xf, 1, "ready, not fatal");
        let mut entry =
            SubmissionEntry { opcode: admin::IDENTIFY, cdw10: 1.into(), ..SubmissionEntry::default() };
        entry.dptr[..8].copy_from_slice(&(self.iova + 2 * PAGE).to_le_bytes());
        let _ = self.memory.write(0, entry.as_bytes());
        self.set(0x1000, 1, Width::Four);
        self.settle();
        self.now += 1_000_000;
        self.settle();
        let mut done = [0; 16];
        let _ = self.memory.read(PAGE, &mut done);
        let done = CompletionEntry::read_from_bytes(&done).unwrap_or_default();
        assert_eq!(done.status.get(), 1, "a success with phase 1: {done:?}");
        let mut version = [0; 4];
        let _ = self.memory.read(2 * PAGE + 80, &mut version);
        assert_eq!(u32::from_le_bytes(first(&version)), 0x0002_0000);
        Ok(())
    }
}
