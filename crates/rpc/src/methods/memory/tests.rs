//! A client that fails to register guests' memory, as operators see it.

use crate::methods::log::PrintLevel;
use crate::{Control, methods};
use aryk_bdev::{BoxFuture, MemoryClient, RegisterError};
use aryk_dma::{DmaRange, Mapping, MemTable, Region, SgTable};
use aryk_metrics::Inventory;
use aryk_reactor::{Options, Reactors};
use serde_json::{Value, json};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const LEN: u64 = 8192;

/// Registers ranges of more than one page only.
struct Choosy;

impl MemoryClient for Choosy {
    fn name(&self) -> &'static str {
        "choosy"
    }

    fn register(&self, memory: DmaRange, _: Arc<str>) -> BoxFuture<'_, Result<u64, RegisterError>> {
        Box::pin(
            async move { if memory.len() >= LEN { Ok(0) } else { Err(RegisterError::failed("too short")) } },
        )
    }

    fn unregister(&self, _: DmaRange, _: Arc<str>, _: u64) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

fn table() -> Arc<MemTable> {
    let region = |guest_addr, len| {
        let mapping = Arc::new(Mapping::anonymous(len).unwrap());
        Region { guest_addr, user_addr: guest_addr, len, offset: 0, mapping }
    };
    Arc::new(MemTable::new(vec![region(0, LEN), region(LEN, LEN / 2)]).unwrap())
}

#[test]
fn clients_and_the_regions_that_they_have_not_registered_are_listed() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let directory = tempfile::TempDir::new().unwrap();
        let reactors = Rc::new(Reactors::start(&Options::default()).unwrap());
        let control = Rc::new(Control::new(reactors, directory.path(), 1024, PrintLevel::Error, |_| {}));
        control.start();
        let methods = methods::table(Rc::clone(&control));
        let list = async || -> Value {
            let reply = methods.call("aryk_memory_clients_get", None).await.unwrap();
            serde_json::from_str(reply.get()).unwrap()
        };
        assert_eq!(list().await, json!({"clients": [], "not_registered": []}));

        let memory = control.memory();
        let attachment = memory.attach(Choosy).await.unwrap();
        let table = table();
        memory.add(table.regions(), "vm0").await;
        let mut lists = SgTable::new(1, Arc::clone(&table));
        let mut pieces = lists.begin(0);
        pieces.push(LEN - 512, 1024).unwrap();
        let mut lookup = attachment.lookup();
        let found: Vec<_> = pieces.sgl().pieces().map(|piece| lookup.translate(&piece).is_some()).collect();
        assert_eq!(found, [true, false]);
        lists.end(0);

        let client = json!({"name": "choosy", "registering": 0, "registered": 1, "unregistering": 0,
            "failures": 1, "declined": 0, "late": 0, "bounced_pieces": 1});
        let region = json!({"client": "choosy", "ctrlr": "vm0", "bytes": LEN / 2, "bounced_pieces": 1,
            "reason": "too short"});
        assert_eq!(list().await, json!({"clients": [client], "not_registered": [region]}));
        let snapshot = control.collector().snapshot(&*control, Duration::ZERO).await;
        assert_eq!(snapshot.memory_clients, memory.clients());
        assert_eq!(snapshot.memory_clients[0].bounced, 1);
    });
}
