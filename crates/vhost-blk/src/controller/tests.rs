//! Tests of a controller whose disk is removed while a queue starts, or prepares a reactor slowly.

use super::*;
use crate::guest::{AVAIL, DESC, MEMORY, SIZE, USED};
use aryk_bdev::{Blocks, Env, Identity};
use aryk_bdev_malloc as malloc;
use aryk_dma::{Mapping, MemTable, Region};
use aryk_reactor::{Engine, Options, Reactors, SleepPolicy};
use aryk_vhost_device::Settings;
use aryk_vhost_user::{Device, QueueSetup, Rings};
use aryk_virtqueue::{avail_len, desc_len, used_len};
use std::sync::Arc;
use std::time::Duration;

fn setup() -> QueueSetup {
    let mapping = Arc::new(Mapping::anonymous(MEMORY).unwrap());
    let region = Region { guest_addr: 0, user_addr: 0, len: MEMORY, offset: 0, mapping };
    let memory = Arc::new(MemTable::new(vec![region]).unwrap());
    let area = |at, len| memory.area_at_guest(at, len).unwrap();
    let rings = Rings {
        desc: area(DESC, desc_len(SIZE)),
        driver: area(AVAIL, avail_len(SIZE, false)),
        device: area(USED, used_len(SIZE, false)),
    };
    QueueSetup {
        size: SIZE,
        base: 0,
        features: 0,
        rings,
        memory,
        kick: None,
        call: None,
        err: None,
        inflight: None,
        log: None,
    }
}

fn settings() -> Settings {
    Settings { name: "vm".to_owned(), cores: None, queues: 1, queue_size_max: 1024 }
}

mod preparing;

#[test]
fn a_disk_removed_while_a_queue_opens_it_is_closed() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let env = Env::default();
        let config = malloc::Config {
            identity: Identity::named("disk"),
            block_size: 512,
            physical_block_size: 512,
            blocks: Blocks(8),
            optimal_io_blocks: Blocks::ZERO,
        };
        malloc::create(&env, config).unwrap();
        let options = Options {
            cores: "0x1".parse().unwrap(),
            policy: SleepPolicy::Adaptive,
            engine: Engine::Auto,
            watchdog: Duration::from_secs(60),
        };
        let reactors = Rc::new(Reactors::start(&options).unwrap());
        let disk = env.registry().open("disk", Access::Shared, "test", |_| ()).unwrap();
        let controller =
            Controller::new(settings(), Blk::new(disk, false, 1), env.memory().clone(), reactors);
        // The reactor is starting the queue when the removal is reported.
        let (started, ()) =
            tokio::join!(controller.start_queue(0, setup()), Blk::disk_event(&controller, Event::Removed));
        started.unwrap();
        let removed = tokio::time::timeout(Duration::from_secs(20), env.registry().remove("disk")).await;
        removed.expect("the queue has closed the disk").unwrap();
        controller.stop_queue(0).await;
    });
}
