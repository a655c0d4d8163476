//! The kernel's calls on VFIO containers, groups and devices, and on iommufd. Control context; every call may block.
//!
//! Each call has a structure of `include/uapi/linux/vfio.h` or `iommufd.h`, from the crates of bindings.

use crate::info::{Info, Iommu, Region};
use iommufd_bindings as iommufd;
use rustix::io::{Errno, Result};
use rustix::ioctl::{self, Ioctl, IoctlOutput, Opcode, opcode};
use std::ffi::{CStr, c_void};
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use vfio_bindings::bindings::vfio as abi;
use zerocopy::IntoBytes;

/// Calls of VFIO, as offsets from `VFIO_BASE`.
mod number {
    pub(super) const GET_API_VERSION: u32 = 0;
    pub(super) const CHECK_EXTENSION: u32 = 1;
    pub(super) const SET_IOMMU: u32 = 2;
    pub(super) const GROUP_GET_STATUS: u32 = 3;
    pub(super) const GROUP_SET_CONTAINER: u32 = 4;
    pub(super) const GROUP_GET_DEVICE_FD: u32 = 6;
    pub(super) const DEVICE_GET_INFO: u32 = 7;
    pub(super) const DEVICE_GET_REGION_INFO: u32 = 8;
    pub(super) const DEVICE_GET_IRQ_INFO: u32 = 9;
    pub(super) const DEVICE_SET_IRQS: u32 = 10;
    pub(super) const DEVICE_RESET: u32 = 11;
    pub(super) const IOMMU_GET_INFO: u32 = 12;
    pub(super) const IOMMU_MAP_DMA: u32 = 13;
    pub(super) const IOMMU_UNMAP_DMA: u32 = 14;
    pub(super) const DEVICE_BIND_IOMMUFD: u32 = 18;
    pub(super) const DEVICE_ATTACH_IOMMUFD_PT: u32 = 19;
}

/// Upper bound of an answer of variable length.
const ANSWER_MAX: usize = 1 << 20;

struct Call {
    opcode: Opcode,
    argument: *mut c_void,
}

// SAFETY: the constructors below pass an argument that is valid for the opcode, which may write to it; the output is the plain
// return value.
unsafe impl Ioctl for Call {
    type Output = IoctlOutput;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.argument
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _argument: *mut c_void) -> Result<IoctlOutput> {
        Ok(output)
    }
}

const fn vfio(number: u32) -> Opcode {
    opcode::none(abi::VFIO_TYPE, (abi::VFIO_BASE + number) as u8)
}

/// # Safety
/// The call takes a pointer to a `T`, or to a structure that `T` starts with and whose length field counts the rest.
unsafe fn with<T: ?Sized>(fd: BorrowedFd<'_>, opcode: Opcode, argument: &mut T) -> Result<IoctlOutput> {
    let argument = std::ptr::from_mut(argument).cast();
    // SAFETY: the caller's promise; the argument is borrowed during the call.
    unsafe { ioctl::ioctl(fd, Call { opcode, argument }) }
}

/// # Safety
/// The call takes a number, or nothing.
unsafe fn with_number(fd: BorrowedFd<'_>, opcode: Opcode, argument: usize) -> Result<IoctlOutput> {
    let argument = std::ptr::without_provenance_mut(argument);
    // SAFETY: the caller's promise.
    unsafe { ioctl::ioctl(fd, Call { opcode, argument }) }
}

/// `size_of` as the kernel's `argsz`.
const fn argsz<T>() -> u32 {
    size_of::<T>() as u32
}

/// Asks for an answer of variable length. `head` is the start of the structure after its length field.
///
/// # Safety
/// The call takes a pointer to a structure that starts with `argsz`, and writes at most that many bytes.
unsafe fn query(fd: BorrowedFd<'_>, number: u32, head: [u32; 2], size: usize) -> Result<Info> {
    let mut len = size;
    loop {
        let mut words = vec![0_u64; len.div_ceil(8)];
        words[0] = u64::from(len as u32) | u64::from(head[0]) << 32;
        words[1] = u64::from(head[1]);
        // SAFETY: the caller's promise; the first field is the buffer's length.
        unsafe { with(fd, vfio(number), words.as_mut_slice())? };
        let info = Info::new(words.as_bytes()[..len].to_vec());
        match info.u32(0) as usize {
            needed if needed > ANSWER_MAX => return Err(Errno::MSGSIZE),
            needed if needed > len => len = needed,
            _ => return Ok(info),
        }
    }
}

/// Whether the kernel speaks this version of VFIO, with IOMMUs of type 1, version 2.
pub(super) fn has_type1(container: BorrowedFd<'_>) -> Result<bool> {
    let extension = abi::VFIO_TYPE1v2_IOMMU as usize;
    // SAFETY: both calls take numbers.
    let (version, has) = unsafe {
        (
            with_number(container, vfio(number::GET_API_VERSION), 0)?,
            with_number(container, vfio(number::CHECK_EXTENSION), extension)?,
        )
    };
    Ok(version.cast_unsigned() == abi::VFIO_API_VERSION && has == 1)
}

/// Makes a container, which has a group, use the IOMMU.
pub(super) fn set_iommu(container: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: the call takes a number.
    unsafe { with_number(container, vfio(number::SET_IOMMU), abi::VFIO_TYPE1v2_IOMMU as usize) }.map(drop)
}

/// Whether all devices of a group belong to VFIO or to no driver.
pub(super) fn is_viable(group: BorrowedFd<'_>) -> Result<bool> {
    let mut status =
        abi::vfio_group_status { argsz: argsz::<abi::vfio_group_status>(), ..Default::default() };
    // SAFETY: the structure of this call.
    unsafe { with(group, vfio(number::GROUP_GET_STATUS), &mut status)? };
    Ok(status.flags & abi::VFIO_GROUP_FLAGS_VIABLE != 0)
}

/// Adds a group to a container.
pub(super) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> Result<()> {
    let mut container = container.as_raw_fd();
    // SAFETY: the call takes a pointer to a descriptor.
    unsafe { with(group, vfio(number::GROUP_SET_CONTAINER), &mut container) }.map(drop)
}

/// Opens a device of a group that is in a container. The kernel enables the device, which includes a reset.
pub(super) fn device(group: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd> {
    let name = name.as_ptr().cast_mut().cast();
    let call = Call { opcode: vfio(number::GROUP_GET_DEVICE_FD), argument: name };
    // SAFETY: the call takes a pointer to a string, which it only reads.
    let fd = unsafe { ioctl::ioctl(group, call)? };
    // SAFETY: the call returned a new descriptor, which this process owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether the device can be reset by a function-level reset or another way that concerns only this function.
pub(super) fn is_resettable(device: BorrowedFd<'_>) -> Result<bool> {
    let size = size_of::<abi::vfio_device_info>();
    // SAFETY: the structure of this call.
    let info = unsafe { query(device, number::DEVICE_GET_INFO, [0, 0], size)? };
    Ok(info.u32(offset_of!(abi::vfio_device_info, flags)) & abi::VFIO_DEVICE_FLAGS_RESET != 0)
}

/// A region of the device.
pub(super) fn region(device: BorrowedFd<'_>, index: u32) -> Result<Region> {
    let size = size_of::<abi::vfio_region_info>();
    // SAFETY: the structure of this call: after its length the flags, then the index.
    let info = unsafe { query(device, number::DEVICE_GET_REGION_INFO, [0, index], size)? };
    Ok(Region::parse(&info))
}

/// The number of interrupts of a kind.
pub(super) fn interrupts(device: BorrowedFd<'_>, index: u32) -> Result<u32> {
    let size = size_of::<abi::vfio_irq_info>();
    // SAFETY: the structure of this call: after its length the flags, then the index.
    let info = unsafe { query(device, number::DEVICE_GET_IRQ_INFO, [0, index], size)? };
    Ok(info.u32(offset_of!(abi::vfio_irq_info, count)))
}

/// Makes interrupts 0.. of a kind signal these eventfds; an empty list disables the kind. ENOSPC if the host has fewer vectors.
pub(super) fn set_interrupts(device: BorrowedFd<'_>, index: u32, eventfds: &[BorrowedFd<'_>]) -> Result<()> {
    let data = if eventfds.is_empty() { abi::VFIO_IRQ_SET_DATA_NONE } else { abi::VFIO_IRQ_SET_DATA_EVENTFD };
    let flags = data | abi::VFIO_IRQ_SET_ACTION_TRIGGER;
    let size = size_of::<abi::vfio_irq_set>() + 4 * eventfds.len();
    let mut words = vec![size as u32, flags, index, 0, eventfds.len() as u32];
    words.extend(eventfds.iter().map(|fd| fd.as_raw_fd().cast_unsigned()));
    debug_assert_eq!(words.len() * 4, size);
    // SAFETY: `struct vfio_irq_set`: its length, flags, index, first interrupt, count, then the descriptors.
    let result = unsafe { with(device, vfio(number::DEVICE_SET_IRQS), words.as_mut_slice())? };
    // A positive result is the number of vectors that the kernel could have allocated: it has enabled none.
    if result > 0 { Err(Errno::NOSPC) } else { Ok(()) }
}

/// Resets the device, and restores its configuration space.
pub(super) fn reset(device: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: the call takes nothing.
    unsafe { with_number(device, vfio(number::DEVICE_RESET), 0) }.map(drop)
}

/// What the container's IOMMU can map.
pub(super) fn iommu(container: BorrowedFd<'_>) -> Result<Iommu> {
    let size = size_of::<abi::vfio_iommu_type1_info>();
    // SAFETY: the structure of this call.
    let info = unsafe { query(container, number::IOMMU_GET_INFO, [0, 0], size)? };
    Ok(Iommu::parse(&info))
}

/// Pins memory and maps it, readable and writable by the devices of the container.
pub(super) fn map(container: BorrowedFd<'_>, address: u64, iova: u64, size: u64) -> Result<()> {
    let mut map = abi::vfio_iommu_type1_dma_map {
        argsz: argsz::<abi::vfio_iommu_type1_dma_map>(),
        flags: abi::VFIO_DMA_MAP_FLAG_READ | abi::VFIO_DMA_MAP_FLAG_WRITE,
        vaddr: address,
        iova,
        size,
    };
    // SAFETY: the structure of this call. The kernel checks the address; devices write only to memory that this process accesses
    // as shared memory (`DmaRange`).
    unsafe { with(container, vfio(number::IOMMU_MAP_DMA), &mut map) }.map(drop)
}

/// Unmaps the mappings in a range; returns the unmapped bytes.
pub(super) fn unmap(container: BorrowedFd<'_>, iova: u64, size: u64) -> Result<u64> {
    let mut unmap = abi::vfio_iommu_type1_dma_unmap {
        argsz: argsz::<abi::vfio_iommu_type1_dma_unmap>(),
        iova,
        size,
        ..Default::default()
    };
    // SAFETY: the structure of this call.
    unsafe { with(container, vfio(number::IOMMU_UNMAP_DMA), &mut unmap)? };
    Ok(unmap.size)
}

/// Gives a device's DMA to an iommufd.
pub(super) fn bind(device: BorrowedFd<'_>, iommufd: BorrowedFd<'_>) -> Result<()> {
    let mut bind = abi::vfio_device_bind_iommufd {
        // The structure has grown since its first kernel (6.6), which refuses nothing that is zero.
        argsz: offset_of!(abi::vfio_device_bind_iommufd, token_uuid_ptr) as u32,
        iommufd: iommufd.as_raw_fd(),
        ..Default::default()
    };
    // SAFETY: the structure of this call.
    unsafe { with(device, vfio(number::DEVICE_BIND_IOMMUFD), &mut bind) }.map(drop)
}

/// Attaches a bound device to an address space.
pub(super) fn attach(device: BorrowedFd<'_>, address_space: u32) -> Result<()> {
    let mut attach = abi::vfio_device_attach_iommufd_pt {
        argsz: offset_of!(abi::vfio_device_attach_iommufd_pt, pasid) as u32,
        pt_id: address_space,
        ..Default::default()
    };
    // SAFETY: the structure of this call.
    unsafe { with(device, vfio(number::DEVICE_ATTACH_IOMMUFD_PT), &mut attach) }.map(drop)
}

const fn iommufd_call(number: u32) -> Opcode {
    opcode::none(iommufd::IOMMUFD_TYPE, number as u8)
}

/// Creates an address space.
pub(super) fn new_address_space(iommufd: BorrowedFd<'_>) -> Result<u32> {
    let mut alloc =
        iommufd::iommu_ioas_alloc { size: argsz::<iommufd::iommu_ioas_alloc>(), ..Default::default() };
    // SAFETY: the structure of this call.
    unsafe { with(iommufd.as_fd(), iommufd_call(iommufd::IOMMUFD_CMD_IOAS_ALLOC), &mut alloc)? };
    Ok(alloc.out_ioas_id)
}

/// First and last addresses that the devices attached to an address space can use.
pub(super) fn address_space_ranges(iommufd: BorrowedFd<'_>, id: u32) -> Result<Vec<(u64, u64)>> {
    let mut ranges = vec![0_u64; 2 * 64];
    loop {
        let mut query = iommufd::iommu_ioas_iova_ranges {
            size: argsz::<iommufd::iommu_ioas_iova_ranges>(),
            ioas_id: id,
            num_iovas: (ranges.len() / 2) as u32,
            allowed_iovas: ranges.as_mut_ptr() as u64,
            ..Default::default()
        };
        // SAFETY: the structure of this call, with the address of a list of that many ranges, which outlives the call.
        let result =
            unsafe { with(iommufd, iommufd_call(iommufd::IOMMUFD_CMD_IOAS_IOVA_RANGES), &mut query) };
        let count = query.num_iovas as usize;
        match result {
            Err(Errno::MSGSIZE) if count * 16 <= ANSWER_MAX && count * 2 > ranges.len() => {
                ranges.resize(2 * count, 0);
            }
            Err(errno) => return Err(errno),
            Ok(_) => return Ok(ranges.chunks_exact(2).take(count).map(|pair| (pair[0], pair[1])).collect()),
        }
    }
}

/// As [`map`], in an address space of an iommufd.
pub(super) fn map_in(iommufd: BorrowedFd<'_>, id: u32, address: u64, iova: u64, length: u64) -> Result<()> {
    /// FIXED_IOVA, WRITEABLE and READABLE of `enum iommufd_ioas_map_flags`.
    const FLAGS: u32 = 1 | 2 | 4;
    let mut map = iommufd::iommu_ioas_map {
        size: argsz::<iommufd::iommu_ioas_map>(),
        flags: FLAGS,
        ioas_id: id,
        user_va: address,
        length,
        iova,
        ..Default::default()
    };
    // SAFETY: as in `map`.
    unsafe { with(iommufd, iommufd_call(iommufd::IOMMUFD_CMD_IOAS_MAP), &mut map) }.map(drop)
}

/// As [`unmap`], in an address space of an iommufd.
pub(super) fn unmap_in(iommufd: BorrowedFd<'_>, id: u32, iova: u64, length: u64) -> Result<u64> {
    let mut unmap =
        iommufd::iommu_ioas_unmap { size: argsz::<iommufd::iommu_ioas_unmap>(), ioas_id: id, iova, length };
    // SAFETY: the structure of this call.
    unsafe { with(iommufd, iommufd_call(iommufd::IOMMUFD_CMD_IOAS_UNMAP), &mut unmap)? };
    Ok(unmap.length)
}
