//! `rpc_get_methods`, `rpc.discover` and `load_config`: the methods about methods. Control context.

use super::{Control, Error, Methods, NoParams, Phase, Table};
use crate::load::{LoadConfig, load_config};
use crate::openrpc;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::cell::OnceCell;
use std::rc::{Rc, Weak};

pub(super) fn register(table: &mut Table<Control>, this: &Weak<Methods<Control>>) {
    let all = Weak::clone(this);
    table.add(
        "rpc_get_methods",
        Phase::Any,
        "The names of all methods.",
        async move |control: &Control, p: GetMethods| {
            let methods = upgrade(&all)?;
            Ok(get_methods(&methods, p.current.then(|| control.has_started())))
        },
    );
    // It is long to make, and the same every time.
    let document = OnceCell::new();
    table.add(
        DISCOVER,
        Phase::Any,
        "The OpenRPC document of all methods, with the schemas of what they take and give.",
        async move |_: &Control, _: NoParams| Ok(Document(document.get_or_init(openrpc::document).clone())),
    );
    let all = Weak::clone(this);
    table.add("load_config", Phase::RunTime, "Makes the calls that `save_config` gave, in their order, up to the first that fails: what was made before it stays.", async move |_: &Control, p: LoadConfig| {
        let methods = upgrade(&all)?;
        load_config(&methods, p).await
    });
}

/// OpenRPC's name for the method that gives the document.
pub(crate) const DISCOVER: &str = "rpc.discover";

/// Result of `rpc.discover`.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(transparent)]
struct Document(#[schemars(with = "Map<String, Value>")] Value);

/// The table does not outlive the server; a call that was just started may.
fn upgrade(table: &Weak<Methods<Control>>) -> Result<Rc<Methods<Control>>, Error> {
    table.upgrade().ok_or_else(|| Error::State("the daemon is ending".into()))
}

/// Parameters of `rpc_get_methods`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetMethods {
    /// Only those that may be called now.
    #[serde(default)]
    current: bool,
    /// Also deprecated names, of which there are none.
    #[serde(default, rename = "include_aliases")]
    _include_aliases: bool,
}

fn get_methods(methods: &Methods<Control>, has_started: Option<bool>) -> Vec<&'static str> {
    let fits = |phase| match (phase, has_started) {
        (Phase::Any, _) | (_, None) => true,
        (Phase::RunTime, Some(started)) => started,
        (Phase::StartUp, Some(started)) => !started,
    };
    methods.names().into_iter().filter(|(_, phase)| fits(*phase)).map(|(name, _)| name).collect()
}
