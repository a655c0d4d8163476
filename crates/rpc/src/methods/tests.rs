//! Properties of all methods.

use super::*;
use aryk_reactor::{Options, Reactors};

#[test]
fn read_only_methods_have_names_of_queries() {
    let dir = tempfile::TempDir::new().unwrap();
    let reactors = Rc::new(Reactors::start(&Options::default()).unwrap());
    let level = log::PrintLevel::Error;
    let methods = table(Rc::new(Control::new(reactors, dir.path(), 1024, level, |_| {})));
    for (name, _) in methods.names() {
        let gets = ["_get_", "_wait_", "save_config", "rpc.discover"].iter().any(|part| name.contains(part));
        let gets = gets || name.ends_with("_get");
        assert_eq!(methods.changes(name), Ok(!gets), "{name}");
    }
    assert_eq!(methods.changes("no_such_method"), Err(Error::MethodNotFound));
}
