//! The suite of all modules on volumes, and pools over their lives: creation, restart, removal.

use super::*;
use aryk_bdev::{Access, AsyncChannel, Bdev, Blocks, Env, Identity, Lba, Op, Registry, Status};
use aryk_bdev_conformance::{Bench, Features, Fixture, Opener, Outcome, Shape, block_on, conformance};
use aryk_dma::Buffer;
use aryk_reactor::{CoreSet, Options, Reactors, SleepPolicy};
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

mod branches;
mod claims;
mod images;
mod lives;
mod moving;
mod scrub;
mod shards;

/// Runs the reactor of a test until so many requests have ended, and returns how.
fn ends(disk: &mut Opener, count: usize, bench: &mut Bench) -> Vec<Outcome> {
    let mut all: Vec<Outcome> = Vec::new();
    while all.len() < count {
        bench.turn();
        all.extend(disk.completed());
    }
    all
}

const MIB: u64 = 1 << 20;
/// Bytes of the pools' bases.
const BASE: u64 = 256 * MIB;
/// Bytes of the suite's disk.
const VOLUME: Bytes = Bytes(4 * MIB);

/// Pools, and the reactors on which they run.
struct Stack {
    env: Env,
    pools: Pools,
    /// The name of the suite's disk.
    name: String,
    block_size: u32,
    /// The shards of its pool.
    shards: u32,
    /// Bytes of its volumes.
    volume: Bytes,
    _dir: Option<TempDir>,
    // Dropped last.
    _reactors: Reactors,
}

impl Stack {
    fn new(block_size: u32) -> Self {
        Self::on(block_size, 1)
    }

    /// Pools on so many reactors, as far as there are cores.
    fn on(block_size: u32, reactors: usize) -> Self {
        let options = Options {
            cores: CoreSet::from_iter(CoreSet::allowed().iter().take(reactors)),
            policy: SleepPolicy::Interrupt,
            ..Options::default()
        };
        let reactors = Reactors::start(&options).expect("reactors start");
        let env = Env::new(Arc::new(Registry::new()), &reactors);
        let (pools, name) = (Pools::default(), String::new());
        let (shards, volume) = (1, VOLUME);
        Self { env, pools, name, block_size, shards, volume, _dir: None, _reactors: reactors }
    }

    /// Adds the base of a pool, a disk in memory whose latency can be set.
    fn slow_base(self, bytes: u64) -> Self {
        let stack = self.malloc("store", 512, bytes);
        let config = aryk_bdev_delay::Config {
            identity: Identity::named("base"),
            base: "store".to_owned(),
            avg_read_us: 0,
            p99_read_us: 0,
            avg_write_us: 0,
            p99_write_us: 0,
        };
        aryk_bdev_delay::create(&stack.env, config).expect("it can be made");
        stack
    }

    /// Adds a disk in memory.
    fn malloc(self, name: &str, block_size: u32, bytes: u64) -> Self {
        let config = aryk_bdev_malloc::Config {
            identity: Identity::named(name),
            block_size,
            physical_block_size: block_size,
            blocks: Blocks(bytes / u64::from(block_size)),
            optimal_io_blocks: Blocks::ZERO,
        };
        aryk_bdev_malloc::create(&self.env, config).expect("it can be made");
        self
    }

    /// Adds a disk in a file.
    fn file(&self, name: &str, path: &Path, block_size: Option<u32>) {
        let config = aryk_bdev_uring::Config { block_size, ..aryk_bdev_uring::Config::new(name, path) };
        aryk_bdev_uring::create(&self.env, config).expect("it can be made");
    }

    /// Adds the pool `p` on the disk `base`.
    fn pool(self) -> Self {
        let shards = self.shards;
        let new = NewPool { segment_bytes: Some(8 << 20), shards, ..NewPool::named("p", "base") };
        block_on(self.pools.create(&self.env, new)).expect("it can be made");
        self
    }

    fn the_pool(&self) -> Arc<Pool> {
        self.pools.find("p").expect("it is open")
    }

    fn new_volume(&self, name: &str, origin: Origin) -> NewVolume {
        NewVolume {
            name: name.to_owned(),
            uuid: Uuid::new_v4(),
            bytes: self.volume,
            block_size: self.block_size,
            origin,
            when_full: WhenFull::Wait,
            is_thick: false,
        }
    }

    fn volume(&self, name: &str, origin: Origin) -> Member {
        block_on(self.the_pool().create_volume(self.new_volume(name, origin))).expect("it can be made")
    }

    /// Makes the volume `v` the suite's disk.
    fn with_volume(mut self) -> Self {
        self.name = self.volume("v", Origin::Empty).uuid().to_string();
        self
    }

    /// Makes a clone the suite's disk: of a snapshot of a volume whose data was overwritten by zeroes.
    fn with_clone(mut self) -> Self {
        let volume = self.volume("v", Origin::Empty);
        let disk = volume.disk.expect("it has a disk");
        self.write(&disk, 0, &[7; 65536]);
        self.command(&disk, Op::WriteZeroes, 0, VOLUME.0);
        let snapshot = (volume.id, "s".to_owned(), Uuid::new_v4());
        let made = block_on(self.the_pool().snapshot(vec![snapshot])).expect("it can be taken");
        self.write(&disk, 0, &[9; 65536]);
        self.name = self.volume("c", Origin::Snapshot(made[0].id)).uuid().to_string();
        self
    }

    /// Makes a volume on the disk `image` the suite's disk.
    fn with_overlay(mut self) -> Self {
        self.name = self.volume("o", Origin::Disk("image".to_owned())).uuid().to_string();
        self
    }

    /// Runs `f` with a channel of a disk on the pool's own reactor.
    fn on_owner<R: Send + 'static>(
        &self,
        disk: &Bdev,
        f: impl AsyncFnOnce(AsyncChannel) -> R + Send + 'static,
    ) -> R {
        let descriptor = self.env.registry().open(disk.name(), Access::Shared, "the test", |_| ());
        let descriptor = descriptor.expect("it can be opened");
        let handle = self.env.reactors().handles().remove(0);
        let (sender, result) = futures_channel::oneshot::channel();
        let start = move |cx: &mut aryk_reactor::Cx| {
            let thread = cx.add_thread("test", CoreSet::allowed());
            let channel = AsyncChannel::open(&descriptor, thread, cx).expect("it can be opened");
            let local = cx.local().clone();
            let task = async move {
                let result = f(channel).await;
                drop(descriptor);
                while local.with(move |cx| cx.thread_members(thread)).await > 0 {
                    local.sleep(std::time::Duration::from_micros(100)).await;
                }
                local.with(move |cx| cx.remove_thread(thread)).await;
                drop(sender.send(result));
            };
            cx.local().spawn(task).detach();
        };
        block_on(handle.call(start)).expect("the reactor runs");
        block_on(result).expect("the task ends")
    }

    fn write(&self, disk: &Bdev, offset: u64, data: &[u8]) {
        let block = u64::from(disk.geometry().block_size);
        let (buffer, len) = (Buffer::from_slice(data), data.len() as u64);
        let written = self.on_owner(disk, async move |channel| {
            channel.write(Lba(offset / block), Blocks(len / block), buffer).await.map(drop)
        });
        assert_eq!(written, Ok(()));
    }

    fn read(&self, disk: &Bdev, offset: u64, len: u64) -> Vec<u8> {
        let block = u64::from(disk.geometry().block_size);
        let buffer = Buffer::new(len as usize, 4096);
        let read = self.on_owner(disk, async move |channel| {
            channel.read(Lba(offset / block), Blocks(len / block), buffer).await
        });
        read.expect("it can be read").bytes().to_vec()
    }

    fn command(&self, disk: &Bdev, op: Op, offset: u64, len: u64) {
        let block = u64::from(disk.geometry().block_size);
        let done = self.on_owner(disk, async move |channel| {
            channel.command(op, Lba(offset / block), Blocks(len / block)).await
        });
        assert_eq!(done, Ok(()));
    }
}

impl Fixture for Stack {
    fn registry(&self) -> &Registry {
        self.env.registry()
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn features(&self) -> Features {
        Features { data: true, unmap_zeroes: self.block_size == 4096 }
    }

    fn resize(&self, blocks: Blocks) -> bool {
        let uuid = Uuid::parse_str(&self.name).expect("a volume's disk has its UUID as its name");
        let (pool, bytes) = (self.the_pool(), blocks.to_bytes(self.block_size));
        let member = pool.find(&uuid.to_string()).expect("it is there");
        block_on(pool.resize(member.id, bytes)).is_ok()
    }
}

mod volume_512 {
    use super::*;

    conformance!(|| Stack::new(512).malloc("base", 512, BASE).pool().with_volume());
}

mod volume_4096 {
    use super::*;

    conformance!(|| Stack::new(4096).malloc("base", 4096, BASE).pool().with_volume());
}

mod clone {
    use super::*;

    conformance!(|| Stack::new(512).malloc("base", 512, BASE).pool().with_clone());
}

mod overlay {
    use super::*;

    conformance!(|| {
        let stack = Stack::new(512).malloc("base", 512, BASE).malloc("image", 512, VOLUME.0 / 2);
        stack.pool().with_overlay()
    });
}

mod sharded {
    use super::*;

    conformance!(|| {
        let stack = Stack::on(512, 2).malloc("base", 512, 4 * BASE);
        Stack { shards: 4, volume: Bytes(40 * MIB), ..stack }.pool().with_volume()
    });
}

/// A volume of a pool in a file.
fn in_file(block_size: u32) -> Stack {
    let dir = TempDir::new_in("/var/tmp").expect("a directory can be made");
    let path = dir.path().join("base");
    std::fs::File::create(&path).and_then(|file| file.set_len(BASE)).expect("a file can be made");
    let mut stack = Stack::new(block_size);
    stack.file("base", &path, Some(block_size));
    stack = stack.pool().with_volume();
    stack._dir = Some(dir);
    stack
}

mod file_512 {
    use super::*;

    conformance!(|| in_file(512));
}

mod file_4096 {
    use super::*;

    conformance!(|| in_file(4096));
}
