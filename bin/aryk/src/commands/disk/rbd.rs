//! What `aryk disk show` says about a Ceph image.

use super::{RBD, elements, number, text};
use crate::client::Client;
use crate::size::Size;
use serde_json::{Value, json};

/// Adds what the cluster says about the disk's image, as the member `image`; returns it as lines. A cluster that does not answer
/// is no error of the command.
pub fn read(disk: &mut Value, client: &mut Client) -> Vec<(&'static str, String)> {
    if text(disk, "product_name") != RBD {
        return Vec::new();
    }
    match client.call("bdev_rbd_get_image_info", json!({"name": disk["name"]})) {
        Ok(image) => {
            let lines = lines(&image);
            disk["image"] = image;
            lines
        }
        Err(error) => vec![("image", error.to_string())],
    }
}

fn lines(image: &Value) -> Vec<(&'static str, String)> {
    let join = |list: &Value, each: &dyn Fn(&Value) -> String| {
        let all: Vec<String> = elements(list).iter().map(each).collect();
        if all.is_empty() { "none".to_owned() } else { all.join(", ") }
    };
    let snapshot =
        |snapshot: &Value| format!("{} ({})", text(snapshot, "name"), Size(number(snapshot, "size")));
    let lock = |lock: &Value| {
        format!("{} at {} ({})", text(lock, "client"), text(lock, "address"), text(lock, "id"))
    };
    let exclusive = match (image["exclusive_lock"] == true, image["lock_owner"] == true) {
        (false, _) => "the image lacks the feature: other hosts may write to it at the same time",
        (true, true) => "held by this daemon",
        (true, false) => "not held by this daemon",
    };
    let luks = image["luks_version"].as_u64().map(|version| {
        let line =
            format!("LUKS{version}: 'aryk luks open' decrypts it, a VM with this disk sees encrypted data");
        ("header", line)
    });
    let name = |feature: &Value| feature.as_str().unwrap_or_default().to_owned();
    let known = [
        ("features", join(&image["features"], &name)),
        ("exclusive lock", exclusive.to_owned()),
        ("locked by", join(&image["locks"], &lock)),
        ("snapshots", join(&image["snapshots"], &snapshot)),
    ];
    known.into_iter().chain(luks).collect()
}

#[cfg(test)]
mod tests {
    use super::lines;
    use serde_json::json;

    fn line(image: &serde_json::Value, name: &str) -> Option<String> {
        lines(image).into_iter().find(|(known, _)| *known == name).map(|(_, line)| line)
    }

    #[test]
    fn an_image_is_described() {
        let image = json!({
            "features": ["layering", "exclusive-lock"], "exclusive_lock": true, "lock_owner": true, "luks_version": 2,
            "locks": [{"client": "client.7", "id": "auto 1", "address": "10.0.0.1:0/1"}],
            "snapshots": [{"id": 1, "name": "a", "size": 1 << 20}, {"id": 2, "name": "b", "size": 2 << 20}],
        });
        assert_eq!(line(&image, "exclusive lock").unwrap(), "held by this daemon");
        assert_eq!(line(&image, "locked by").unwrap(), "client.7 at 10.0.0.1:0/1 (auto 1)");
        let snapshots = line(&image, "snapshots").unwrap();
        assert!(snapshots.starts_with("a (") && snapshots.contains(", b ("), "{snapshots}");
        assert!(line(&image, "header").unwrap().starts_with("LUKS2: "));
    }

    #[test]
    fn an_image_without_lock_and_snapshots() {
        let image = json!({"features": [], "exclusive_lock": false, "locks": [], "snapshots": []});
        assert!(line(&image, "exclusive lock").unwrap().contains("lacks the feature"));
        assert_eq!((line(&image, "locked by").unwrap(), line(&image, "header")), ("none".into(), None));
    }
}
