//! The table of methods by name: summary, schemas of parameters and result, and handler. Control context.
//!
//! A handler is an `async fn` from a typed request to a typed reply. The same two types parse and print JSON and generate the
//! schemas of the document ([`crate::openrpc`]), so that code and document cannot differ.

use crate::Error;
use crate::dispatch::Running;
use crate::error::INVALID_PARAMS;
use crate::wire::numbers;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::rc::Rc;

type Handler<C> = Box<dyn Fn(Rc<C>, Option<Box<RawValue>>) -> Running>;

/// When a method may be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Only before start-up is complete.
    StartUp,
    /// Only after it.
    RunTime,
    /// Always.
    Any,
}

/// The error codes of a method. SPDK's methods differ in them, and clients depend on the codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Codes {
    /// Code for parameters that cannot be decoded.
    pub undecoded: i32,
    /// Code for errors of the system or a device, if it is not the errno itself. The text remains that of the errno.
    pub errno: Option<i32>,
}

impl Default for Codes {
    fn default() -> Self {
        Self { undecoded: INVALID_PARAMS, errno: None }
    }
}

impl Codes {
    /// The error with the method's code.
    pub(crate) fn apply(self, error: Error) -> Error {
        match (error, self.errno) {
            (error @ Error::Undecoded(_), _) => error.coded(self.undecoded),
            (error @ Error::Errno { .. }, Some(code)) => error.coded(code),
            (error, _) => error,
        }
    }
}

/// The methods by name, each over a context that is passed with the call.
pub struct Table<C> {
    entries: BTreeMap<&'static str, Entry<C>>,
}

/// A method.
pub struct Entry<C> {
    /// When the method may be called.
    pub phase: Phase,
    /// Whether the method may change something: read-only clients may not call such methods.
    pub changes: bool,
    /// The error codes of the method.
    pub codes: Codes,
    /// Summary of the method, in one sentence.
    pub summary: &'static str,
    /// The schema of the parameters, an object.
    pub params: fn(&mut SchemaGenerator) -> Schema,
    /// The schema of the result.
    pub result: fn(&mut SchemaGenerator) -> Schema,
    handler: Handler<C>,
}

impl<C> std::fmt::Debug for Table<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.entries.keys()).finish()
    }
}

impl<C> std::fmt::Debug for Entry<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("phase", &self.phase).finish_non_exhaustive()
    }
}

impl<C> Default for Table<C> {
    fn default() -> Self {
        Self { entries: BTreeMap::new() }
    }
}

impl<C: 'static> Table<C> {
    /// Adds a method.
    ///
    /// # Panics
    /// If a method of that name exists.
    pub fn add<P, R, F>(&mut self, name: &'static str, phase: Phase, summary: &'static str, handler: F)
    where
        P: DeserializeOwned + JsonSchema + 'static,
        R: Serialize + JsonSchema,
        F: AsyncFn(&C, P) -> Result<R, Error> + 'static,
    {
        let handler = Rc::new(handler);
        let erased: Handler<C> = Box::new(move |context, params| {
            let handler = Rc::clone(&handler);
            Box::pin(async move {
                let parsed = parse(params.as_deref())?;
                // Text with a secret is freed before the call takes its time.
                drop(params);
                let reply = handler(&context, parsed).await?;
                serde_json::value::to_raw_value(&reply).map_err(|e| Error::Internal(e.to_string()))
            })
        });
        let entry = Entry {
            phase,
            changes: true,
            codes: Codes::default(),
            summary,
            params: P::json_schema,
            result: schema_of::<R>,
            handler: erased,
        };
        assert!(self.entries.insert(name, entry).is_none(), "two methods '{name}'");
    }

    /// Marks these methods as read-only; all others count as changing something.
    ///
    /// # Panics
    /// If one of the methods does not exist.
    pub fn change_nothing(&mut self, names: &[&'static str]) {
        for name in names {
            let entry = self.entries.get_mut(name);
            entry.unwrap_or_else(|| panic!("no method '{name}'")).changes = false;
        }
    }

    /// Sets the error codes of these methods.
    ///
    /// # Panics
    /// If one of the methods does not exist.
    pub fn fail_by(&mut self, codes: Codes, names: &[&'static str]) {
        for name in names {
            self.entries.get_mut(name).unwrap_or_else(|| panic!("no method '{name}'")).codes = codes;
        }
    }

    /// All methods, sorted by name.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, &Entry<C>)> {
        self.entries.iter().map(|(name, entry)| (*name, entry))
    }

    /// The method with that name.
    ///
    /// # Errors
    /// [`Error::MethodNotFound`].
    pub fn find(&self, name: &str) -> Result<&Entry<C>, Error> {
        self.entries.get(name).ok_or(Error::MethodNotFound)
    }
}

impl<C> Entry<C> {
    /// Starts a call.
    pub(crate) fn call(&self, context: Rc<C>, params: Option<Box<RawValue>>) -> Running {
        (self.handler)(context, params)
    }
}

/// By reference if the type has a name.
fn schema_of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

/// Decodes typed parameters; missing ones are equivalent to `{}`.
fn parse<P: DeserializeOwned>(params: Option<&RawValue>) -> Result<P, Error> {
    let text = params.map_or("{}", RawValue::get);
    serde_json::from_str(&numbers::whole(text)).map_err(|e| Error::Undecoded(e.to_string()))
}
