//! The methods, by area: each a pair of types and an `async fn`. Control context.
//!
//! The types are what the wire says; nothing else parses or prints JSON. Where SPDK has a method, its parameters and
//! result are SPDK's; parameters and members of ours are marked so.

mod bdev;
pub mod framework;
pub mod log;

use crate::dispatch::{Methods, NoParams, Phase};
use crate::{Control, Error};
use serde::Deserialize;
use std::rc::Rc;

/// All methods over `control`.
pub fn table(control: Rc<Control>) -> Methods<Control> {
    let mut methods = Methods::new(control, Control::has_started);
    bdev::register(&mut methods);
    framework::register(&mut methods);
    log::register(&mut methods);
    let mut names = methods.names();
    names.push(("rpc_get_methods", Phase::Any));
    names.sort_unstable_by_key(|(name, _)| *name);
    methods.add("rpc_get_methods", Phase::Any, async move |control: &Control, p: GetMethods| {
        Ok(get_methods(&names, p.current.then(|| control.has_started())))
    });
    methods
}

/// Parameters of `rpc_get_methods`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GetMethods {
    /// Only those that may be called now.
    #[serde(default)]
    current: bool,
    /// Also deprecated names, of which there are none.
    #[serde(default, rename = "include_aliases")]
    _include_aliases: bool,
}

fn get_methods(names: &[(&'static str, Phase)], has_started: Option<bool>) -> Vec<&'static str> {
    let fits = |phase| match (phase, has_started) {
        (Phase::Any, _) | (_, None) => true,
        (Phase::RunTime, Some(started)) => started,
        (Phase::StartUp, Some(started)) => !started,
    };
    names.iter().filter(|(_, phase)| fits(*phase)).map(|(name, _)| *name).collect()
}
