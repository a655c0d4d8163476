//! Error codes of methods that do not use the error's own number, as SPDK's do. Control context.

use super::{Control, Table};
use crate::error::{INTERNAL, INVALID_PARAMS};
use crate::table::Codes;

pub(super) fn set(table: &mut Table<Control>) {
    table.fail_by(Codes { undecoded: INTERNAL, errno: None }, &UNDECODED_IS_INTERNAL);
    table.fail_by(Codes { undecoded: INVALID_PARAMS, errno: Some(INVALID_PARAMS) }, &ALL_IS_INVALID);
    table.fail_by(
        Codes { undecoded: INTERNAL, errno: Some(INVALID_PARAMS) },
        &["log_clear_flag", "log_set_flag"],
    );
    table.fail_by(Codes { undecoded: INTERNAL, errno: Some(INTERNAL) }, &["vhost_get_controllers"]);
    table.fail_by(Codes { undecoded: INVALID_PARAMS, errno: Some(INTERNAL) }, &["framework_set_scheduler"]);
}

/// Methods that report parameters which cannot be decoded as an internal error, and other errors with their own numbers.
const UNDECODED_IS_INTERNAL: [&str; 68] = [
    "bdev_aio_create",
    "bdev_aio_delete",
    "bdev_aio_rescan",
    "bdev_crypto_create",
    "bdev_crypto_delete",
    "bdev_delay_create",
    "bdev_delay_delete",
    "bdev_enable_histogram",
    "bdev_error_create",
    "bdev_error_delete",
    "bdev_error_inject_error",
    "bdev_error_resume_pending",
    "bdev_get_bdevs",
    "bdev_get_histogram",
    "bdev_get_histogram_borders",
    "bdev_get_iostat",
    "bdev_lvol_check_shallow_copy",
    "bdev_lvol_clone",
    "bdev_lvol_clone_bdev",
    "bdev_lvol_create",
    "bdev_lvol_create_lvstore",
    "bdev_lvol_decouple_parent",
    "bdev_lvol_delete",
    "bdev_lvol_delete_lvstore",
    "bdev_lvol_get_lvols",
    "bdev_lvol_get_lvstores",
    "bdev_lvol_grow_lvstore",
    "bdev_lvol_inflate",
    "bdev_lvol_rename",
    "bdev_lvol_rename_lvstore",
    "bdev_lvol_resize",
    "bdev_lvol_set_read_only",
    "bdev_lvol_snapshot",
    "bdev_lvol_start_shallow_copy",
    "bdev_malloc_create",
    "bdev_malloc_delete",
    "bdev_null_create",
    "bdev_null_delete",
    "bdev_null_resize",
    "bdev_nvme_add_error_injection",
    "bdev_nvme_apply_firmware",
    "bdev_nvme_attach_controller",
    "bdev_nvme_cuse_register",
    "bdev_nvme_cuse_unregister",
    "bdev_nvme_detach_controller",
    "bdev_nvme_disable_controller",
    "bdev_nvme_enable_controller",
    "bdev_nvme_get_controller_health_info",
    "bdev_nvme_get_controllers",
    "bdev_nvme_get_transport_statistics",
    "bdev_nvme_remove_error_injection",
    "bdev_nvme_reset_controller",
    "bdev_nvme_send_cmd",
    "bdev_passthru_create",
    "bdev_passthru_delete",
    "bdev_rbd_create",
    "bdev_rbd_delete",
    "bdev_rbd_get_clusters_info",
    "bdev_rbd_register_cluster",
    "bdev_rbd_resize",
    "bdev_rbd_unregister_cluster",
    "bdev_reset_iostat",
    "bdev_set_qd_sampling_period",
    "bdev_set_qos_limit",
    "bdev_uring_create",
    "bdev_uring_delete",
    "bdev_uring_rescan",
    "log_enable_timestamps",
];

/// Methods that report every error as an invalid parameter, with the error's own text.
const ALL_IS_INVALID: [&str; 13] = [
    "bdev_split_create",
    "bdev_split_delete",
    "trace_clear_tpoint_mask",
    "trace_disable_tpoint_group",
    "trace_enable_tpoint_group",
    "trace_set_tpoint_mask",
    "vhost_controller_set_coalescing",
    "vhost_create_blk_controller",
    "vhost_create_scsi_controller",
    "vhost_delete_controller",
    "vhost_scsi_controller_add_target",
    "vhost_scsi_controller_remove_target",
    "vhost_start_scsi_controller",
];
