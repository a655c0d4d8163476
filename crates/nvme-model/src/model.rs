//! The controller as a PCI function: its lock, its configuration space, and the thread that runs it. Context: any; calls
//! wait for the lock, and never longer than one burst of the thread.
//!
//! The host writes doorbells into memory that the controller polls. In a stepped model, a test alternates its driver and
//! [`Model::step`]. A running model polls on a thread of its own; the thread holds the lock for a burst of turns, and
//! hands it over when another thread asks.

use crate::bus::{MSIX_ENTRY, MapRefusal};
use crate::config::{Config, Nanos};
use crate::controller::Controller;
use crate::registers::DOORBELLS;
use aryk_dma::{DmaRange, PAGE};
use aryk_pci::vfio_user::Served;
use aryk_pci::{Events, Function, PciError, Registers, VectorMask, Width};
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Turns of a running model between two looks at the clock.
const BURST: u32 = 64;
/// Bursts without work after which the thread of a running model yields its processor, each time.
const IDLE_BURSTS: u32 = 64;
const CONFIG_LEN: usize = 4096;
/// Offset of the command register, and its bits.
const COMMAND: usize = 4;
const MEMORY: u8 = 1 << 1;
const BUS_MASTER: u8 = 1 << 2;

/// A model controller as a PCI function.
#[derive(Debug)]
pub struct Model {
    name: String,
    controller: Mutex<Controller>,
    /// BAR 0: properties, doorbells, the MSI-X table and its pending bits. Only the doorbells, and the masks of vectors for a
    /// driver in this process, are in this memory.
    bar: Registers,
    /// Offset of the MSI-X table, behind the doorbells.
    doorbells_end: u64,
    table: Registers,
    pci_config: Mutex<Box<[u8; CONFIG_LEN]>>,
    events: Events,
    vectors: u16,
    /// Threads that wait for the controller while a thread runs it.
    waiting: AtomicU32,
}

impl Model {
    /// A model with its device switched off, as after power-on.
    ///
    /// # Errors
    /// [`PciError::Os`] without memory or descriptors.
    pub fn new(name: &str, config: Config) -> Result<Arc<Self>, PciError> {
        let doorbells_end = Controller::doorbells_end(&config);
        let table = (u64::from(config.vectors) * MSIX_ENTRY).next_multiple_of(PAGE);
        let bar = Registers::in_memory((doorbells_end + table + PAGE).next_power_of_two())?;
        let pending_bits = doorbells_end + table;
        let bad = PciError::OutOfBounds { what: "vectors", offset: 0, len: config.vectors.into() };
        let table = bar.part(doorbells_end, u64::from(config.vectors) * MSIX_ENTRY).ok_or(bad)?;
        Ok(Arc::new(Self {
            name: name.to_owned(),
            pci_config: Mutex::new(config_space(&config, doorbells_end as u32, pending_bits as u32)),
            vectors: config.vectors,
            controller: Mutex::new(Controller::new(config, bar.clone(), table.clone())),
            bar,
            doorbells_end,
            table,
            events: Events::new()?,
            waiting: AtomicU32::new(0),
        }))
    }

    /// Does everything that is due at `now`, in nanoseconds of the test's time. Returns the time of the next event; see
    /// [`Controller::step`].
    pub fn step(&self, now: Nanos) -> Nanos {
        self.lock().step(now)
    }

    /// Calls `use_controller` with the controller.
    pub fn with<T>(&self, use_controller: impl FnOnce(&mut Controller) -> T) -> T {
        use_controller(&mut self.lock())
    }

    /// Signals that the kernel wants the device back, as before a removal.
    pub fn request_removal(&self) {
        self.events.signal_removal();
    }

    /// Signals a fatal error of the PCI function.
    pub fn report_error(&self) {
        self.events.signal_error();
    }

    /// Runs the model on a thread, in real time, until the result is dropped. The thread polls the doorbells without a
    /// pause, and yields its processor after some microseconds without work.
    ///
    /// # Errors
    /// Those of creating a thread.
    pub fn run(self: &Arc<Self>) -> std::io::Result<Running> {
        let stop = Arc::new(AtomicBool::new(false));
        let (model, stopped) = (Arc::clone(self), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("nvme-model".into());
        let thread = thread.spawn(move || model.poll_until(&stopped))?;
        Ok(Running { stop, thread: Some(thread) })
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "a running model lives in real time; the controller takes it as a parameter"
    )]
    fn poll_until(&self, stop: &AtomicBool) {
        let start = Instant::now();
        let mut idle_bursts = 0;
        while !stop.load(Ordering::Relaxed) {
            let now = Nanos::try_from(start.elapsed().as_nanos()).unwrap_or(Nanos::MAX);
            let mut controller = self.controller.lock().unwrap_or_else(PoisonError::into_inner);
            let before = controller.activity();
            for _ in 0..BURST {
                controller.turn(now);
                if self.waiting.load(Ordering::Relaxed) > 0 {
                    break;
                }
                std::hint::spin_loop();
            }
            controller.step(now);
            idle_bursts = if controller.activity() == before { idle_bursts + 1 } else { 0 };
            drop(controller);
            while self.waiting.load(Ordering::Relaxed) > 0 && !stop.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            if idle_bursts > IDLE_BURSTS {
                std::thread::yield_now();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Controller> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = self.controller.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    fn check_register(&self, offset: u64, width: Width) -> Result<(), PciError> {
        let len = width.bytes() as u64;
        let is_inside =
            offset.is_multiple_of(len) && offset.checked_add(len).is_some_and(|end| end <= self.bar.len());
        is_inside.then_some(()).ok_or(PciError::OutOfBounds { what: "registers", offset, len })
    }

    /// Writes a doorbell, or ignores a write to the MSI-X table, which a driver in this process writes by
    /// [`Function::vector_mask`], and a client of vfio-user emulates.
    fn write_doorbell(&self, offset: u64, value: u32) {
        if offset < self.doorbells_end {
            self.bar.write(offset, value);
        }
    }

    /// Sets the bits of the command register that the model has.
    fn set_command(&self, command: u8) {
        let mut space = self.pci_config.lock().unwrap_or_else(PoisonError::into_inner);
        space[COMMAND] = command & (MEMORY | BUS_MASTER);
        drop(space);
        self.lock().bus.is_master = command & BUS_MASTER != 0;
    }

    fn command(&self) -> u8 {
        self.pci_config.lock().unwrap_or_else(PoisonError::into_inner)[COMMAND]
    }
}

/// The header of a PCI function of class NVMe (01 08 02), with a list of three capabilities: power management, MSI-X, PCI
/// Express.
fn config_space(config: &Config, msix_table: u32, pending_bits: u32) -> Box<[u8; CONFIG_LEN]> {
    let mut space = Box::new([0; CONFIG_LEN]);
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &config.pci_id.0.to_le_bytes());
    put(2, &config.pci_id.1.to_le_bytes());
    put(6, &[1 << 4]); // a capability list
    put(8, &[0, 2, 8, 1]); // revision, programming interface, subclass, class
    put(0x10, &[4]); // BAR 0: 64 bits of memory
    put(0x2c, &config.pci_id.0.to_le_bytes());
    put(0x34, &[0x40]);
    put(0x40, &[0x01, 0x50, 0x03, 0]);
    put(0x50, &[0x11, 0x60]);
    put(0x52, &(config.vectors.saturating_sub(1) & 0x7ff).to_le_bytes());
    put(0x54, &msix_table.to_le_bytes());
    put(0x58, &pending_bits.to_le_bytes());
    put(0x60, &[0x10, 0, 0x02, 0]); // version 2, endpoint
    put(0x64, &(1u32 << 28).to_le_bytes()); // function-level reset
    space
}

impl Function for Model {
    fn name(&self) -> &str {
        &self.name
    }

    fn read_register(&self, offset: u64, width: Width) -> Result<u64, PciError> {
        self.check_register(offset, width)?;
        if offset >= DOORBELLS {
            return Ok(0);
        }
        let mut controller = self.lock();
        let low = u64::from(controller.read32(offset));
        Ok(match width {
            Width::Four => low,
            Width::Eight => low | u64::from(controller.read32(offset + 4)) << 32,
        })
    }

    fn write_register(&self, offset: u64, width: Width, value: u64) -> Result<(), PciError> {
        self.check_register(offset, width)?;
        let halves = [(offset, value as u32), (offset + 4, (value >> 32) as u32)];
        for (offset, value) in halves.into_iter().take(width.bytes() / 4) {
            if offset >= DOORBELLS {
                self.write_doorbell(offset, value);
            } else {
                self.lock().write32(offset, value);
            }
        }
        Ok(())
    }

    fn read_config(&self, offset: u16, out: &mut [u8]) -> Result<(), PciError> {
        let bad = PciError::OutOfBounds {
            what: "configuration space",
            offset: offset.into(),
            len: out.len() as u64,
        };
        if self.lock().is_gone() {
            out.fill(0xff);
            return Ok(());
        }
        let space = self.pci_config.lock().unwrap_or_else(PoisonError::into_inner);
        let start = usize::from(offset);
        let from = start.checked_add(out.len()).and_then(|end| space.get(start..end)).ok_or(bad)?;
        out.copy_from_slice(from);
        Ok(())
    }

    fn write_config(&self, offset: u16, data: &[u8]) -> Result<(), PciError> {
        let start = usize::from(offset);
        let end = start + data.len();
        if end > CONFIG_LEN {
            let len = data.len() as u64;
            return Err(PciError::OutOfBounds { what: "configuration space", offset: offset.into(), len });
        }
        // Of all fields, only the command register does something.
        if (start..end).contains(&COMMAND) {
            self.set_command(data[COMMAND - start]);
        }
        Ok(())
    }

    fn map_registers(&self, offset: u64, len: u64) -> Result<Registers, PciError> {
        if offset < DOORBELLS {
            // The model polls doorbells, and would miss writes to other registers.
            return Err(PciError::Unsupported("mapping registers in front of the doorbells"));
        }
        let bad = PciError::OutOfBounds { what: "registers", offset, len };
        let end = offset.checked_add(len).filter(|&end| end <= self.doorbells_end);
        end.and_then(|_| self.bar.part(offset, len)).ok_or(bad)
    }

    fn map(&self, memory: &DmaRange) -> Result<u64, PciError> {
        self.lock().bus.map(memory).map_err(|refusal| refused(refusal, memory))
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), PciError> {
        self.lock().bus.unmap(iova, len).then_some(()).ok_or(PciError::NotMapped { iova, len })
    }

    fn vectors(&self) -> u16 {
        self.vectors
    }

    fn set_interrupts(&self, eventfds: &[BorrowedFd<'_>]) -> Result<(), PciError> {
        if eventfds.len() > usize::from(self.vectors) {
            let len = eventfds.len() as u64;
            return Err(PciError::OutOfBounds { what: "interrupt vectors", offset: 0, len });
        }
        let mut files = Vec::new();
        for eventfd in eventfds {
            let owned = eventfd.try_clone_to_owned();
            let owned = owned.map_err(|_| PciError::Unsupported("more descriptors of this process"))?;
            files.push(File::from(owned));
        }
        self.lock().bus.set_eventfds(files);
        Ok(())
    }

    fn vector_mask(&self, vector: u16) -> Option<VectorMask> {
        VectorMask::new(&self.table, vector)
    }

    fn set_bus_master(&self, on: bool) -> Result<(), PciError> {
        let command = self.command();
        self.set_command(if on { command | BUS_MASTER } else { command & !BUS_MASTER });
        Ok(())
    }

    fn reset(&self) -> Result<(), PciError> {
        let mut controller = self.lock();
        if controller.is_gone() {
            let reason = "the device was removed".to_owned();
            return Err(PciError::Gone { name: self.name.clone(), reason });
        }
        controller.function_reset();
        Ok(())
    }

    fn events(&self) -> Option<Events> {
        Some(self.events.clone())
    }
}

impl Served for Model {
    fn registers_len(&self) -> u64 {
        self.bar.len()
    }

    fn config_len(&self) -> u16 {
        CONFIG_LEN as u16
    }

    fn mappable(&self) -> Option<(u64, u64)> {
        Some((DOORBELLS, self.doorbells_end - DOORBELLS))
    }

    fn map_at(&self, iova: u64, memory: &DmaRange) -> Result<(), PciError> {
        self.lock().bus.map_at(iova, memory).map_err(|refusal| refused(refusal, memory))
    }
}

/// The error for a mapping that the bus refuses.
fn refused(refusal: MapRefusal, memory: &DmaRange) -> PciError {
    match refusal {
        MapRefusal::NotPages => {
            PciError::OutOfBounds { what: "memory for DMA", offset: memory.addr(), len: memory.len() }
        }
        MapRefusal::Overlap => PciError::Unsupported("a mapping over another one"),
        MapRefusal::TooMany => PciError::MappingLimit { limit: crate::bus::MAPPINGS_MAX as u32 },
    }
}

/// A model that a thread runs, until this is dropped.
#[derive(Debug)]
pub struct Running {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the model was printed by its thread.
            let _ = thread.join();
        }
    }
}
