//! A module's task that reads a disk all the time, and the core that it is on is removed.

use crate::methods::log::PrintLevel;
use crate::{Control, Error, Methods, methods};
use aryk_bdev::{Access, AsyncChannel, Blocks, Env, Identity, Lba};
use aryk_dma::Buffer;
use aryk_reactor::{BackgroundTask, Budget, CoreSet, Options, Reactors};
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

const BLOCKS: Blocks = Blocks(64);

/// Reads all blocks of a disk, over and over; `checked` counts them.
fn scrub(env: &Env, disk: &str, checked: &Arc<AtomicU64>) -> BackgroundTask {
    let descriptor = env.registry().open(disk, Access::Read, "scrub", |_| {}).unwrap();
    let (checked, budget) = (Arc::clone(checked), Budget { turn: Duration::from_micros(50) });
    env.background().spawn(&format!("scrub {disk}"), budget, move |mut turns| {
        let (descriptor, checked) = (descriptor.clone(), Arc::clone(&checked));
        async move {
            let thread = turns.thread();
            let open = move |cx: &mut _| AsyncChannel::open(&descriptor, thread, cx);
            let channel = turns.local().with(open).await.unwrap();
            let mut buffer = Buffer::new(512, 512);
            loop {
                turns.next().await;
                let lba = Lba(checked.load(Relaxed) % BLOCKS.0);
                buffer = channel.read(lba, Blocks(1), buffer).await.unwrap();
                checked.fetch_add(1, Relaxed);
            }
        }
    })
}

struct Daemon {
    control: Rc<Control>,
    methods: Rc<Methods<Control>>,
}

impl Daemon {
    async fn call(&self, method: &str, params: Value) -> Result<Value, Error> {
        let reply = self.methods.call(method, Some(to_raw_value(&params).unwrap())).await?;
        Ok(serde_json::from_str(reply.get()).unwrap())
    }

    /// The task as `thread_get_stats` has it, and its core.
    async fn task(&self) -> Option<(Value, u64)> {
        let threads = self.call("thread_get_stats", json!({})).await.unwrap();
        let is_it = |thread: &&Value| thread["name"] == "scrub disk";
        let thread = threads["threads"].as_array().unwrap().iter().find(is_it)?.clone();
        let reactors = self.call("framework_get_reactors", json!({})).await.unwrap();
        let has_it = |reactor: &&Value| {
            reactor["lw_threads"].as_array().unwrap().iter().any(|thread| thread["name"] == "scrub disk")
        };
        let core = reactors["reactors"].as_array().unwrap().iter().find(has_it)?["lcore"].as_u64()?;
        Some((thread, core))
    }
}

async fn until(is_so: impl AsyncFn() -> bool) {
    for _ in 0..2000 {
        if is_so().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not in 20 seconds");
}

async fn removed_core(dir: &std::path::Path, options: &Options) {
    let reactors = Rc::new(Reactors::start(options).unwrap());
    let control = Rc::new(Control::new(reactors, dir, 1024, PrintLevel::Error, |_| {}));
    control.start();
    let daemon = Daemon { methods: methods::table(Rc::clone(&control)), control };
    let identity = Identity::named("disk");
    let config = aryk_bdev_malloc::Config {
        identity,
        block_size: 512,
        physical_block_size: 512,
        blocks: BLOCKS,
        optimal_io_blocks: Blocks::ZERO,
    };
    aryk_bdev_malloc::create(&daemon.control.env, config).unwrap();
    let checked = Arc::new(AtomicU64::new(0));
    let task = scrub(&daemon.control.env, "disk", &checked);
    until(async || checked.load(Relaxed) > 1000).await;
    let (thread, core) = daemon.task().await.unwrap();
    assert!(thread["busy"].as_u64().unwrap() > 0, "{thread}");
    daemon.call("aryk_core_remove", json!({"core": core})).await.unwrap();
    let (moved, other) = daemon.task().await.unwrap();
    assert_ne!(other, core);
    assert_eq!(moved["id"], thread["id"], "it is the same thread");
    assert!(moved["busy"].as_u64() >= thread["busy"].as_u64(), "and its time is still its own");
    let before = checked.load(Relaxed);
    until(async || checked.load(Relaxed) > before + 1000).await;
    drop(task);
    until(async || daemon.task().await.is_none()).await;
    // Its channel and its opening went with it.
    tokio::time::timeout(Duration::from_secs(20), daemon.control.env.registry().remove("disk"))
        .await
        .unwrap()
        .unwrap();
    daemon.control.close().await;
}

#[test]
fn a_background_task_goes_on_where_its_core_is_removed() {
    let cores = CoreSet::allowed();
    if cores.iter().count() < 2 {
        return eprintln!("skipped: it takes two cores");
    }
    let dir = tempfile::TempDir::new().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let options = Options { cores, ..Options::default() };
    tokio::task::LocalSet::new().block_on(&runtime, removed_core(dir.path(), &options));
}
