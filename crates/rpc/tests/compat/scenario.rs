//! Calls of all methods, in an order in which each succeeds.

use super::target;
use aryk_reactor::CoreSet;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use serde_json::{Value, json};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

pub struct Step {
    pub method: &'static str,
    pub params: Value,
}

/// Methods that need `/dev/cuse`: the guest test `nvme/tools` calls them.
pub const IN_A_GUEST: [&str; 2] = ["bdev_nvme_cuse_register", "bdev_nvme_cuse_unregister"];

/// The calls. `dir` must be an empty directory.
pub fn steps(dir: &Path, (thread, core): (u64, u16)) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut call = |method, params| steps.push(Step { method, params });
    start(&mut call);
    name_secrets(dir, &mut call);
    make_disks(dir, &mut call);
    use_volumes(&mut call, dir, core);
    call("bdev_nvme_set_hotplug", json!({"enable": false, "period_us": 100_000}));
    call(
        "bdev_nvme_set_options",
        json!({"timeout_us": 0, "dhchap_digests": ["sha256"], "multipath_opts": {}}),
    );
    call(
        "bdev_nvme_attach_controller",
        json!({"name": "Nvme0", "trtype": "VFIOUSER", "traddr": dir.join("drive")}),
    );
    use_drive(&mut call);
    watch_disks(&mut call);
    share_disks(dir, &mut call);
    let other = CoreSet::allowed().iter().find(|other| *other != core).expect("a computer with two cores");
    call("aryk_core_add", json!({"core": other}));
    call("aryk_core_remove", json!({"core": other}));
    call("thread_set_cpumask", json!({"id": thread, "cpumask": format!("[{core}]")}));
    end(&mut call);
    steps
}

fn disk(name: &str) -> Value {
    json!({"name": name})
}

fn start(call: &mut impl FnMut(&'static str, Value)) {
    call("framework_start_init", json!({}));
    call("framework_wait_init", json!({}));
    call("spdk_get_version", json!({}));
    call("rpc_get_methods", json!({}));
    call("framework_set_scheduler", json!({"name": "static"}));
    let dynamic =
        json!({"name": "dynamic", "period": "100000", "load_limit": 10, "core_limit": 70, "core_busy": 90});
    call("framework_set_scheduler", dynamic);
    call("framework_get_scheduler", json!({}));
    call("framework_monitor_context_switch", json!({"enabled": true}));
    call("framework_monitor_context_switch", json!({}));
    call("iobuf_set_options", json!({"small_pool_count": 8192}));
    call("iobuf_get_stats", json!({}));
    call("accel_set_options", json!({}));
    call("trace_enable_tpoint_group", json!({"name": "bdev"}));
    call("trace_set_tpoint_mask", json!({"name": "bdev", "tpoint_mask": 3}));
    call("trace_disable_tpoint_group", json!({"name": "bdev"}));
    call("trace_clear_tpoint_mask", json!({"name": "bdev", "tpoint_mask": 1}));
    call("trace_clear", json!({}));
    call("trace_get_tpoint_group_mask", json!({}));
    call("trace_get_info", json!({}));
    call("aryk_trace_get", json!({}));
    call("aryk_trace_get", json!({"count": 10}));
    call("framework_get_subsystems", json!({}));
    call("log_get_print_level", json!({}));
    call("log_set_print_level", json!({"level": "NOTICE"}));
    call("log_set_level", json!({"level": "NOTICE"}));
    call("log_get_level", json!({}));
    call("log_set_flag", json!({"flag": "bdev"}));
    call("log_get_flags", json!({}));
    call("log_clear_flag", json!({"flag": "all"}));
    call("log_enable_timestamps", json!({"enabled": true}));
    call("sock_get_default_impl", json!({}));
    call("sock_set_default_impl", json!({"impl_name": "posix"}));
    call("framework_disable_cpumask_locks", json!({}));
    set_defaults(&mut *call);
    for method in
        ["framework_get_governor", "accel_get_module_info", "accel_get_opc_assignments", "accel_get_stats"]
    {
        call(method, json!({}));
    }
}

/// Options of features that Aryk lacks, some of them at SPDK's defaults.
fn set_defaults(call: &mut impl FnMut(&'static str, Value)) {
    call("sock_impl_set_options", json!({"impl_name": "ssl", "recv_buf_size": 4096}));
    call("fsdev_set_opts", json!({"fsdev_io_pool_size": 65535, "fsdev_io_cache_size": 256}));
    call("nvmf_set_max_subsystems", json!({"max_subsystems": 1024}));
    call("bdev_virtio_blk_set_hotplug", json!({"enable": false}));
    for method in [
        "bdev_raid_set_options",
        "nvmf_set_config",
        "nvmf_set_crdt",
        "iscsi_set_options",
        "bdev_iscsi_set_options",
        "aryk_absent_get",
    ] {
        call(method, json!({}));
    }
}

/// Names of secrets in files.
fn name_secrets(dir: &Path, call: &mut impl FnMut(&'static str, Value)) {
    let path = dir.join("secret");
    std::fs::write(&path, "secret").unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    call("keyring_file_add_key", json!({"name": "secret", "path": path}));
    call("keyring_get_keys", json!({}));
    call("keyring_file_remove_key", json!({"name": "secret"}));
    call("keyring_linux_set_options", json!({"enable": true}));
}

fn make_disks(dir: &Path, call: &mut impl FnMut(&'static str, Value)) {
    std::fs::write(dir.join("a.img"), [0; 8192]).unwrap();
    std::fs::write(dir.join("u.img"), [0; 8192]).unwrap();
    call("bdev_set_options", json!({"bdev_auto_examine": false}));
    call("bdev_malloc_create", json!({"name": "m", "block_size": 512, "num_blocks": 64}));
    call("bdev_malloc_create", json!({"block_size": 512, "num_blocks": 64}));
    call("bdev_null_create", json!({"name": "n", "block_size": 512, "num_blocks": 64}));
    call("bdev_null_resize", json!({"name": "n", "new_size": 1}));
    call("bdev_aio_create", json!({"name": "a", "filename": dir.join("a.img")}));
    call("bdev_aio_rescan", disk("a"));
    call("bdev_uring_create", json!({"name": "u", "filename": dir.join("u.img")}));
    call("bdev_uring_rescan", disk("u"));
    call("bdev_passthru_create", json!({"name": "p", "base_bdev_name": "m"}));
    let halves = ["0123456789abcdef".repeat(4), "fedcba9876543210".repeat(4)];
    let key = json!({"cipher": "AES_XTS", "key": halves[0], "key2": halves[1], "name": "k"});
    call("accel_crypto_key_create", key);
    call("accel_crypto_keys_get", json!({}));
    call("bdev_crypto_create", json!({"name": "x", "base_bdev_name": "p", "key_name": "k"}));
    call("bdev_error_create", json!({"base_name": "a"}));
    call("bdev_error_inject_error", json!({"name": "EE_a", "io_type": "clear", "error_type": "failure"}));
    call("bdev_error_resume_pending", disk("EE_a"));
    let delay = json!({"name": "d", "base_bdev_name": "u", "avg_read_latency": 1, "p99_read_latency": 1,
        "avg_write_latency": 1, "p99_write_latency": 1});
    call("bdev_delay_create", delay);
    let latency = json!({"delay_bdev_name": "d", "latency_type": "avg_read", "latency_us": 2});
    call("bdev_delay_update_latency", latency);
    call("bdev_rbd_register_cluster", json!({"name": "c", "config_param": {"mon_host": "127.0.0.1"}}));
    call("bdev_rbd_get_clusters_info", json!({"name": "c"}));
    let image = json!({"name": "r", "pool_name": "rbd", "rbd_name": "+size=1048576", "block_size": 512,
        "cluster_name": "c"});
    call("bdev_rbd_create", image);
    call("bdev_rbd_resize", json!({"name": "r", "new_size": "4"}));
    call("bdev_malloc_create", json!({"name": "whole", "block_size": 512, "num_blocks": 64}));
    call("bdev_split_create", json!({"base_bdev": "whole", "split_count": 2}));
}

/// Pools and volumes.
fn use_volumes(call: &mut impl FnMut(&'static str, Value), dir: &Path, core: u16) {
    call("bdev_malloc_create", json!({"name": "store", "block_size": 512, "num_blocks": 1 << 20}));
    let store =
        json!({"bdev_name": "store", "lvs_name": "lvs", "clear_method": "none", "md_page_size": "4096"});
    call("bdev_lvol_create_lvstore", store);
    call("bdev_lvol_get_lvstores", json!({}));
    call("bdev_lvol_get_lvstores", json!({"lvs_name": "lvs"}));
    call("bdev_lvol_create", json!({"lvs_name": "lvs", "lvol_name": "a", "size_in_mib": "8"}));
    call("bdev_lvol_snapshot", json!({"lvol_name": "lvs/a", "snapshot_name": "s"}));
    call("bdev_lvol_clone", json!({"snapshot_name": "lvs/s", "clone_name": "c"}));
    call("bdev_malloc_create", json!({"name": "image", "block_size": 512, "num_blocks": 64}));
    call("bdev_lvol_clone_bdev", json!({"bdev": "image", "lvs_name": "lvs", "clone_name": "i"}));
    call("bdev_get_bdevs", disk("lvs/i"));
    call("bdev_lvol_create", json!({"lvs_name": "lvs", "lvol_name": "o", "size_in_mib": "8"}));
    call("bdev_lvol_set_parent", json!({"lvol_name": "lvs/o", "parent_name": "lvs/s"}));
    call("bdev_lvol_set_parent_bdev", json!({"lvol_name": "lvs/o", "parent_name": "image"}));
    call("bdev_malloc_delete", disk("image"));
    call("bdev_lvol_rename", json!({"old_name": "lvs/c", "new_name": "d"}));
    call("bdev_lvol_inflate", disk("lvs/d"));
    call("bdev_lvol_decouple_parent", disk("lvs/d"));
    call("bdev_lvol_rename_lvstore", json!({"old_name": "lvs", "new_name": "lvs2"}));
    call("bdev_lvol_rename_lvstore", json!({"old_name": "lvs2", "new_name": "lvs"}));
    call("bdev_lvol_resize", json!({"name": "lvs/a", "size_in_mib": 16}));
    call("bdev_lvol_get_lvols", json!({"lvs_name": "lvs"}));
    call("bdev_get_bdevs", disk("lvs/s"));
    call("bdev_get_bdevs", disk("lvs/d"));
    call("bdev_lvol_create", json!({"lvs_name": "lvs", "lvol_name": "r", "size_in_mib": 8}));
    call("bdev_lvol_set_read_only", disk("lvs/r"));
    call("bdev_malloc_create", json!({"name": "copy", "block_size": 512, "num_blocks": 16_384}));
    call("bdev_lvol_start_shallow_copy", json!({"src_lvol_name": "lvs/r", "dst_bdev_name": "copy"}));
    call("bdev_lvol_check_shallow_copy", json!({"operation_id": 0}));
    call("bdev_malloc_delete", disk("copy"));
    call("bdev_lvol_grow_lvstore", json!({"lvs_name": "lvs"}));
    call("aryk_pools_get", json!({}));
    call("aryk_volume_create", json!({"pool": "lvs", "name": "e", "size": 1 << 30, "block_size": 4096}));
    let snapshots = [
        json!({"volume": "lvs/a", "snapshot_name": "a2"}),
        json!({"volume": "lvs/e", "snapshot_name": "e2"}),
    ];
    call("aryk_pool_snapshot", json!({"snapshots": snapshots}));
    call("aryk_volume_revert", json!({"volume": "lvs/a", "snapshot": "lvs/a2"}));
    call("aryk_volume_set_when_full", json!({"volume": "lvs/a", "when_full": "wait"}));
    call("aryk_volumes_get", json!({}));
    call("aryk_volume_get_space", json!({"pool": "lvs"}));
    call("aryk_volume_get_changed", json!({"volume": "lvs/a", "since": "lvs/s"}));
    call("aryk_pool_check", json!({"pool": "lvs", "repair": true}));
    call("aryk_pool_set_scrub", json!({"pool": "lvs", "days": 7, "bytes_per_second": 1 << 20}));
    call("aryk_pool_start_scrub", json!({"pool": "lvs"}));
    call("aryk_pool_get_scrub", json!({"pool": "lvs"}));
    call("aryk_pool_stop_scrub", json!({"pool": "lvs"}));
    call("aryk_pool_move", json!({"pool": "lvs", "shard": 0, "core": core}));
    call("aryk_pool_move", json!({"pool": "lvs", "core": core}));
    call("bdev_lvol_delete", disk("lvs/s"));
    call("bdev_lvol_delete_lvstore", json!({"lvs_name": "lvs"}));
    call("aryk_pool_create", json!({"name": "pool", "base_bdev_name": "store", "force": true}));
    call("bdev_lvol_delete_lvstore", json!({"lvs_name": "pool"}));
    call("bdev_malloc_delete", disk("store"));
    // A pool that is found again.
    let file = json!({"name": "file", "filename": dir.join("pool.img"), "block_size": 512});
    std::fs::File::create(dir.join("pool.img")).and_then(|file| file.set_len(256 << 20)).unwrap();
    call("bdev_aio_create", file.clone());
    call("aryk_pool_create", json!({"name": "pool", "base_bdev_name": "file"}));
    call("bdev_aio_delete", disk("file"));
    call("bdev_aio_create", file);
    call("aryk_pool_open", json!({"base_bdev_name": "file"}));
    call("bdev_aio_delete", disk("file"));
}

/// Calls on the NVMe controller `Nvme0`.
fn use_drive(call: &mut impl FnMut(&'static str, Value)) {
    call("bdev_get_bdevs", disk("Nvme0n1"));
    call("bdev_nvme_get_controllers", json!({}));
    call("framework_get_pci_devices", json!({}));
    call("bdev_nvme_get_transport_statistics", json!({}));
    call("bdev_nvme_get_controller_health_info", disk("Nvme0"));
    // Identify Controller.
    let mut command = [0; 64];
    (command[0], command[40]) = (6, 1);
    let command = URL_SAFE.encode(command);
    let identify = json!({"name": "Nvme0", "cmd_type": "admin", "data_direction": "c2h", "cmdbuf": command, "data_len": 4096});
    call("bdev_nvme_send_cmd", identify);
    let reads = json!({"name": "Nvme0", "cmd_type": "io", "opc": 2});
    let mut failing = reads.clone();
    (failing["sct"], failing["sc"], failing["do_not_submit"]) = (2.into(), 0x81.into(), true.into());
    call("bdev_nvme_add_error_injection", failing);
    call("bdev_nvme_remove_error_injection", reads);
    call("bdev_nvme_reset_controller", disk("Nvme0"));
    call("bdev_nvme_disable_controller", disk("Nvme0"));
    call("bdev_nvme_enable_controller", disk("Nvme0"));
    call("bdev_nvme_detach_controller", disk("Nvme0"));
}

fn watch_disks(call: &mut impl FnMut(&'static str, Value)) {
    call("bdev_examine", disk("n"));
    call("bdev_wait_for_examine", json!({}));
    call("bdev_get_bdevs", json!({}));
    for name in ["m", "Malloc0", "n", "a", "u", "p", "EE_a", "d", "whole", "wholep0", "wholep1"] {
        call("bdev_set_qd_sampling_period", json!({"name": name, "period": 1000}));
    }
    call("bdev_enable_histogram", json!({"name": "n", "enable": true}));
    call("bdev_get_histogram", disk("n"));
    call("bdev_get_histogram_borders", json!({"name": "n", "borders": [10, 100]}));
    call("bdev_set_io_timeout", json!({"name": "n", "timeout_ms": 1000}));
    limit_disks(&mut *call);
    call("bdev_get_iostat", json!({}));
    call("bdev_get_iostat", json!({"names": ["m"], "per_channel": true}));
    call("aryk_stats_get", json!({}));
    call("aryk_latency_get", disk("m"));
    call("aryk_memory_clients_get", json!({}));
    call("bdev_reset_iostat", json!({}));

    call("virtio_blk_get_transports", json!({}));
    call("virtio_blk_get_transports", json!({"name": "vhost_user_blk"}));
    call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "n"}));
    call("vhost_get_controllers", json!({}));
    call("vhost_create_scsi_controller", json!({"ctrlr": "s", "delay": true}));
    call("vhost_scsi_controller_add_target", json!({"ctrlr": "s", "scsi_target_num": 0, "bdev_name": "n"}));
    call("vhost_start_scsi_controller", json!({"ctrlr": "s"}));
    call("scsi_get_devices", json!({}));
    call("vhost_controller_set_coalescing", json!({"ctrlr": "c", "delay_base_us": 0, "iops_threshold": 1}));
    call("aryk_controller_set_sleep_policy", json!({"ctrlr": "c", "policy": "default"}));
    call("vhost_get_controllers", json!({}));
    call("framework_get_reactors", json!({}));
    call("thread_get_stats", json!({}));
    call("thread_get_pollers", json!({}));
    call("thread_get_io_channels", json!({}));
    call("framework_get_config", json!({"name": "bdev"}));
}

fn limit_disks(call: &mut impl FnMut(&'static str, Value)) {
    let limits = json!({"name": "n", "rw_ios_per_sec": 20000, "rw_mbytes_per_sec": 100, "r_mbytes_per_sec": 50,
        "w_mbytes_per_sec": 50});
    call("bdev_set_qos_limit", limits);
    call("bdev_qos_group_create", json!({"name": "vm"}));
    call("bdev_qos_group_create", json!({"name": "half", "parent": "vm"}));
    let limits = json!({"name": "vm", "rw_ios_per_sec": 6000, "rw_mbytes_per_sec": 250, "burst_seconds": 2,
        "combined": true});
    call("bdev_qos_group_set_limit", limits);
    call("bdev_qos_group_add_bdev", json!({"name": "half", "bdev_name": "n"}));
    call("bdev_get_bdevs", disk("n"));
    call("bdev_qos_groups_get", json!({}));
    call("bdev_qos_group_remove_bdev", json!({"name": "half", "bdev_name": "n"}));
    call("bdev_qos_group_delete", json!({"name": "half"}));
}

fn end(call: &mut impl FnMut(&'static str, Value)) {
    call("vhost_delete_controller", json!({"ctrlr": "c"}));
    call("vhost_scsi_controller_remove_target", json!({"ctrlr": "s", "scsi_target_num": 0}));
    call("vhost_delete_controller", json!({"ctrlr": "s"}));
    call("bdev_split_delete", json!({"base_bdev": "whole"}));
    for (method, name) in [
        ("bdev_delay_delete", "d"),
        ("bdev_error_delete", "EE_a"),
        ("bdev_crypto_delete", "x"),
        ("bdev_rbd_delete", "r"),
        ("bdev_rbd_unregister_cluster", "c"),
        ("bdev_passthru_delete", "p"),
        ("bdev_uring_delete", "u"),
        ("bdev_aio_delete", "a"),
        ("bdev_null_delete", "n"),
        ("bdev_malloc_delete", "m"),
    ] {
        call(method, disk(name));
    }
    call("accel_crypto_key_destroy", json!({"key_name": "k"}));
    call("notify_get_types", json!({}));
    call("notify_get_notifications", json!({}));
    call("spdk_kill_instance", json!({"sig_name": "SIGUSR1"}));
}

/// Serves a disk to hosts of NVMe over TCP.
fn share_disks(dir: &Path, call: &mut impl FnMut(&'static str, Value)) {
    const NQN: &str = target::SUBSYSTEM;
    const HOST: &str = "nqn.2016-06.io.spdk:host1";
    let port = target::ADDRESS.port().to_string();
    let address = json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port});
    call("nvmf_set_max_subsystems", json!({"max_subsystems": 8}));
    call("nvmf_set_crdt", json!({"crdt1": 1}));
    call("nvmf_create_target", json!({"name": "other", "max_subsystems": 1}));
    call("nvmf_get_targets", json!({}));
    call("nvmf_delete_target", json!({"name": "other"}));
    call("nvmf_create_transport", json!({"trtype": "TCP", "max_queue_depth": 64}));
    call("nvmf_get_transports", json!({}));
    let subsystem = json!({
        "nqn": NQN,
        "serial_number": "abcdef",
        "model_number": "ghijklmnop",
        "ana_reporting": true,
        "max_namespaces": 4,
    });
    call("nvmf_create_subsystem", subsystem);
    call("bdev_null_create", json!({"name": "shared", "num_blocks": 8, "block_size": 512}));
    let namespace = json!({"bdev_name": "shared", "nsid": 3, "no_auto_visible": true});
    call("nvmf_subsystem_add_ns", json!({"nqn": NQN, "namespace": namespace}));
    call("nvmf_ns_add_host", json!({"nqn": NQN, "nsid": 3, "host": HOST}));
    call("nvmf_subsystem_set_ns_ana_group", json!({"nqn": NQN, "nsid": 3, "anagrpid": 2}));
    let path = dir.join("dhchap");
    std::fs::write(&path, "DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:\n").unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    call("keyring_file_add_key", json!({"name": "dhchap", "path": path}));
    let keys = json!({"nqn": NQN, "host": HOST, "dhchap_key": "dhchap", "dhchap_ctrlr_key": "dhchap"});
    call("nvmf_subsystem_add_host", keys.clone());
    call("nvmf_get_subsystems", json!({"nqn": NQN}));
    call("nvmf_subsystem_set_keys", keys);
    // The host of this scenario does not authenticate.
    call("nvmf_subsystem_set_keys", json!({"nqn": NQN, "host": HOST}));
    call("keyring_file_remove_key", json!({"name": "dhchap"}));
    call("nvmf_subsystem_allow_any_host", json!({"nqn": NQN, "allow_any_host": true}));
    call("nvmf_subsystem_add_listener", json!({"nqn": NQN, "listen_address": address}));
    let state = json!({"nqn": NQN, "listen_address": address, "ana_state": "inaccessible", "anagrpid": 2});
    call("nvmf_subsystem_listener_set_ana_state", state);
    call("nvmf_discovery_add_referral", json!({"address": address, "secure_channel": true}));
    call("nvmf_discovery_get_referrals", json!({}));
    call("nvmf_discovery_remove_referral", json!({"address": address}));
    call("bdev_nvme_start_discovery", json!({"name": "far", "trtype": "TCP", "traddr": "127.0.0.1"}));
    call("bdev_nvme_get_discovery_info", json!({}));
    call("bdev_nvme_stop_discovery", disk("far"));
    call("nvmf_publish_mdns_prr", json!({}));
    call("nvmf_stop_mdns_prr", json!({}));
    call("bdev_nvme_start_mdns_discovery", json!({"name": "any", "svcname": "_aryk-test._tcp"}));
    call("bdev_nvme_get_mdns_discovery_info", json!({}));
    call("bdev_nvme_stop_mdns_discovery", disk("any"));
    let attach = json!({
        "name": "near", "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port, "subnqn": NQN, "hostnqn": HOST,
    });
    call("bdev_nvme_attach_controller", attach);
    call("bdev_nvme_get_io_paths", json!({"name": "nearn3"}));
    call("bdev_nvme_get_path_iostat", disk("nearn3"));
    call("bdev_nvme_set_multipath_policy", json!({"name": "nearn3", "policy": "active_active"}));
    call("bdev_nvme_set_preferred_path", json!({"name": "nearn3", "cntlid": 1}));
    call("bdev_nvme_set_keys", disk("near"));
    call("bdev_nvme_detach_controller", disk("near"));
    call("nvmf_get_subsystems", json!({}));
    call("nvmf_subsystem_get_listeners", json!({"nqn": NQN}));
    call("nvmf_subsystem_get_controllers", json!({"nqn": NQN}));
    call("nvmf_subsystem_get_qpairs", json!({"nqn": NQN}));
    call("nvmf_get_stats", json!({}));
    call("nvmf_subsystem_remove_listener", json!({"nqn": NQN, "listen_address": address}));
    call("nvmf_ns_remove_host", json!({"nqn": NQN, "nsid": 3, "host": HOST}));
    call("nvmf_subsystem_remove_host", json!({"nqn": NQN, "host": HOST}));
    call("nvmf_subsystem_remove_ns", json!({"nqn": NQN, "nsid": 3}));
    call("nvmf_delete_subsystem", json!({"nqn": NQN}));
    call("bdev_null_delete", json!({"name": "shared"}));
}
