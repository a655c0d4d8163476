//! Pools and volumes by SPDK's calls.

use super::{Daemon, in_daemon};
use aryk_bdev::{Access, AsyncChannel, Blocks, Lba};
use aryk_dma::Buffer;
use aryk_reactor::{CoreSet, Cx};
use serde_json::{Value, json};
use std::time::Duration;

pub const MIB: u64 = 1 << 20;

/// A daemon with the disk `nvme` in a file of 1 GiB.
pub async fn start(daemon: &Daemon) {
    aryk_rpc::follow_disks(&daemon.control, &daemon.methods);
    daemon.call("framework_start_init", &json!({})).await.unwrap();
    let path = daemon.dir.path().join("nvme.img");
    std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
    create_base(daemon).await;
}

pub async fn create_base(daemon: &Daemon) {
    let path = daemon.dir.path().join("nvme.img");
    let params = json!({"name": "nvme", "filename": path, "block_size": 512});
    ok(daemon, "bdev_aio_create", params).await;
}

pub async fn ok(daemon: &Daemon, method: &str, params: Value) -> Value {
    match daemon.call(method, &params).await {
        Ok(result) => result,
        Err(error) => panic!("{method} {params}: {error}"),
    }
}

/// The code and the text of the error.
pub async fn refused(daemon: &Daemon, method: &str, params: Value) -> (i32, String) {
    let error = daemon.call(method, &params).await.expect_err(method);
    (error.code(), error.message())
}

async fn create_store(daemon: &Daemon) -> Value {
    ok(daemon, "bdev_lvol_create_lvstore", json!({"bdev_name": "nvme", "lvs_name": "lvs"})).await
}

/// Runs `f` with a channel of a disk.
async fn on_disk<R: Send + 'static>(
    daemon: &Daemon,
    name: &str,
    f: impl AsyncFnOnce(AsyncChannel) -> R + Send + 'static,
) -> R {
    let registry = &daemon.control.disks.registry;
    let disk = registry.open(name, Access::Shared, "the test", |_| ()).unwrap();
    let reactor = daemon.reactors.handles().remove(0);
    disk.prepare(&reactor).await.unwrap();
    let (sender, result) = tokio::sync::oneshot::channel();
    let start = move |cx: &mut Cx| {
        let thread = cx.add_thread("test", CoreSet::allowed());
        let channel = AsyncChannel::open(&disk, thread, cx).unwrap();
        let local = cx.local().clone();
        let task = async move {
            let result = f(channel).await;
            drop(disk);
            while local.with(move |cx| cx.thread_members(thread)).await > 0 {
                local.sleep(Duration::from_micros(100)).await;
            }
            local.with(move |cx| cx.remove_thread(thread)).await;
            drop(sender.send(result));
        };
        cx.local().spawn(task).detach();
    };
    reactor.call(start).await.unwrap();
    result.await.unwrap()
}

/// Writes bytes to a disk with blocks of 512 bytes.
pub async fn write(daemon: &Daemon, name: &str, at: u64, bytes: &[u8]) {
    let (buffer, blocks) = (Buffer::from_slice(bytes), Blocks(bytes.len() as u64 / 512));
    let write =
        async move |channel: AsyncChannel| channel.write(Lba(at / 512), blocks, buffer).await.map(drop);
    assert_eq!(on_disk(daemon, name, write).await, Ok(()));
}

/// Reads bytes of a disk with blocks of 512 bytes.
pub async fn read(daemon: &Daemon, name: &str, at: u64, bytes: usize) -> Vec<u8> {
    let read = async move |channel: AsyncChannel| {
        let buffer = Buffer::new(bytes, 4096);
        channel.read(Lba(at / 512), Blocks(bytes as u64 / 512), buffer).await
    };
    on_disk(daemon, name, read).await.unwrap().bytes().to_vec()
}

async fn lvols(daemon: &Daemon) -> Vec<String> {
    let lvols = ok(daemon, "bdev_lvol_get_lvols", json!({})).await;
    lvols.as_array().unwrap().iter().map(|lvol| lvol["alias"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_csi_driver_creates_grows_snapshots_clones_and_deletes() {
    in_daemon(async |daemon| {
        start(daemon).await;
        create_store(daemon).await;
        // The driver chooses a store by its free space, then creates the volume, and looks it up by the returned name.
        let stores = ok(daemon, "bdev_lvol_get_lvstores", json!({})).await;
        let store = &stores[0];
        let free = store["free_clusters"].as_u64().unwrap() * store["cluster_size"].as_u64().unwrap();
        assert!(free > 512 * MIB && free < 1 << 30, "{free}");
        assert_eq!((&store["name"], &store["base_bdev"]), (&json!("lvs"), &json!("nvme")));
        let create = json!({"lvol_name": "pvc-1", "size_in_mib": 256, "lvs_name": "lvs", "clear_method": "unmap",
            "thin_provision": true});
        let uuid = ok(daemon, "bdev_lvol_create", create.clone()).await;
        let disk = ok(daemon, "bdev_get_bdevs", json!({"name": uuid})).await;
        let disk = &disk[0];
        assert_eq!((&disk["name"], &disk["uuid"]), (&uuid, &uuid));
        assert_eq!(disk["aliases"], json!([uuid, "lvs/pvc-1"]));
        assert_eq!(disk["product_name"], "Logical Volume");
        let size = disk["num_blocks"].as_u64().unwrap() * disk["block_size"].as_u64().unwrap();
        assert_eq!(size, 256 * MIB);
        let lvol = &disk["driver_specific"]["lvol"];
        assert_eq!(lvol["lvol_store_uuid"], store["uuid"]);
        assert_eq!(
            (&lvol["snapshot"], &lvol["clone"], &lvol["thin_provision"]),
            (&json!(false), &json!(false), &json!(true))
        );
        // The driver is called again for a volume that exists.
        assert_eq!(refused(daemon, "bdev_lvol_create", create).await, (-17, "File exists".to_owned()));
        ok(daemon, "bdev_lvol_resize", json!({"name": uuid, "size_in_mib": 300})).await;
        let disk = ok(daemon, "bdev_get_bdevs", json!({"name": "lvs/pvc-1"})).await;
        assert_eq!(disk[0]["num_blocks"], json!(300 * MIB / 512));
        let snapshot = json!({"lvol_name": "lvs/pvc-1", "snapshot_name": "snap-1"});
        let snapshot_uuid = ok(daemon, "bdev_lvol_snapshot", snapshot.clone()).await;
        assert_eq!(refused(daemon, "bdev_lvol_snapshot", snapshot).await, (-32602, "File exists".to_owned()));
        let clone = json!({"snapshot_name": snapshot_uuid, "clone_name": "pvc-2"});
        ok(daemon, "bdev_lvol_clone", clone).await;
        let disk = ok(daemon, "bdev_get_bdevs", json!({"name": "lvs/pvc-2"})).await;
        let lvol = &disk[0]["driver_specific"]["lvol"];
        assert_eq!((&lvol["clone"], &lvol["base_snapshot"]), (&json!(true), &json!("snap-1")));
        let disk = ok(daemon, "bdev_get_bdevs", json!({"name": "lvs/snap-1"})).await;
        let lvol = &disk[0]["driver_specific"]["lvol"];
        assert_eq!((&lvol["snapshot"], &lvol["clones"]), (&json!(true), &json!(["pvc-1", "pvc-2"])));
        assert_eq!(disk[0]["supported_io_types"]["write"], false);
        // In any order, and twice.
        for name in ["lvs/snap-1", "lvs/pvc-1", "lvs/pvc-2"] {
            ok(daemon, "bdev_lvol_delete", json!({"name": name})).await;
            let again = refused(daemon, "bdev_lvol_delete", json!({"name": name})).await;
            assert_eq!(again, (-19, "No such device".to_owned()));
        }
        assert_eq!(refused(daemon, "bdev_get_bdevs", json!({"name": uuid})).await.0, -19);
        ok(daemon, "bdev_lvol_delete_lvstore", json!({"lvs_name": "lvs"})).await;
        assert_eq!(ok(daemon, "bdev_lvol_get_lvstores", json!({})).await, json!([]));
    });
}

#[test]
fn volumes_are_thick_unless_they_are_asked_to_be_thin() {
    in_daemon(async |daemon| {
        start(daemon).await;
        create_store(daemon).await;
        let free = async || {
            let stores = ok(daemon, "bdev_lvol_get_lvstores", json!({})).await;
            stores[0]["free_clusters"].as_u64().unwrap() * 4
        };
        let is_thin = async |name: &str| {
            let disk = ok(daemon, "bdev_get_bdevs", json!({"name": name})).await;
            let lvols = ok(daemon, "bdev_lvol_get_lvols", json!({})).await;
            let is_it = |lvol: &&Value| lvol["alias"] == name;
            let lvol = lvols.as_array().unwrap().iter().find(is_it).unwrap();
            let is_thin = disk[0]["driver_specific"]["lvol"]["thin_provision"].clone();
            assert_eq!(is_thin, lvol["is_thin_provisioned"]);
            is_thin == true
        };
        let all = free().await;
        let create = |name: &str, mib: u64, thin: bool| {
            let mut params = json!({"lvs_name": "lvs", "lvol_name": name, "size_in_mib": mib});
            if thin {
                params["thin_provision"] = json!(true);
            }
            params
        };
        ok(daemon, "bdev_lvol_create", create("thick", 400, false)).await;
        assert!(!is_thin("lvs/thick").await);
        assert_eq!(free().await, all - 400);
        let (code, text) = refused(daemon, "bdev_lvol_create", create("more", all - 396, false)).await;
        assert_eq!((code, text.as_str()), (-32602, "No space left on device"));
        ok(daemon, "bdev_lvol_create", create("thin", 2000, true)).await;
        assert!(is_thin("lvs/thin").await);
        assert_eq!(free().await, all - 400);
        // A snapshot of what was never written costs nothing; the volume stays thick, the clone is thin until it is inflated.
        ok(daemon, "bdev_lvol_snapshot", json!({"lvol_name": "lvs/thick", "snapshot_name": "s"})).await;
        ok(daemon, "bdev_lvol_clone", json!({"snapshot_name": "lvs/s", "clone_name": "c"})).await;
        assert!(!is_thin("lvs/thick").await && is_thin("lvs/s").await && is_thin("lvs/c").await);
        ok(daemon, "bdev_lvol_resize", json!({"name": "lvs/thick", "size_in_mib": 100})).await;
        assert_eq!(free().await, all - 100);
        ok(daemon, "bdev_lvol_decouple_parent", json!({"name": "lvs/c"})).await;
        assert!(is_thin("lvs/c").await);
        ok(daemon, "bdev_lvol_resize", json!({"name": "lvs/c", "size_in_mib": 200})).await;
        ok(daemon, "bdev_lvol_inflate", json!({"name": "lvs/c"})).await;
        assert!(!is_thin("lvs/c").await);
        assert_eq!(free().await, all - 300);
        assert_eq!(refused(daemon, "bdev_lvol_inflate", json!({"name": "lvs/thin"})).await.0, -32602);
        assert!(is_thin("lvs/thin").await);
        // What is written is not counted twice.
        write(daemon, "lvs/c", 0, &[7; 1 << 20]).await;
        assert_eq!(free().await, all - 300);
        ok(daemon, "bdev_lvol_delete", json!({"name": "lvs/thick"})).await;
        // It is so after a restart, too.
        ok(daemon, "bdev_aio_delete", json!({"name": "nvme"})).await;
        create_base(daemon).await;
        ok(daemon, "bdev_wait_for_examine", json!({})).await;
        assert!(!is_thin("lvs/c").await);
        assert_eq!(free().await, all - 200);
    });
}

#[test]
fn a_store_is_found_again_when_its_disk_appears() {
    in_daemon(async |daemon| {
        start(daemon).await;
        let store = create_store(daemon).await;
        let create = json!({"lvol_name": "a", "size_in_mib": 5, "uuid": store});
        let uuid = ok(daemon, "bdev_lvol_create", create).await;
        ok(daemon, "bdev_lvol_snapshot", json!({"lvol_name": uuid, "snapshot_name": "s"})).await;
        ok(daemon, "bdev_lvol_rename", json!({"old_name": "lvs/a", "new_name": "b"})).await;
        assert_eq!(lvols(daemon).await, ["lvs/b", "lvs/s"]);
        ok(daemon, "bdev_aio_delete", json!({"name": "nvme"})).await;
        assert_eq!(lvols(daemon).await, [""; 0]);
        assert_eq!(refused(daemon, "bdev_get_bdevs", json!({"name": uuid})).await.0, -19);
        create_base(daemon).await;
        ok(daemon, "bdev_wait_for_examine", json!({})).await;
        assert_eq!(lvols(daemon).await, ["lvs/b", "lvs/s"]);
        let stores = ok(daemon, "bdev_lvol_get_lvstores", json!({"uuid": store})).await;
        assert_eq!(stores[0]["name"], "lvs");
        let disk = ok(daemon, "bdev_get_bdevs", json!({"name": uuid})).await;
        assert_eq!(disk[0]["aliases"], json!([uuid, "lvs/b"]));
        // Sizes are whole clusters.
        assert_eq!(disk[0]["num_blocks"], json!(8 * MIB / 512));
    });
}

#[test]
fn a_disk_that_waited_for_a_volume_is_created_with_it() {
    in_daemon(async |daemon| {
        start(daemon).await;
        create_store(daemon).await;
        let create = json!({"lvol_name": "a", "size_in_mib": 4, "lvs_name": "lvs"});
        ok(daemon, "bdev_lvol_create", create).await;
        ok(daemon, "bdev_aio_delete", json!({"name": "nvme"})).await;
        ok(daemon, "bdev_passthru_create", json!({"name": "top", "base_bdev_name": "lvs/a"})).await;
        assert_eq!(refused(daemon, "bdev_get_bdevs", json!({"name": "top"})).await.0, -19);
        create_base(daemon).await;
        ok(daemon, "bdev_get_bdevs", json!({"name": "top"})).await;
    });
}

#[test]
fn a_clone_of_another_disk_waits_for_it() {
    in_daemon(async |daemon| {
        start(daemon).await;
        create_store(daemon).await;
        let uuid = "5c1f0f9e-0a2d-4d6c-9d0a-6a3f4b3f2a11";
        let image = json!({"name": "golden", "uuid": uuid, "block_size": 512, "num_blocks": 16_386});
        ok(daemon, "bdev_malloc_create", image.clone()).await;
        let clone = json!({"bdev": "golden", "lvs_name": "lvs", "clone_name": "vm"});
        let lvol = ok(daemon, "bdev_lvol_clone_bdev", clone.clone()).await;
        assert_eq!(refused(daemon, "bdev_lvol_clone_bdev", clone).await.0, -17);
        let disk = ok(daemon, "bdev_get_bdevs", json!({"name": "lvs/vm"})).await;
        // Its size is whole clusters.
        assert_eq!(disk[0]["num_blocks"], json!(12 * MIB / 512));
        let details = &disk[0]["driver_specific"]["lvol"];
        assert_eq!(
            (&details["esnap_clone"], &details["external_snapshot_name"]),
            (&json!(true), &json!(uuid))
        );
        let lvols = ok(daemon, "bdev_lvol_get_lvols", json!({})).await;
        assert_eq!((&lvols[0]["is_esnap_clone"], &lvols[0]["is_degraded"]), (&json!(true), &json!(false)));
        // Its clones need the disk, too.
        ok(daemon, "bdev_lvol_snapshot", json!({"lvol_name": "lvs/vm", "snapshot_name": "s"})).await;

        ok(daemon, "bdev_malloc_delete", json!({"name": "golden"})).await;
        assert_eq!(refused(daemon, "bdev_get_bdevs", json!({"name": lvol})).await.0, -19);
        let lvols = ok(daemon, "bdev_lvol_get_lvols", json!({})).await;
        assert!(lvols.as_array().unwrap().iter().all(|lvol| lvol["is_degraded"] == true), "{lvols}");
        assert_eq!(lvols.as_array().unwrap().len(), 2);
        // It waits also after a restart of the store.
        ok(daemon, "bdev_aio_delete", json!({"name": "nvme"})).await;
        create_base(daemon).await;
        ok(daemon, "bdev_passthru_create", json!({"name": "top", "base_bdev_name": "lvs/vm"})).await;
        assert_eq!(refused(daemon, "bdev_get_bdevs", json!({"name": "top"})).await.0, -19);
        ok(daemon, "bdev_malloc_create", image).await;
        ok(daemon, "bdev_get_bdevs", json!({"name": "top"})).await;
        // One that waits can be deleted.
        ok(daemon, "bdev_malloc_delete", json!({"name": "golden"})).await;
        ok(daemon, "bdev_lvol_delete", json!({"name": "lvs/vm"})).await;
    });
}

/// The state of a shallow copy that has ended.
async fn shallow_copy(daemon: &Daemon, params: Value) -> Value {
    let started = ok(daemon, "bdev_lvol_start_shallow_copy", params).await;
    loop {
        let state = ok(daemon, "bdev_lvol_check_shallow_copy", started.clone()).await;
        if state["state"] != "in progress" {
            return state;
        }
        tokio::task::yield_now().await;
    }
}

#[test]
fn what_a_snapshot_has_for_itself_is_copied() {
    in_daemon(async |daemon| {
        start(daemon).await;
        create_store(daemon).await;
        ok(daemon, "bdev_lvol_create", json!({"lvol_name": "a", "size_in_mib": 16, "lvs_name": "lvs"})).await;
        let copy_to = |source: &'static str, target: &'static str| json!({"src_lvol_name": source, "dst_bdev_name": target});
        let malloc = json!({"name": "copy", "block_size": 512, "num_blocks": 16 * MIB / 512});
        ok(daemon, "bdev_malloc_create", malloc).await;
        ok(daemon, "bdev_malloc_create", json!({"name": "small", "block_size": 512, "num_blocks": 64})).await;
        let refused_copy = refused(daemon, "bdev_lvol_start_shallow_copy", copy_to("lvs/a", "copy")).await;
        assert_eq!(refused_copy, (-32602, "Operation not permitted".to_owned()));

        write(daemon, "lvs/a", 5 * MIB, &[1; 8192]).await;
        ok(daemon, "bdev_lvol_snapshot", json!({"lvol_name": "lvs/a", "snapshot_name": "s"})).await;
        write(daemon, "lvs/a", 13 * MIB, &[2; 4096]).await;
        ok(daemon, "bdev_lvol_set_read_only", json!({"name": "lvs/a"})).await;
        ok(daemon, "bdev_lvol_set_read_only", json!({"name": "lvs/a"})).await;
        let disk = ok(daemon, "bdev_get_bdevs", json!({"name": "lvs/a"})).await;
        assert_eq!(disk[0]["driver_specific"]["lvol"]["snapshot"], true, "{disk}");
        let small = refused(daemon, "bdev_lvol_start_shallow_copy", copy_to("lvs/a", "small")).await;
        assert_eq!(small, (-32602, "Invalid argument".to_owned()));
        assert_eq!(refused(daemon, "bdev_lvol_start_shallow_copy", copy_to("lvs/a", "none")).await.0, -19);

        let state = shallow_copy(daemon, copy_to("lvs/a", "copy")).await;
        assert_eq!(state, json!({"state": "complete", "copied_clusters": 1, "total_clusters": 1}));
        // The cluster is whole, and no other is copied.
        assert_eq!(read(daemon, "copy", 13 * MIB, 8192).await, [[2; 4096], [0; 4096]].concat());
        assert_eq!(read(daemon, "copy", 5 * MIB, 8192).await, [0; 8192]);
        let none = refused(daemon, "bdev_lvol_check_shallow_copy", json!({"operation_id": 77})).await;
        assert_eq!(none.0, -2);
    });
}

#[test]
fn clusters_have_the_size_that_was_asked_for() {
    in_daemon(async |daemon| {
        start(daemon).await;
        let mut create = json!({"bdev_name": "nvme", "lvs_name": "lvs", "force": true});
        for wrong in [512, 4097, 6 << 20 | 512, 1_u64 << 32] {
            create["cluster_sz"] = json!(wrong);
            let refusal = refused(daemon, "bdev_lvol_create_lvstore", create.clone()).await;
            assert_eq!(refusal, (-22, "Invalid argument".to_owned()), "{wrong}");
        }
        let mut totals = Vec::new();
        for (asked, cluster) in
            [(0, 4 * MIB), (4096, 4096), (3 * MIB, 3 * MIB), ((1 << 32) - 4096, (1 << 32) - 4096)]
        {
            create["cluster_sz"] = json!(asked);
            ok(daemon, "bdev_lvol_create_lvstore", create.clone()).await;
            ok(daemon, "bdev_aio_delete", json!({"name": "nvme"})).await;
            create_base(daemon).await;
            ok(daemon, "bdev_wait_for_examine", json!({})).await;
            let stores = ok(daemon, "bdev_lvol_get_lvstores", json!({})).await;
            assert_eq!(stores[0]["cluster_size"], cluster);
            assert_eq!(stores[0]["free_clusters"], stores[0]["total_data_clusters"]);
            totals.push(stores[0]["total_data_clusters"].as_u64().unwrap() * cluster);
            ok(daemon, "bdev_lvol_delete_lvstore", json!({"lvs_name": "lvs"})).await;
        }
        let exact = totals[1];
        assert!(exact - totals[0] < 4 * MIB && exact - totals[2] < 3 * MIB, "{totals:?}");
        assert_eq!(totals[3], 0);

        // Sizes are rounded up to clusters, and copies count them.
        create["cluster_sz"] = json!(3 * MIB);
        ok(daemon, "bdev_lvol_create_lvstore", create).await;
        ok(daemon, "bdev_lvol_create", json!({"lvol_name": "a", "size_in_mib": 4, "lvs_name": "lvs"})).await;
        let disk = ok(daemon, "bdev_get_bdevs", json!({"name": "lvs/a"})).await;
        assert_eq!(disk[0]["num_blocks"], json!(6 * MIB / 512));
        assert_eq!(disk[0]["driver_specific"]["lvol"]["num_allocated_clusters"], 2);
        ok(daemon, "bdev_lvol_resize", json!({"name": "lvs/a", "size_in_mib": 7})).await;
        let disk = ok(daemon, "bdev_get_bdevs", json!({"name": "lvs/a"})).await;
        assert_eq!(disk[0]["num_blocks"], json!(9 * MIB / 512));
        write(daemon, "lvs/a", 4 * MIB, &[1; 4096]).await;
        ok(daemon, "bdev_lvol_snapshot", json!({"lvol_name": "lvs/a", "snapshot_name": "s"})).await;
        let copy = json!({"name": "copy", "block_size": 512, "num_blocks": 9 * MIB / 512});
        ok(daemon, "bdev_malloc_create", copy).await;
        let state = shallow_copy(daemon, json!({"src_lvol_name": "lvs/s", "dst_bdev_name": "copy"})).await;
        assert_eq!(state, json!({"state": "complete", "copied_clusters": 1, "total_clusters": 1}));
        ok(daemon, "bdev_lvol_clone_bdev", json!({"bdev": "copy", "lvs_name": "lvs", "clone_name": "c"}))
            .await;
        let disk = ok(daemon, "bdev_get_bdevs", json!({"name": "lvs/c"})).await;
        assert_eq!(disk[0]["num_blocks"], json!(9 * MIB / 512));
    });
}

#[test]
fn errors_have_spdks_codes() {
    in_daemon(async |daemon| {
        start(daemon).await;
        create_store(daemon).await;
        ok(daemon, "bdev_malloc_create", json!({"name": "small", "block_size": 512, "num_blocks": 8192}))
            .await;
        let no_device = (-19, "No such device".to_owned());
        let invalid = (-22, "Invalid argument".to_owned());
        for (method, params, expected) in [
            ("bdev_lvol_create_lvstore", json!({"bdev_name": "none", "lvs_name": "x"}), &no_device),
            ("bdev_lvol_get_lvstores", json!({"lvs_name": "x"}), &no_device),
            ("bdev_lvol_get_lvols", json!({"lvs_uuid": "x"}), &no_device),
            ("bdev_lvol_delete_lvstore", json!({"lvs_name": "x"}), &no_device),
            ("bdev_lvol_delete_lvstore", json!({}), &invalid),
            ("bdev_lvol_get_lvstores", json!({"lvs_name": "lvs", "uuid": "x"}), &invalid),
            ("bdev_lvol_create", json!({"lvol_name": "a", "size_in_mib": 1}), &invalid),
            ("bdev_lvol_create", json!({"lvol_name": "a", "size_in_mib": 1, "lvs_name": "x"}), &no_device),
            ("bdev_lvol_snapshot", json!({"lvol_name": "lvs/x", "snapshot_name": "s"}), &no_device),
            ("bdev_lvol_snapshot", json!({"lvol_name": "small", "snapshot_name": "s"}), &no_device),
            ("bdev_lvol_clone", json!({"snapshot_name": "lvs/x", "clone_name": "s"}), &no_device),
            ("bdev_lvol_clone_bdev", json!({"bdev": "x", "lvs_name": "lvs", "clone_name": "c"}), &no_device),
            ("bdev_lvol_resize", json!({"name": "lvs/x", "size_in_mib": 1}), &no_device),
            ("bdev_lvol_rename", json!({"old_name": "lvs/x", "new_name": "y"}), &no_device),
        ] {
            assert_eq!(refused(daemon, method, params.clone()).await, *expected, "{method} {params}");
        }
        let busy =
            refused(daemon, "bdev_lvol_create_lvstore", json!({"bdev_name": "nvme", "lvs_name": "x"})).await;
        assert_eq!(busy.0, -16);
        let exists =
            refused(daemon, "bdev_lvol_create_lvstore", json!({"bdev_name": "small", "lvs_name": "lvs"}))
                .await;
        assert_eq!(exists, (-17, "File exists".to_owned()));
        let small =
            refused(daemon, "bdev_lvol_create_lvstore", json!({"bdev_name": "small", "lvs_name": "x"})).await;
        assert_eq!(small.0, -28);
        let create = json!({"lvol_name": "a", "size_in_mib": 4, "lvs_name": "lvs"});
        ok(daemon, "bdev_lvol_create", create).await;
        let clone = json!({"snapshot_name": "lvs/a", "clone_name": "c"});
        assert_eq!(refused(daemon, "bdev_lvol_clone", clone).await, (-32602, "Invalid argument".to_owned()));
    });
}

#[test]
fn a_disk_with_other_data_is_refused_without_force() {
    in_daemon(async |daemon| {
        start(daemon).await;
        let path = daemon.dir.path().join("spdk.img");
        let mut blobstore = vec![0; 4096];
        blobstore[..8].copy_from_slice(b"SPDKBLOB");
        std::fs::write(&path, &blobstore).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 30).unwrap();
        ok(daemon, "bdev_aio_create", json!({"name": "spdk", "filename": path, "block_size": 512})).await;
        let mut create = json!({"bdev_name": "spdk", "lvs_name": "lvs"});
        assert_eq!(refused(daemon, "bdev_lvol_create_lvstore", create.clone()).await.0, -17);
        assert_eq!(std::fs::read(&path).unwrap()[..4096], blobstore[..]);
        create["force"] = json!(true);
        ok(daemon, "bdev_lvol_create_lvstore", create).await;
    });
}
