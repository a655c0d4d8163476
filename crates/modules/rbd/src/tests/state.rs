//! What the cluster says about an image.

use super::{BLOCK, OnStub, until};
use crate::{Error, Lock, Size, resize, state};
use aryk_bdev::Bytes;
use aryk_bdev_conformance::block_on;

#[test]
fn snapshots_and_locks_are_listed_whatever_their_number() {
    let stub = OnStub::new(BLOCK, 256);
    let bare = block_on(state(&stub.disk)).unwrap();
    assert_eq!((bare.size, bare.luks_version), (1 << 20, None));
    assert!(bare.snapshots.is_empty() && bare.locks.is_empty() && !bare.is_lock_owner);
    assert_eq!(bare.features[..2], ["layering", "exclusive-lock"]);
    stub.image.take_snapshot("first");
    stub.image.resize(2 << 20);
    (0..200).for_each(|n| stub.image.take_snapshot(&format!("s{n}")));
    (0..50).for_each(|n| stub.image.take_lock(&format!("client.{n}"), "by hand", "10.0.0.1:0/1"));
    stub.image.take_lock("client.99", "auto 1", &stub.clusters.list()[0].addresses);
    stub.image.write(0, b"LUKS\xba\xbe\x00\x02");
    let full = block_on(state(&stub.disk)).unwrap();
    assert_eq!((full.snapshots.len(), full.locks.len()), (201, 51));
    assert_eq!((&*full.snapshots[0].name, full.snapshots[0].size), ("first", 1 << 20));
    assert_eq!((&*full.snapshots[200].name, full.snapshots[200].size), ("s199", 2 << 20));
    let lock = |client: &str, id: &str, address: &str| Lock {
        client: client.into(),
        id: id.into(),
        address: address.into(),
    };
    assert_eq!(full.locks[49], lock("client.49", "by hand", "10.0.0.1:0/1"));
    assert_eq!(full.locks[50].id, "auto 1");
    assert!(full.is_lock_owner);
    assert_eq!(full.luks_version, Some(2));
}

#[test]
fn a_list_that_does_not_end_holds_one_thread_and_no_other_call() {
    let stub = OnStub::new(BLOCK, 256);
    stub.image.script(|script| script.holds_lists = true);
    let calls: Vec<_> = (0..8)
        .map(|_| {
            let disk = stub.disk.clone();
            std::thread::spawn(move || block_on(state(&disk)).map(drop))
        })
        .collect();
    until("a list is asked for", || stub.image.listing() == 1);
    block_on(resize(&stub.disk, Size::GrowTo(Bytes(2 << 20)))).unwrap();
    assert_eq!(stub.image.listing(), 1);
    stub.image.release();
    for call in calls {
        let ended = call.join().unwrap();
        // On a busy computer, the last calls may have waited for too long.
        assert!(matches!(ended, Ok(()) | Err(Error::NoAnswer(_))), "{ended:?}");
    }
    let after = block_on(state(&stub.disk)).unwrap();
    assert_eq!(after.size, 2 << 20);
}
