//! `rpc_get_methods`, `rpc.discover` and `load_config`: methods that list or call methods. Control context.

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
        "Lists the names of all methods.",
        async move |control: &Control, p: GetMethods| {
            let methods = upgrade(&all)?;
            Ok(get_methods(&methods, p.current.then(|| control.has_started())))
        },
    );
    // The document takes long to build, and is the same every time.
    let document = OnceCell::new();
    let all = Weak::clone(this);
    table.add(
        DISCOVER,
        Phase::Any,
        "Reports the OpenRPC document of all methods, with the schemas of parameters and results.",
        async move |_: &Control, _: NoParams| {
            let methods = upgrade(&all)?;
            Ok(Document(document.get_or_init(|| openrpc::document_of(methods.table())).clone()))
        },
    );
    let all = Weak::clone(this);
    table.add("load_config", Phase::RunTime, "Makes the calls of a `save_config` output in order, up to the first that fails: objects created before it stay.", async move |_: &Control, p: LoadConfig| {
        let methods = upgrade(&all)?;
        load_config(&methods, p).await
    });
}

/// OpenRPC's name for the method that reports the document.
pub(crate) const DISCOVER: &str = "rpc.discover";

/// Result of `rpc.discover`.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(transparent)]
struct Document(#[schemars(with = "Map<String, Value>")] Value);

/// The table lives as long as the server; a call that was just started may outlive both.
fn upgrade(table: &Weak<Methods<Control>>) -> Result<Rc<Methods<Control>>, Error> {
    table.upgrade().ok_or_else(|| Error::State("the daemon is ending".into()))
}

/// Parameters of `rpc_get_methods`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetMethods {
    /// List only methods that may be called now.
    #[serde(default)]
    current: bool,
    /// Ignored: there are no deprecated names.
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
