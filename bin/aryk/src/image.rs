//! Names of Ceph images on the command line.

use serde_json::Value;
use std::fmt;
use std::str::FromStr;

/// An image, as Ceph's own programs name it: `POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSpec {
    pub pool: String,
    pub namespace: Option<String>,
    /// With the snapshot, if there is one.
    pub image: String,
}

impl FromStr for ImageSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split('/').collect();
        let (pool, namespace, image) = match *parts.as_slice() {
            [pool, image] => (pool, None, image),
            [pool, namespace, image] => (pool, Some(namespace), image),
            _ => return Err(format!("'{text}' is no POOL/IMAGE or POOL/NAMESPACE/IMAGE")),
        };
        let name_of = image.split('@').collect::<Vec<_>>();
        if name_of.len() > 2 || parts.iter().chain(&name_of).any(|part| part.is_empty()) {
            return Err(format!("'{text}' has an empty name in it, or several snapshots"));
        }
        Ok(Self { pool: pool.into(), namespace: namespace.map(str::to_owned), image: image.into() })
    }
}

impl fmt::Display for ImageSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let namespace = self.namespace.iter().map(|namespace| format!("{namespace}/")).collect::<String>();
        write!(f, "{}/{namespace}{}", self.pool, self.image)
    }
}

impl ImageSpec {
    /// The image of a disk, from the daemon's description of the disk.
    pub fn of(disk: &Value) -> Option<Self> {
        let rbd = &disk["driver_specific"]["rbd"];
        let text = |member: &str| rbd[member].as_str().map(str::to_owned);
        Some(Self { pool: text("pool_name")?, namespace: text("namespace_name"), image: text("rbd_name")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn images_are_named_as_in_ceph() {
        for (text, namespace, image) in [
            ("p/i", None, "i"),
            ("p/n/i", Some("n"), "i"),
            ("p/i@s", None, "i@s"),
            ("p/n/i@s", Some("n"), "i@s"),
        ] {
            let spec: ImageSpec = text.parse().unwrap();
            assert_eq!((&*spec.pool, spec.namespace.as_deref(), &*spec.image), ("p", namespace, image));
            assert_eq!(spec.to_string(), text);
        }
        for text in ["", "i", "p/", "/i", "p//i", "a/b/c/d", "p/@s", "p/i@", "p/i@a@b"] {
            assert!(text.parse::<ImageSpec>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_disk_tells_its_image() {
        let rbd = json!({"pool_name": "p", "rbd_name": "i"});
        let spec = ImageSpec::of(&json!({"driver_specific": {"rbd": rbd}})).unwrap();
        assert_eq!(spec.to_string(), "p/i");
        assert_eq!(ImageSpec::of(&json!({"driver_specific": {}})), None);
    }
}
