//! The sequences of calls of three programs that manage logical volumes, on pools: a CSI driver, Ubicloud and sbcli. What a
//! program looks for in a reply, these tests look for, too.

use super::lvol::{MIB, create_base, ok, read, refused, start, write};
use super::{Daemon, in_daemon};
use serde_json::{Value, json};

/// Tests of other processes do not listen there, nor do other tests of this one.
const PORT: &str = "14330";

fn listen_address() -> Value {
    json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": PORT})
}

/// Whether Ubicloud takes an error for an object that is gone.
fn is_gone(code: i32, text: &str) -> bool {
    code == -19 || code == -32602 && ["No key object found", "No such device"].contains(&text)
}

/// Whether Ubicloud takes an error for an object that exists.
fn exists(code: i32, text: &str) -> bool {
    code == -17 || code == -32602 && text == "File exists"
}

/// Free and all bytes of a store.
async fn space(daemon: &Daemon, store: &str) -> (u64, u64) {
    let stores = ok(daemon, "bdev_lvol_get_lvstores", json!({"lvs_name": store})).await;
    let number = |name: &str| stores[0][name].as_u64().unwrap();
    let cluster = number("cluster_size");
    (number("free_clusters") * cluster, number("total_data_clusters") * cluster)
}

#[test]
fn a_csi_driver_publishes_a_volume_to_a_host_and_deletes_it() {
    in_daemon(async |daemon| {
        start(daemon).await;
        ok(daemon, "bdev_lvol_create_lvstore", json!({"bdev_name": "nvme", "lvs_name": "lvs0"})).await;
        let stores = ok(daemon, "bdev_lvol_get_lvstores", json!({})).await;
        let mib = |store: &Value, count: &str| {
            store[count].as_u64().unwrap() * store["cluster_size"].as_u64().unwrap() / MIB
        };
        assert!(mib(&stores[0], "free_clusters") > 256 && mib(&stores[0], "total_data_clusters") < 1024);
        assert!(refused(daemon, "bdev_get_bdevs", json!({"name": "lvs0/pvc-7"})).await.0 == -19);
        let create = json!({"lvol_name": "pvc-7", "size_in_mib": 256, "lvs_name": "lvs0", "clear_method": "unmap",
            "thin_provision": true});
        let id = ok(daemon, "bdev_lvol_create", create).await;
        let id = id.as_str().unwrap();

        // The driver has no state: it creates the transport each time it was started.
        let transport = json!({"trtype": "TCP"});
        ok(daemon, "nvmf_create_transport", transport.clone()).await;
        let again = refused(daemon, "nvmf_create_transport", transport).await;
        assert!(again.1.contains("already exists"), "{again:?}");
        let nqn = format!("nqn.2020-04.io.spdk.csi:uuid:{id}");
        let subsystem =
            json!({"nqn": nqn, "allow_any_host": true, "serial_number": "spdkcsi-sn", "model_number": id});
        assert_eq!(ok(daemon, "nvmf_create_subsystem", subsystem).await, true);
        let namespace = json!({"nqn": nqn, "namespace": {"bdev_name": id}});
        let nsid = ok(daemon, "nvmf_subsystem_add_ns", namespace).await;
        assert_eq!(nsid, 1);
        let listener = json!({"nqn": nqn, "listen_address": listen_address()});
        assert_eq!(ok(daemon, "nvmf_subsystem_add_listener", listener).await, true);

        // A snapshot of a volume in use, and a volume with its content.
        let snapshot = json!({"lvol_name": id, "snapshot_name": "snapshot-3"});
        let snapshot = ok(daemon, "bdev_lvol_snapshot", snapshot).await;
        let clone = json!({"snapshot_name": snapshot, "clone_name": "pvc-8"});
        let clone = ok(daemon, "bdev_lvol_clone", clone).await;

        ok(daemon, "nvmf_subsystem_remove_ns", json!({"nqn": nqn, "nsid": nsid})).await;
        ok(daemon, "nvmf_delete_subsystem", json!({"nqn": nqn})).await;
        for name in [id, clone.as_str().unwrap(), snapshot.as_str().unwrap()] {
            ok(daemon, "bdev_lvol_delete", json!({"name": name})).await;
            let again = refused(daemon, "bdev_lvol_delete", json!({"name": name})).await;
            assert_eq!(again.1, "No such device");
        }
    });
}

#[test]
fn ubicloud_encrypts_a_volume_for_a_vm_and_purges_it() {
    in_daemon(async |daemon| {
        start(daemon).await;
        ok(daemon, "bdev_lvol_create_lvstore", json!({"bdev_name": "nvme", "lvs_name": "vms"})).await;
        let image =
            json!({"lvol_name": "image", "size_in_mib": 32, "lvs_name": "vms", "thin_provision": true});
        ok(daemon, "bdev_lvol_create", image).await;
        write(daemon, "vms/image", MIB, &[7; 4096]).await;
        ok(daemon, "bdev_lvol_set_read_only", json!({"name": "vms/image"})).await;

        let key = json!({"name": "vm1_0_key", "cipher": "AES_XTS", "key": "00112233445566778899aabbccddeeff",
            "key2": "ffeeddccbbaa99887766554433221100"});
        let base = json!({"snapshot_name": "vms/image", "clone_name": "vm1_0_base"});
        let disk = json!({"name": "vm1_0", "base_bdev_name": "vms/vm1_0_base", "key_name": "vm1_0_key"});
        let controller = json!({"ctrlr": "vm1_0", "dev_name": "vm1_0"});
        let setup = [
            ("accel_crypto_key_create", &key),
            ("bdev_lvol_clone", &base),
            ("bdev_crypto_create", &disk),
            ("vhost_create_blk_controller", &controller),
        ];
        let limits =
            json!({"name": "vm1_0", "rw_ios_per_sec": 0, "r_mbytes_per_sec": 20, "w_mbytes_per_sec": 10});
        let purge = [
            ("vhost_delete_controller", json!({"ctrlr": "vm1_0"})),
            ("bdev_crypto_delete", json!({"name": "vm1_0"})),
            ("bdev_lvol_delete", json!({"name": "vms/vm1_0_base"})),
            ("accel_crypto_key_destroy", json!({"key_name": "vm1_0_key"})),
        ];
        // A VM of the same name may follow.
        for _ in 0..2 {
            for (method, params) in setup {
                ok(daemon, method, params.clone()).await;
                // A setup that was interrupted is repeated.
                let (code, text) = refused(daemon, method, params.clone()).await;
                assert!(exists(code, &text), "{method}: {code} {text}");
                // Each of these disks belongs to the next one, then.
                match method {
                    "bdev_lvol_clone" => {
                        assert_eq!(read(daemon, "vms/vm1_0_base", MIB, 4096).await, [7; 4096]);
                    }
                    "bdev_crypto_create" => {
                        write(daemon, "vm1_0", MIB, &[8; 4096]).await;
                        assert_eq!(read(daemon, "vm1_0", MIB, 4096).await, [8; 4096]);
                    }
                    _ => {}
                }
            }
            assert_eq!(ok(daemon, "bdev_set_qos_limit", limits.clone()).await, true);
            assert!(daemon.dir.path().join("vm1_0").exists(), "the VMM connects to this socket");
            let disks = ok(daemon, "bdev_get_bdevs", json!({"name": "vm1_0"})).await;
            assert_eq!(disks[0]["assigned_rate_limits"]["r_mbytes_per_sec"], 20);
            assert_eq!(disks[0]["num_blocks"], json!(32 * MIB / 512));
            for (method, params) in &purge {
                ok(daemon, method, params.clone()).await;
                let (code, text) = refused(daemon, method, params.clone()).await;
                assert!(is_gone(code, &text), "{method}: {code} {text}");
            }
        }
        assert_eq!(read(daemon, "vms/image", MIB, 4096).await, [7; 4096]);
    });
}

/// What sbcli does on a node for a volume: its disk, which has 3 MiB of data here, and its subsystem.
async fn add_lvol(daemon: &Daemon, nqn: &str) -> String {
    assert_eq!(refused(daemon, "bdev_get_bdevs", json!({"name": "LVS_7/LVOL_1"})).await.0, -19);
    let create = json!({"lvol_name": "LVOL_1", "size_in_mib": 101, "lvs_name": "LVS_7", "thin_provision": true,
        "clear_method": "unmap"});
    let id = ok(daemon, "bdev_lvol_create", create).await;
    write(daemon, "LVS_7/LVOL_1", 0, &vec![9; 3 << 20]).await;
    let subsystem = json!({"nqn": nqn, "serial_number": "ha", "allow_any_host": true, "ana_reporting": true,
        "model_number": id, "min_cntlid": 1, "max_cntlid": 1000, "max_namespaces": 32});
    ok(daemon, "nvmf_create_subsystem", subsystem).await;
    let listener = json!({"nqn": nqn, "listen_address": listen_address()});
    ok(daemon, "nvmf_subsystem_add_listener", listener).await;
    let state = json!({"nqn": nqn, "listen_address": listen_address(), "ana_state": "optimized"});
    ok(daemon, "nvmf_subsystem_listener_set_ana_state", state).await;
    let disk = ok(daemon, "bdev_get_bdevs", json!({"name": "LVS_7/LVOL_1"})).await;
    let uuid = disk[0]["uuid"].as_str().unwrap();
    let namespace = json!({"bdev_name": "LVS_7/LVOL_1", "uuid": uuid, "nguid": uuid.replace('-', "")});
    ok(daemon, "nvmf_subsystem_add_ns", json!({"nqn": nqn, "namespace": namespace})).await;
    id.as_str().unwrap().to_owned()
}

#[test]
fn sbcli_runs_a_node() {
    const NQN: &str = "nqn.2023-02.io.simplyblock:7:lvol:1";
    in_daemon(async |daemon| {
        start(daemon).await;
        ok(daemon, "spdk_get_version", json!({})).await;
        let create = json!({"bdev_name": "nvme", "lvs_name": "LVS_7", "cluster_sz": MIB, "clear_method": "unmap",
            "num_md_pages_per_cluster_ratio": 1});
        ok(daemon, "bdev_lvol_create_lvstore", create).await;
        let (free, total) = space(daemon, "LVS_7").await;
        assert!(free == total && total > 512 * MIB, "{free} of {total}");
        ok(daemon, "nvmf_create_transport", json!({"trtype": "TCP"})).await;
        let id = add_lvol(daemon, NQN).await;
        let limits = json!({"name": "LVS_7/LVOL_1", "rw_ios_per_sec": 1000, "rw_mbytes_per_sec": 0,
            "r_mbytes_per_sec": 0, "w_mbytes_per_sec": 0});
        ok(daemon, "bdev_set_qos_limit", limits).await;
        let subsystems = ok(daemon, "nvmf_get_subsystems", json!({})).await;
        let is_it = |subsystem: &&Value| subsystem["nqn"] == NQN;
        let subsystem = subsystems.as_array().unwrap().iter().find(is_it).unwrap();
        assert_eq!(subsystem["namespaces"][0]["uuid"], json!(id));

        // The node's monitor reads the counts of the disk.
        let stats = ok(daemon, "bdev_get_iostat", json!({"name": id})).await;
        assert_eq!(stats["bdevs"][0]["bytes_written"], json!(3 * MIB));

        ok(daemon, "bdev_lvol_snapshot", json!({"lvol_name": "LVS_7/LVOL_1", "snapshot_name": "SNAP_1"}))
            .await;
        ok(daemon, "bdev_lvol_clone", json!({"snapshot_name": "LVS_7/SNAP_1", "clone_name": "CLN_1"})).await;
        let clone = ok(daemon, "bdev_get_bdevs", json!({"name": "LVS_7/CLN_1"})).await;
        let details = &clone[0]["driver_specific"]["lvol"];
        assert_eq!(
            (&details["base_snapshot"], &details["num_allocated_clusters"]),
            (&json!("SNAP_1"), &json!(101))
        );
        ok(daemon, "bdev_lvol_resize", json!({"name": "LVS_7/CLN_1", "size_in_mib": 150})).await;
        ok(daemon, "bdev_lvol_inflate", json!({"name": "LVS_7/CLN_1"})).await;
        assert_eq!(read(daemon, "LVS_7/CLN_1", 2 * MIB, 4096).await, [9; 4096]);
        let (free, _) = space(daemon, "LVS_7").await;
        assert!(free <= total - 150 * MIB, "the clone has its space reserved: {free} of {total}");

        // The node starts again: its disk comes first, and the volumes are there.
        ok(daemon, "nvmf_delete_subsystem", json!({"nqn": NQN})).await;
        ok(daemon, "bdev_aio_delete", json!({"name": "nvme"})).await;
        create_base(daemon).await;
        ok(daemon, "bdev_wait_for_examine", json!({})).await;
        assert_eq!(space(daemon, "LVS_7").await.1, total);
        ok(daemon, "bdev_lvol_set_read_only", json!({"name": "LVS_7/LVOL_1"})).await;
        for name in ["CLN_1", "SNAP_1", "LVOL_1"] {
            ok(daemon, "bdev_lvol_delete", json!({"name": format!("LVS_7/{name}")})).await;
        }
        let (free, total) = space(daemon, "LVS_7").await;
        assert!(free > total - 8 * MIB, "{free} of {total}");
        ok(daemon, "bdev_lvol_delete_lvstore", json!({"lvs_name": "LVS_7"})).await;
        assert_eq!(refused(daemon, "bdev_lvol_get_lvstores", json!({"lvs_name": "LVS_7"})).await.0, -19);
    });
}
