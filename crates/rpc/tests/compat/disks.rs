//! Facts about disks on which clients rely: kinds, uuids, which method deletes which disk, and events.

use super::{Daemon, in_daemon};
use serde_json::{Value, json};

const UUID: &str = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";

/// Creates a disk of each kind: its name, and the method.
async fn make_all(daemon: &Daemon) {
    let call = async |method: &str, params: Value| {
        daemon.call(method, &params).await.unwrap_or_else(|e| panic!("{method} {params}: {e}"));
    };
    let file = |name: &str| {
        let path = daemon.dir.path().join(name);
        std::fs::write(&path, [0; 8192]).unwrap();
        path
    };
    call("framework_start_init", json!({})).await;
    call("bdev_aio_create", json!({"name": "aio", "filename": file("a"), "block_size": 512})).await;
    call("bdev_uring_create", json!({"name": "uring", "filename": file("u")})).await;
    for name in ["null", "a", "b", "c", "d"] {
        let id = UUID.replace("6ba7", &format!("{:04x}", 0x6ba7 + u32::from(name.as_bytes()[0]) - 97));
        let params = json!({"name": name, "block_size": 512, "num_blocks": 64, "uuid": id});
        call("bdev_null_create", params).await;
    }
    call("bdev_malloc_create", json!({"name": "malloc", "block_size": 512, "num_blocks": 64})).await;
    call("bdev_passthru_create", json!({"name": "passthru", "base_bdev_name": "a"})).await;
    let delay = json!({"name": "delay", "base_bdev_name": "b", "avg_read_latency": 1, "p99_read_latency": 1,
        "avg_write_latency": 1, "p99_write_latency": 1});
    call("bdev_delay_create", delay).await;
    call("bdev_error_create", json!({"base_name": "c"})).await;
    call("bdev_split_create", json!({"base_bdev": "d", "split_count": 2})).await;
}

async fn described(daemon: &Daemon, name: &str) -> Value {
    daemon.call("bdev_get_bdevs", &json!({"name": name})).await.unwrap()[0].take()
}

#[test]
fn kinds_have_spdk_s_names() {
    in_daemon(async |daemon| {
        make_all(daemon).await;
        for (name, product) in [
            ("aio", "AIO disk"),
            ("uring", "URING bdev"),
            ("null", "Null disk"),
            ("malloc", "Malloc disk"),
            ("passthru", "passthru"),
            ("delay", "delay"),
            ("EE_c", "Error Injection Disk"),
            ("dp0", "Split Disk"),
        ] {
            let disk = described(daemon, name).await;
            assert_eq!(disk["product_name"], product, "{name}");
            assert_eq!(disk["aliases"], json!([disk["uuid"]]), "{name}");
        }
    });
}

/// The values are those of RFC 9562's version 5, of SPDK's namespaces and the uuids of the base disks.
#[test]
fn uuids_are_derived_from_the_base_disks() {
    in_daemon(async |daemon| {
        make_all(daemon).await;
        for (name, uuid) in [
            ("passthru", "0cc87eeb-b353-54bb-a33b-d0b96bbc5991"),
            ("delay", "b4bfa362-d407-5b6d-81a8-08cde6b5aea7"),
            ("EE_c", "a21bd77a-dc06-5e82-bebc-5493195f6f99"),
            ("dp0", "8b9eef57-4ea4-5040-b173-3e11e97f1e1a"),
            ("dp1", "7834c650-d324-5d80-a4f6-5a01375c0560"),
        ] {
            assert_eq!(described(daemon, name).await["uuid"], uuid, "{name}");
        }
    });
}

#[test]
fn each_family_deletes_its_own_disks_only() {
    in_daemon(async |daemon| {
        make_all(daemon).await;
        let families = ["aio", "uring", "null", "malloc", "passthru", "delay", "error"];
        let name = |family: &'static str| if family == "error" { "EE_c" } else { family };
        for family in families {
            for other in families.into_iter().filter(|other| *other != family) {
                let method = format!("bdev_{other}_delete");
                let refused = daemon.call(&method, &json!({"name": name(family)})).await.unwrap_err();
                assert_eq!((refused.code(), refused.message().as_str()), (-19, "No such device"), "{method}");
            }
        }
        let refused = daemon.call("bdev_aio_rescan", &json!({"name": "uring"})).await.unwrap_err();
        assert_eq!(refused.code(), -19);
        for family in families {
            daemon.call(&format!("bdev_{family}_delete"), &json!({"name": name(family)})).await.unwrap();
        }
    });
}

#[test]
fn changed_sizes_are_reported_as_events() {
    in_daemon(async |daemon| {
        make_all(daemon).await;
        let types = daemon.call("notify_get_types", &json!({})).await.unwrap();
        assert_eq!(types, json!(["bdev_register", "bdev_unregister", "bdev_resize"]));
        let events = async || {
            let reported = daemon.call("notify_get_notifications", &json!({})).await.unwrap();
            let resized = reported.as_array().unwrap().iter().filter(|e| e["type"] == "bdev_resize");
            resized.map(|e| e["ctx"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        daemon.call("bdev_aio_rescan", &json!({"name": "aio"})).await.unwrap();
        assert_eq!(events().await, Vec::<String>::new(), "the size has not changed");
        let grown = std::fs::File::options().write(true).open(daemon.dir.path().join("a")).unwrap();
        grown.set_len(16384).unwrap();
        daemon.call("bdev_aio_rescan", &json!({"name": "aio"})).await.unwrap();
        daemon.call("bdev_null_resize", &json!({"name": "a", "new_size": 1})).await.unwrap();
        assert_eq!(events().await, ["aio", "a", "passthru"]);
    });
}
