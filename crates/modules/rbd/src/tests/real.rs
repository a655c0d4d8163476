//! librbd itself, as far as it goes without a cluster.

use crate::{ClusterConfig, Clusters, Error};
use aryk_bdev_conformance::block_on;
use aryk_librbd::LoadError;

#[test]
fn a_missing_library_names_its_package() {
    let clusters = Clusters::new(Some("/nonexistent/librbd.so.1".into()), None);
    let error = block_on(clusters.register("c", ClusterConfig::default())).unwrap_err();
    assert!(matches!(error, Error::Load(LoadError::Missing { .. })), "{error}");
    assert!(error.to_string().contains("librbd1") && error.to_string().contains("librados2"), "{error}");
}

#[test]
fn a_library_without_its_functions_is_too_old() {
    // Some library that every Linux has.
    let clusters = Clusters::new(Some("libc.so.6".into()), None);
    let error = block_on(clusters.register("c", ClusterConfig::default())).unwrap_err();
    assert!(matches!(error, Error::Load(LoadError::TooOld { .. })), "{error}");
}
