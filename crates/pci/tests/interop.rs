//! Our vfio-user client and server with another implementation of the protocol: the crate `vfio_user`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use aryk_dma::{DmaRange, Mapping, PAGE};
use aryk_pci::vfio_user::{Client, Served, serve};
use aryk_pci::{Events, Function, PciError, Registers, VectorMask, Width};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::io::Error;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};
use vfio_bindings::bindings::vfio as abi;
use vfio_user::{DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion, SparseArea};

const BAR: usize = 0x2000;
const VECTORS: u32 = 33;

/// Their server's device: registers and configuration space of plain bytes. Writing 1 to register 0x40 copies a page of the
/// mapped memory to the next page, and signals the last vector.
#[derive(Debug)]
struct Device {
    regions: [Vec<u8>; 2],
    memory: Option<(File, u64)>,
    eventfds: Vec<File>,
    resets: u32,
}

impl Device {
    fn region(&mut self, region: u32) -> &mut Vec<u8> {
        &mut self.regions[usize::from(region == abi::VFIO_PCI_CONFIG_REGION_INDEX)]
    }
}

impl ServerBackend for Device {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        let offset = offset as usize;
        data.copy_from_slice(&self.region(region)[offset..offset + data.len()]);
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.region(region)[offset as usize..][..data.len()].copy_from_slice(data);
        if (region, offset) == (0, 0x40) {
            let (file, offset) = self.memory.as_ref().unwrap();
            let mut page = [0; PAGE as usize];
            file.read_exact_at(&mut page, *offset)?;
            file.write_all_at(&page, offset + PAGE)?;
            rustix::io::write(self.eventfds.last().unwrap(), &1_u64.to_ne_bytes())?;
        }
        Ok(())
    }

    fn dma_map(
        &mut self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> Result<(), Error> {
        assert_eq!((flags, size), (DmaMapFlags::READ_WRITE, 2 * PAGE));
        assert!(address > 0);
        self.memory = Some((fd.unwrap(), offset));
        Ok(())
    }

    fn dma_unmap(&mut self, _flags: DmaUnmapFlags, _address: u64, size: u64) -> Result<(), Error> {
        assert_eq!(size, 2 * PAGE);
        self.memory = None;
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Error> {
        self.resets += 1;
        Ok(())
    }

    fn set_irqs(
        &mut self,
        index: u32,
        _flags: u32,
        start: u32,
        count: u32,
        fds: Vec<File>,
    ) -> Result<(), Error> {
        if index == abi::VFIO_PCI_MSIX_IRQ_INDEX {
            assert_eq!(fds.len(), count as usize);
            self.eventfds.truncate(start as usize);
            self.eventfds.extend(fds);
        }
        Ok(())
    }
}

/// Their description of a device with the mappable page 0x1000 of BAR 0.
fn description(registers: &File) -> (Vec<IrqInfo>, Vec<ServerRegion>) {
    let count = |index| match index {
        abi::VFIO_PCI_MSIX_IRQ_INDEX => VECTORS,
        abi::VFIO_PCI_ERR_IRQ_INDEX => 1,
        _ => 0,
    };
    let irqs = (0..5).map(|index| IrqInfo { index, flags: 1, count: count(index) }).collect();
    let region = |index| {
        let (size, flags) = match index {
            0 => (BAR as u64, 0b111),
            abi::VFIO_PCI_CONFIG_REGION_INDEX => (256, 0b11),
            _ => (0, 0),
        };
        let argsz = size_of::<abi::vfio_region_info>() as u32;
        let region_info = abi::vfio_region_info { argsz, flags, index, size, ..Default::default() };
        let area = abi::vfio_region_sparse_mmap_area { offset: 0x1000, size: 0x1000 };
        let sparse_areas = if index == 0 { vec![SparseArea { area }] } else { Vec::new() };
        ServerRegion { region_info, sparse_areas, mmap_fd: (index == 0).then_some(registers.as_raw_fd()) }
    };
    (irqs, (0..9).map(region).collect())
}

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn is_signalled(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0; 8]) == Ok(8)
}

#[test]
fn our_client_drives_a_device_of_their_server() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let registers = File::from(rustix::fs::memfd_create("bar", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    registers.set_len(BAR as u64).unwrap();
    let (irqs, regions) = description(&registers);
    let server = Server::new(&path, true, irqs, regions).unwrap();
    let server = std::thread::spawn(move || {
        let mut regions = [vec![0; BAR], vec![0; 256]];
        // The class of NVMe controllers.
        regions[1][9..12].copy_from_slice(&[2, 8, 1]);
        let mut device = Device { regions, memory: None, eventfds: Vec::new(), resets: 0 };
        server.run(&mut device).unwrap();
        device
    });

    let client = Client::connect(&path).unwrap();
    client.write_register(0x28, Width::Eight, 0x1122_3344_5566_7788).unwrap();
    assert_eq!(client.read_register(0x2c, Width::Four).unwrap(), 0x1122_3344);
    client.set_bus_master(true).unwrap();
    client.map_registers(0x1000, 0x1000).unwrap().write(8, 42);
    let mut out = [0; 4];
    registers.read_exact_at(&mut out, 0x1008).unwrap();
    assert_eq!(out, [42, 0, 0, 0]);

    assert_eq!(u32::from(client.vectors()), VECTORS);
    let eventfds: Vec<_> = (0..VECTORS).map(|_| new_eventfd()).collect();
    client.set_interrupts(&eventfds.iter().map(AsFd::as_fd).collect::<Vec<_>>()).unwrap();
    let memory = Arc::new(Mapping::in_file(4 * PAGE).unwrap());
    let range = memory.dma_range(PAGE, 2 * PAGE).unwrap();
    let iova = client.map(&range).unwrap();
    assert!(range.write(0, b"page"));
    client.write_register(0x40, Width::Four, 1).unwrap();
    assert!(range.read(PAGE, &mut out));
    assert_eq!(&out, b"page");
    assert!(is_signalled(&eventfds[32]) && !eventfds[..32].iter().any(is_signalled));
    client.unmap(iova, range.len()).unwrap();
    client.reset().unwrap();
    drop(client);
    let device = server.join().unwrap();
    assert!(device.memory.is_none());
    assert_eq!((device.resets, device.regions[1][4]), (1, 4));
}

/// The function that our server gives to their client.
#[derive(Debug)]
struct Model {
    registers: Registers,
    space: Mutex<[u8; 256]>,
    memory: Mutex<Option<(u64, DmaRange)>>,
    eventfds: Mutex<Vec<OwnedFd>>,
}

impl Function for Model {
    fn name(&self) -> &'static str {
        "model"
    }

    fn read_register(&self, offset: u64, _width: Width) -> Result<u64, PciError> {
        Ok(u64::from(self.registers.read(offset)))
    }

    fn write_register(&self, offset: u64, _width: Width, value: u64) -> Result<(), PciError> {
        self.registers.write(offset, value as u32);
        if offset == 0x40 {
            let memory = self.memory.lock().unwrap();
            assert!(memory.as_ref().unwrap().1.write(8, b"model"));
            for fd in self.eventfds.lock().unwrap().iter() {
                rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
            }
        }
        Ok(())
    }

    fn read_config(&self, offset: u16, out: &mut [u8]) -> Result<(), PciError> {
        out.copy_from_slice(&self.space.lock().unwrap()[usize::from(offset)..][..out.len()]);
        Ok(())
    }

    fn write_config(&self, offset: u16, data: &[u8]) -> Result<(), PciError> {
        self.space.lock().unwrap()[usize::from(offset)..][..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn map_registers(&self, offset: u64, len: u64) -> Result<Registers, PciError> {
        Ok(self.registers.part(offset, len).unwrap())
    }

    fn map(&self, _memory: &DmaRange) -> Result<u64, PciError> {
        Err(PciError::Unsupported("another mapping than the client's"))
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), PciError> {
        let removed = self.memory.lock().unwrap().take();
        removed.map(drop).ok_or(PciError::NotMapped { iova, len })
    }

    fn vectors(&self) -> u16 {
        2
    }

    fn set_interrupts(&self, eventfds: &[BorrowedFd<'_>]) -> Result<(), PciError> {
        *self.eventfds.lock().unwrap() = eventfds.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        Ok(())
    }

    fn vector_mask(&self, _vector: u16) -> Option<VectorMask> {
        None
    }

    fn set_bus_master(&self, _on: bool) -> Result<(), PciError> {
        Ok(())
    }

    fn reset(&self) -> Result<(), PciError> {
        self.registers.write(0x14, 0);
        Ok(())
    }

    fn events(&self) -> Option<Events> {
        None
    }
}

impl Served for Model {
    fn registers_len(&self) -> u64 {
        BAR as u64
    }

    fn config_len(&self) -> u16 {
        256
    }

    fn mappable(&self) -> Option<(u64, u64)> {
        Some((0x1000, 0x1000))
    }

    fn map_at(&self, iova: u64, memory: &DmaRange) -> Result<(), PciError> {
        *self.memory.lock().unwrap() = Some((iova, memory.clone()));
        Ok(())
    }
}

#[test]
fn their_client_drives_a_function_of_our_server() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let model = Arc::new(Model {
        registers: Registers::in_memory(BAR as u64).unwrap(),
        space: Mutex::new([7; 256]),
        memory: Mutex::default(),
        eventfds: Mutex::default(),
    });
    let (listener, served) = (UnixListener::bind(&path).unwrap(), Arc::clone(&model));
    let server = std::thread::spawn(move || serve(listener.accept().unwrap().0, &*served));

    let mut client = vfio_user::Client::new(&path).unwrap();
    let bar = client.region(0).unwrap();
    let area = bar.sparse_areas[0];
    assert_eq!((bar.size, area.offset, area.size), (BAR as u64, 0x1000, 0x1000));
    let file = bar.file_offset.as_ref().unwrap();
    let at = file.start() + area.offset + 8;
    file.file().write_all_at(&[42, 0, 0, 0], at).unwrap();
    assert_eq!(model.registers.read(0x1008), 42);
    assert!(client.region(1).unwrap().size == 0 && client.region(8).unwrap().size == 0);

    client.region_write(0, 0x14, &[1, 2, 3, 4]).unwrap();
    let mut out = [0; 4];
    client.region_read(0, 0x14, &mut out).unwrap();
    assert_eq!(out, [1, 2, 3, 4]);
    client.region_read(abi::VFIO_PCI_CONFIG_REGION_INDEX, 252, &mut out).unwrap();
    assert_eq!(out, [7; 4]);
    assert_eq!(client.get_irq_info(abi::VFIO_PCI_MSIX_IRQ_INDEX).unwrap().count, 2);
    let eventfd = new_eventfd();
    let flags = abi::VFIO_IRQ_SET_DATA_EVENTFD | abi::VFIO_IRQ_SET_ACTION_TRIGGER;
    client.set_irqs(abi::VFIO_PCI_MSIX_IRQ_INDEX, flags, 0, 1, &[eventfd.as_raw_fd()]).unwrap();

    let memory = Arc::new(Mapping::in_file(2 * PAGE).unwrap());
    client.dma_map(PAGE, 0x7000_0000, PAGE, memory.file().unwrap().as_raw_fd()).unwrap();
    assert_eq!(model.memory.lock().unwrap().as_ref().unwrap().0, 0x7000_0000);
    client.region_write(0, 0x40, &[1, 0, 0, 0]).unwrap();
    let mut out = [0; 5];
    assert!(memory.dma_range(PAGE, PAGE).unwrap().read(8, &mut out));
    assert_eq!(&out, b"model");
    assert!(is_signalled(&eventfd));
    client.dma_unmap(0x7000_0000, PAGE).unwrap();
    assert!(model.memory.lock().unwrap().is_none());
    client.reset().unwrap();
    assert_eq!(model.registers.read(0x14), 0);
    client.shutdown().unwrap();
    server.join().unwrap().unwrap();
}
