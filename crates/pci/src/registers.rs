//! Mapped registers, which reactors write: doorbells. Any context.

use crate::PciError;
use aryk_dma::DeviceMemory;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A range of mapped 32-bit registers. Clones share the mapping, and keep it.
///
/// Accesses are volatile and make no system call. A write does not wait for the device. A read waits, and a dead link can stall
/// the core for long: reactors only write.
#[derive(Clone, Debug)]
pub struct Registers {
    memory: Arc<DeviceMemory>,
    /// The range in `memory`, in bytes.
    start: u64,
    len: u64,
}

impl Registers {
    /// Zeroed registers in this process's memory, of `len` bytes, rounded up to whole registers: for models of devices. The model
    /// keeps a clone.
    ///
    /// # Errors
    /// [`PciError::OutOfBounds`] for a length of 0; [`PciError::Os`] without memory.
    pub fn in_memory(len: u64) -> Result<Self, PciError> {
        let bad = PciError::OutOfBounds { what: "registers", offset: 0, len };
        let len = len.checked_next_multiple_of(4).filter(|&len| len > 0).ok_or(bad)?;
        let memory =
            DeviceMemory::of_model(len).map_err(|error| PciError::mapping("map registers", error))?;
        Ok(Self { memory: Arc::new(memory), start: 0, len })
    }

    /// The `len` bytes from `start` of mapped memory on; `None` if that is no range of registers in it.
    pub fn new(memory: Arc<DeviceMemory>, start: u64, len: u64) -> Option<Self> {
        let end = start.checked_add(len).filter(|&end| end <= memory.len())?;
        (start.is_multiple_of(4) && end.is_multiple_of(4)).then_some(Self { memory, start, len })
    }

    /// The `len` bytes from `offset` of these registers on; `None` if that is no range of registers in them.
    pub fn part(&self, offset: u64, len: u64) -> Option<Self> {
        offset.checked_add(len).filter(|end| *end <= self.len)?;
        Self::new(Arc::clone(&self.memory), self.start + offset, len)
    }

    /// Calls `use_file` with the memory file of registers in this process's memory, and the offset of the range in it; `None` for
    /// mapped registers of a device.
    pub fn with_file<T>(&self, use_file: impl FnOnce(BorrowedFd<'_>, u64) -> T) -> Option<T> {
        self.memory.file().map(|file| use_file(file, self.start))
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no registers.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads the register at `offset` bytes. A lost mapping returns all ones.
    ///
    /// # Panics
    /// If `offset` is out of bounds or no multiple of 4.
    #[inline]
    pub fn read(&self, offset: u64) -> u32 {
        self.memory.load(self.at(offset))
    }

    /// Writes the register at `offset` bytes. The device sees earlier stores to memory before this one. A lost mapping ignores
    /// the write.
    ///
    /// # Panics
    /// As [`Registers::read`].
    #[inline]
    pub fn write(&self, offset: u64, value: u32) {
        self.memory.store(self.at(offset), value);
    }

    /// Whether an access found the registers gone: the device was removed, or is being reset.
    pub fn is_lost(&self) -> bool {
        self.memory.is_lost()
    }

    #[inline]
    fn at(&self, offset: u64) -> u64 {
        assert!(offset < self.len, "register {offset:#x} of {:#x} bytes", self.len);
        self.start + offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_shares_the_registers_of_its_memory() {
        let memory = Arc::new(DeviceMemory::of_model(4096).unwrap());
        let all = Registers::new(Arc::clone(&memory), 0, 4096).unwrap();
        let some = Registers::new(Arc::clone(&memory), 8, 8).unwrap();
        some.write(4, 7);
        assert_eq!((all.read(12), some.read(4), all.clone().read(12)), (7, 7, 7));
        for (start, len) in [(2, 4), (0, 6), (4096, 4), (u64::MAX - 3, 8)] {
            assert!(Registers::new(Arc::clone(&memory), start, len).is_none(), "{start}+{len}");
        }
    }

    #[test]
    #[should_panic(expected = "register 0x8 of 0x8 bytes")]
    fn a_register_outside_of_the_range_is_refused() {
        Registers::in_memory(6).unwrap().write(8, 1);
    }
}
