//! Opens an NVMe controller by VFIO and shows what a driver would use: registers, DMA, interrupts, reset.
//!
//!     cargo run -p aryk-pci --example function -- 0000:3d:00.0
//!     cargo run -p aryk-pci --example function -- bind 0000:3d:00.0
//!     cargo run -p aryk-pci --example function -- unbind 0000:3d:00.0
//!     cargo run -p aryk-pci --example function -- list
//!     cargo run -p aryk-pci --example function -- hold 0000:3d:00.0
//!
//! `hold` keeps the function open until the kernel asks for it back.

use aryk_dma::Mapping;
use aryk_pci::sysfs::Sysfs;
use aryk_pci::vfio::Vfio;
use aryk_pci::{Address, Function, PciError, Registers, Width};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;

/// Registers of a controller (NVMe 2.0 §3.1.3): capabilities, version, configuration, status.
const CAP: u64 = 0x00;
const VS: u64 = 0x08;
const CSTS: u64 = 0x1c;
/// The command register of configuration space, and its bit that enables the memory.
const COMMAND: u16 = 0x04;
const COMMAND_MEMORY: u8 = 1 << 1;
/// The first doorbell.
const DOORBELLS: u64 = 0x1000;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let sysfs = Sysfs::default();
    match words[..] {
        ["list"] => list(&sysfs)?,
        ["bind", address] => drop(sysfs.bind(address.parse()?)?),
        ["unbind", address] => drop(sysfs.unbind(address.parse()?)?),
        ["hold", address] => hold(address.parse()?)?,
        [address] => show(address.parse()?)?,
        _ => return Err("usage: function list | [bind | unbind | hold] ADDRESS".into()),
    }
    Ok(())
}

fn list(sysfs: &Sysfs) -> Result<(), PciError> {
    for function in sysfs.nvme_functions()? {
        let driver = function.driver.as_deref().unwrap_or("-");
        let group = function.group.map_or("-".to_owned(), |group| group.to_string());
        println!("{} {:04x}:{:04x} {driver} {group}", function.address, function.vendor, function.device);
        for device in sysfs.block_devices(function.address)? {
            println!("{} {} bytes", device.name, device.size);
            for usage in device.usage {
                println!("{usage}");
            }
        }
    }
    Ok(())
}

/// Disables the function's memory, as a removal does: the kernel raises SIGBUS at the next access.
fn lose_registers(function: &dyn Function, registers: &Registers) -> Result<(), PciError> {
    let mut command = [0; 2];
    function.read_config(COMMAND, &mut command)?;
    function.write_config(COMMAND, &[command[0] & !COMMAND_MEMORY, command[1]])?;
    println!("lost {:#010x} {}", registers.read(VS), registers.is_lost());
    println!("{}", function.read_register(VS, Width::Four).expect_err("the memory is disabled"));
    function.write_config(COMMAND, &command)?;
    println!("mapped again vs {:#010x}", function.map_registers(0, DOORBELLS)?.read(VS));
    Ok(())
}

fn hold(address: Address) -> Result<(), Box<dyn std::error::Error>> {
    let function = Vfio::new().open(address)?;
    println!("open");
    let events = function.events().ok_or("VFIO has events")?;
    poll(&mut [PollFd::new(&events.removal(), PollFlags::IN)], None)?;
    println!("the kernel asks for {} back: {}", function.name(), events.take_removal());
    Ok(())
}

fn show(address: Address) -> Result<(), Box<dyn std::error::Error>> {
    let vfio = Vfio::new();
    let function = vfio.open(address)?;
    println!("name {}", function.name());
    println!("cap {:#018x}", function.read_register(CAP, Width::Eight)?);
    println!("vs {:#010x}", function.read_register(VS, Width::Four)?);
    println!("csts {:#010x}", function.read_register(CSTS, Width::Four)?);
    println!("second open: {}", vfio.open(address).expect_err("a function is opened once"));
    println!("second process: {}", Vfio::new().open(address).expect_err("a group is opened once"));

    let registers = function.map_registers(0, DOORBELLS + 0x1000)?;
    println!("mapped vs {:#010x}", registers.read(VS));

    let memory = Arc::new(Mapping::anonymous(4 << 20)?);
    let range = memory.dma_range(0, memory.len()).ok_or("a range")?;
    let iova = function.map(&range)?;
    println!("mapped {} bytes at {iova:#x}", range.len());
    println!("same {}", function.map(&range)? == iova);
    function.unmap(iova, range.len())?;
    function.unmap(iova, range.len())?;
    println!("twice: {}", function.unmap(iova, range.len()).expect_err("it is unmapped"));

    let eventfds = [eventfd(0, EventfdFlags::CLOEXEC)?, eventfd(0, EventfdFlags::CLOEXEC)?];
    println!("vectors {}", function.vectors());
    function.set_interrupts(&[eventfds[0].as_fd(), eventfds[1].as_fd()])?;
    function.set_interrupts(&[eventfds[0].as_fd()])?;
    let mask = function.vector_mask(0).ok_or("the kernel does not let map the MSI-X table")?;
    mask.mask();
    mask.unmask();
    println!("masked {}", !mask.is_lost());
    function.set_interrupts(&[])?;

    function.set_bus_master(true)?;
    function.reset()?;
    println!("vs after reset {:#010x}", registers.read(VS));
    lose_registers(&function, &registers)?;
    function.set_bus_master(false)?;
    let again = function.map(&range)?;
    drop(function);
    println!("dropped with a mapping at {again:#x}");
    // The registers and the MSI-X table are still mapped: the device is open, until they go.
    drop((registers, mask));
    println!("opened again: {}", Vfio::new().open(address)?.name());
    Ok(())
}
