//! Options of SPDK features that Aryk lacks: RAID, iSCSI targets, network sockets, file systems, some of NVMe-oF targets.
//! Control context.
//!
//! SPDK's `save_config` writes all of these options, used or not, and its clients load a file only if each call succeeds. Values
//! that are SPDK's defaults are accepted and have no effect; other values were set for a feature that Aryk lacks, and are refused
//! with that reason.

use super::{Control, Error, Phase, Table};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::Deserialize;
use std::fmt::Debug;

pub(super) fn register(table: &mut Table<Control>) {
    SockOptions::register(table, "There are no network connections of disks");
    FsdevOptions::register(table, "There are no file systems");
    RaidOptions::register(table, "There is no RAID");
    NvmfConfig::register(table, "NVMe-oF targets lack it");
    IscsiOptions::register(table, "There is no iSCSI target");
    IscsiClientOptions::register(table, "There is no iSCSI client");
    VirtioHotplug::register(table, "There is no virtio client");
}

/// An integer of any width.
type Number = i64;

/// Refuses a value that is not one of SPDK's defaults.
fn only<T: Debug + PartialEq<D>, D: Debug>(
    param: &str,
    given: Option<&T>,
    defaults: &[D],
) -> Result<(), String> {
    match given {
        Some(value) if defaults.iter().all(|default| value != default) => {
            let known: Vec<_> = defaults.iter().map(|default| format!("{default:?}")).collect();
            Err(format!("`{param}` must be {} or omitted, not {value:?}", known.join(", ")))
        }
        Some(_) | None => Ok(()),
    }
}

/// Parameters of a method that accepts only SPDK's defaults: each with its type and its accepted values. The first group is
/// required.
macro_rules! defaults {
    ($name:ident, $method:literal { $($needed:ident: $needed_kind:ty = $is:tt;)* $(? $param:ident: $kind:ty = $default:tt;)* }) => {
        #[doc = concat!("Parameters of `", $method, "`.")]
        #[derive(Debug, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        struct $name {
            $(#[doc = concat!("Without effect. Accepted values: `", stringify!($is), "`.")] $needed: $needed_kind,)*
            $(#[doc = concat!("Without effect. Accepted values: `", stringify!($default), "`.")] $param: Option<$kind>,)*
        }

        impl $name {
            fn check(&self) -> Result<(), String> {
                $(only(stringify!($needed), Some(&self.$needed), &$is)?;)*
                $(only(stringify!($param), self.$param.as_ref(), &$default)?;)*
                Ok(())
            }

            fn register(table: &mut Table<Control>, reason: &'static str) {
                let summary = "Without effect: accepts only SPDK's defaults, since Aryk lacks the feature.";
                table.add($method, Phase::Any, summary, async move |_: &Control, p: Self| {
                    let refuse = |why| Error::errno(Errno::NOTSUP, format!("{reason}: {why}"));
                    p.check().map(|()| true).map_err(refuse)
                });
            }
        }
    };
}

defaults!(SockOptions, "sock_impl_set_options" {
    impl_name: String = ["posix", "ssl", "uring"];
    ? recv_buf_size: Number = [2_097_152, 4096];
    ? send_buf_size: Number = [2_097_152, 4096];
    ? enable_recv_pipe: bool = [true];
    ? enable_quickack: bool = [false];
    ? enable_placement_id: Number = [0];
    ? enable_zerocopy_send_server: bool = [true, false];
    ? enable_zerocopy_send_client: bool = [false];
    ? zerocopy_threshold: Number = [0];
    ? tls_version: Number = [0];
    ? enable_ktls: bool = [false];
});

defaults!(FsdevOptions, "fsdev_set_opts" {
    fsdev_io_pool_size: Number = [65_535];
    fsdev_io_cache_size: Number = [256];
});

defaults!(RaidOptions, "bdev_raid_set_options" {
    ? process_window_size_kb: Number = [1024];
    ? process_max_bandwidth_mb_sec: Number = [0];
});

const DHCHAP_DIGESTS: [&str; 3] = ["sha256", "sha384", "sha512"];
const DHCHAP_DHGROUPS: [&str; 6] = ["null", "ffdhe2048", "ffdhe3072", "ffdhe4096", "ffdhe6144", "ffdhe8192"];

/// SPDK's default of these options.
#[derive(Debug)]
struct AsBuilt;

defaults!(NvmfConfig, "nvmf_set_config" {
    ? admin_cmd_passthru: AdminPassthru = [AsBuilt];
    ? poll_groups_mask: String = [""];
    ? discovery_filter: String = ["match_any"];
    ? discovery_filters: Vec<String> = [NO_FILTERS];
    ? dhchap_digests: Vec<String> = [DHCHAP_DIGESTS];
    ? dhchap_dhgroups: Vec<String> = [DHCHAP_DHGROUPS];
    ? dup_host_policy: String = ["allow"];
});

const NO_FILTERS: [&str; 0] = [];

/// Which commands are passed through to NVMe controllers: none.
#[derive(Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct AdminPassthru {
    identify_ctrlr: bool,
    identify_uuid_list: bool,
    get_log_page: bool,
    get_set_features: bool,
    sanitize: bool,
    security_send_recv: bool,
    fw_update: bool,
    nvme_mi: bool,
    vendor_specific: bool,
}

impl PartialEq<AsBuilt> for AdminPassthru {
    fn eq(&self, _: &AsBuilt) -> bool {
        *self == Self::default()
    }
}

defaults!(IscsiOptions, "iscsi_set_options" {
    ? auth_file: String = [""];
    ? node_base: String = ["iqn.2016-06.io.spdk"];
    ? nop_timeout: Number = [60];
    ? nop_in_interval: Number = [30];
    ? disable_chap: bool = [false];
    ? require_chap: bool = [false];
    ? mutual_chap: bool = [false];
    ? chap_group: Number = [0];
    ? max_sessions: Number = [128];
    ? max_queue_depth: Number = [64];
    ? max_connections_per_session: Number = [2];
    ? default_time2wait: Number = [2];
    ? default_time2retain: Number = [20];
    ? first_burst_length: Number = [8192];
    ? immediate_data: bool = [true];
    ? error_recovery_level: Number = [0];
    ? allow_duplicated_isid: bool = [false];
    ? max_large_datain_per_connection: Number = [64];
    ? max_r2t_per_connection: Number = [4];
    ? pdu_pool_size: Number = [36_864];
    ? immediate_data_pool_size: Number = [16_384];
    ? data_out_pool_size: Number = [2048];
});

defaults!(IscsiClientOptions, "bdev_iscsi_set_options" {
    ? timeout_sec: Number = [30];
});

defaults!(VirtioHotplug, "bdev_virtio_blk_set_hotplug" {
    enable: bool = [false];
    ? period_us: Number = [100_000, 0];
});
