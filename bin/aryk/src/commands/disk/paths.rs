//! What `aryk disk show` says about the paths of a disk of another host.

use super::{elements, number, text};
use crate::client::Client;
use crate::size::Size;
use serde_json::{Value, json};

/// Adds what each path has carried, as the member `paths`; returns it as lines.
pub fn read(disk: &mut Value, client: &mut Client) -> Vec<(&'static str, String)> {
    let transport = &disk["driver_specific"]["nvme"][0]["trid"]["trtype"];
    if !["TCP", "RDMA"].iter().any(|fabric| transport == fabric) {
        return Vec::new();
    }
    match client.call("bdev_nvme_get_path_iostat", json!({"name": disk["name"]})) {
        Ok(mut answer) => {
            disk["paths"] = answer["stats"].take();
            elements(&disk["paths"]).iter().map(|path| ("path", line(path))).collect()
        }
        Err(error) => vec![("paths", error.to_string())],
    }
}

fn line(path: &Value) -> String {
    let (trid, stat) = (&path["trid"], &path["stat"]);
    let kind = |ops: u64, what: &str, bytes: &str| format!("{ops} {what} ({})", Size(number(stat, bytes)));
    format!(
        "{}, port {}: {}, {}",
        text(trid, "traddr"),
        text(trid, "trsvcid"),
        kind(number(stat, "num_read_ops"), "reads", "bytes_read"),
        kind(number(stat, "num_write_ops"), "writes", "bytes_written")
    )
}

#[cfg(test)]
mod tests {
    use super::line;
    use serde_json::json;

    #[test]
    fn a_line_has_the_address_and_what_was_carried() {
        let path = json!({
            "trid": {"traddr": "192.0.2.20", "trsvcid": "4420"},
            "stat": {"num_read_ops": 3, "bytes_read": 12288, "num_write_ops": 0, "bytes_written": 0},
        });
        assert_eq!(line(&path), "192.0.2.20, port 4420: 3 reads (12K), 0 writes (0B)");
    }
}
