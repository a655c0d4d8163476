//! A front-end that is not ours, of the crate `blkio`, with one request in flight.

use blkio::{Blkio, Blkioq, Completion, ReqFlags};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

const LEN_MAX: usize = 64 << 10;

/// A front-end, connected to a controller's socket.
pub struct FrontEnd {
    // Dropped before the driver, whose memory it uses.
    queue: Blkioq,
    driver: Blkio,
    /// The memory of requests' data, as an address and as a file.
    address: usize,
    memory: File,
}

impl FrontEnd {
    /// Connects for reads and writes.
    pub fn connect(socket: &Path) -> Self {
        Self::open(socket, false).unwrap()
    }

    /// Connects. blkio refuses a read-only disk unless `read_only` is set.
    pub fn open(socket: &Path, read_only: bool) -> blkio::Result<Self> {
        let mut driver = Blkio::new("virtio-blk-vhost-user")?;
        driver.set_str("path", socket.to_str().unwrap())?;
        driver.set_bool("read-only", read_only)?;
        driver.connect()?;
        let queue = driver.start()?.queues.remove(0);
        let region = driver.alloc_mem_region(LEN_MAX)?;
        driver.map_mem_region(&region)?;
        assert_eq!(region.fd_offset, 0);
        let memory = File::options().read(true).write(true).open(format!("/proc/self/fd/{}", region.fd));
        Ok(Self { queue, driver, address: region.addr, memory: memory.unwrap() })
    }

    /// Size of the disk in bytes.
    pub fn capacity(&self) -> u64 {
        self.driver.get_u64("capacity").unwrap()
    }

    /// Writes `data` at byte `start`.
    pub fn write(&mut self, start: u64, data: &[u8]) -> Result<(), i32> {
        self.memory.write_all_at(data, 0).unwrap();
        self.queue.write(start, self.address as *const u8, data.len(), 0, ReqFlags::empty());
        self.complete()
    }

    /// Reads `len` bytes at byte `start`.
    pub fn read(&mut self, start: u64, len: usize) -> Result<Vec<u8>, i32> {
        self.queue.read(start, self.address as *mut u8, len, 0, ReqFlags::empty());
        self.complete()?;
        let mut data = vec![0; len];
        self.memory.read_exact_at(&mut data, 0).unwrap();
        Ok(data)
    }

    /// Starts a read without waiting for it.
    pub fn start_read(&mut self, start: u64, len: usize) {
        self.queue.read(start, self.address as *mut u8, len, 0, ReqFlags::empty());
        assert_eq!(self.queue.do_io(&mut [], 0, None, None).unwrap(), 0);
    }

    /// Makes the writes durable.
    pub fn flush(&mut self) -> Result<(), i32> {
        self.queue.flush(0, ReqFlags::empty());
        self.complete()
    }

    fn complete(&mut self) -> Result<(), i32> {
        let mut done = [MaybeUninit::<Completion>::uninit()];
        let mut patience = Duration::from_secs(30);
        let count = self.queue.do_io(&mut done, 1, Some(&mut patience), None);
        assert_eq!(count.expect("the back-end answers"), 1);
        // SAFETY: `do_io` has filled as many completions as it returned.
        let ret = unsafe { done[0].assume_init_ref() }.ret;
        if ret == 0 { Ok(()) } else { Err(ret) }
    }
}
