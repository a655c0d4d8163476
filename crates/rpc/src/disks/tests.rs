//! A disk whose device does not close.

use super::*;
use crate::methods::log::PrintLevel;
use crate::{Control, Methods, methods};
use aryk_bdev::{Blocks, BoxFuture, Channel, Device, Geometry, Identity, Limits, OpSet, OpenError};
use aryk_reactor::{Cx, Options, Reactors, RootId};
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use std::rc::Rc;

/// It closes when the sender says so.
struct Stuck(Arc<watch::Sender<bool>>);

impl Device for Stuck {
    fn product(&self) -> &'static str {
        "stuck"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(512, Blocks(8))
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn open_channel(&self, _: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Err(OpenError::Removed)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { drop(self.0.subscribe().wait_for(|closes| *closes).await) })
    }
}

struct Daemon {
    control: Rc<Control>,
    methods: Rc<Methods<Control>>,
    closes: Arc<watch::Sender<bool>>,
}

impl Daemon {
    async fn call(&self, method: &str, params: Value) -> Result<Value, Error> {
        let reply = self.methods.call(method, Some(to_raw_value(&params).unwrap())).await?;
        Ok(serde_json::from_str(reply.get()).unwrap())
    }

    async fn removal(&self) -> Value {
        self.call("bdev_get_bdevs", json!({"name": "d"})).await.unwrap()[0]["removal"].clone()
    }
}

/// With the disk `d`, whose device does not close.
fn with_daemon(test: impl AsyncFnOnce(&Daemon)) {
    let dir = tempfile::TempDir::new().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let reactors = Rc::new(Reactors::start(&Options::default()).unwrap());
        let control = Rc::new(Control::new(reactors, dir.path(), 1024, PrintLevel::Error, |_| {}));
        control.start();
        let closes = Arc::<watch::Sender<bool>>::default();
        let device = Arc::new(Stuck(Arc::clone(&closes)));
        let bdev = control.env.registry().register(Identity::named("d"), device).unwrap();
        control.made_by(&bdev, "stuck", ("bdev_stuck_create", &json!({"name": "d"})));
        test(&Daemon { methods: methods::table(Rc::clone(&control)), control, closes }).await;
    });
}

#[test]
fn the_removal_of_a_disk_that_does_not_close_is_seen_and_given_up() {
    with_daemon(async |daemon| {
        assert_eq!(daemon.removal().await, Value::Null);
        let meanwhile = async {
            while daemon.removal().await != "closing" {
                sleep(Duration::from_millis(10)).await;
            }
            // Other disks come and go.
            let create = json!({"name": "n", "num_blocks": 8, "block_size": 512});
            daemon.call("bdev_null_create", create).await.unwrap();
            daemon.call("bdev_null_delete", json!({"name": "n"})).await.unwrap();
            assert_eq!(daemon.removal().await, "closing");
        };
        let (removed, ()) = tokio::join!(daemon.control.remove_disk("stuck", "d"), meanwhile);
        let why = removed.unwrap_err().to_string();
        assert!(why.contains("the device of 'd' does not close"), "{why}");
        assert_eq!(daemon.removal().await, "abandoned");
        daemon.closes.send_replace(true);
        assert!(daemon.control.remove_disk("stuck", "d").await.unwrap());
        assert!(daemon.control.disks.find("d").is_err());
    });
}

#[test]
fn the_daemon_ends_though_a_disk_does_not_close() {
    with_daemon(async |daemon| {
        timeout(CLOSE_PATIENCE * 3, daemon.control.close()).await.expect("it ends");
    });
}
