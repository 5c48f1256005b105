//! A plugin's events in the engine's `tracing` subscriber, with their level, target and fields.
//!
//! `tracing` wants static metadata for each place that makes events; a plugin's places are known
//! only at run time, so one leaked call site stands for each (level, target, field names) seen.

use crate::abi::TraceLevel;
use std::{
    collections::HashMap,
    sync::{OnceLock, PoisonError, RwLock},
};
use tracing_core::{
    Callsite, Event, Interest, Kind, Level, Metadata,
    field::{Field, FieldSet, Value},
    identify_callsite,
};

/// Fields of one event that are handed on; `tracing` allows 32 with the message among them.
const MAX_FIELDS: usize = 24;
/// Call sites that are kept apart; beyond it events share one whose fields are in the message.
const MAX_CALLSITES: usize = 4096;

#[derive(PartialEq, Eq, Hash, Clone)]
struct Key {
    level: u32,
    target: String,
    fields: Vec<String>,
}

struct DynamicCallsite {
    metadata: OnceLock<Metadata<'static>>,
}

impl Callsite for DynamicCallsite {
    fn set_interest(&self, _interest: Interest) {}

    fn metadata(&self) -> &Metadata<'_> {
        // Set before the call site is used by anybody.
        self.metadata.get().unwrap_or_else(|| unreachable!("metadata is set when the call site is made"))
    }
}

fn level_of(level: TraceLevel) -> Level {
    match level {
        TraceLevel::ERROR => Level::ERROR,
        TraceLevel::WARN => Level::WARN,
        TraceLevel::INFO => Level::INFO,
        TraceLevel::DEBUG => Level::DEBUG,
        // A level that this host does not know is the least urgent one.
        _ => Level::TRACE,
    }
}

fn leak(text: &str) -> &'static str {
    Box::leak(text.to_owned().into_boxed_str())
}

fn callsite(key: Key) -> &'static DynamicCallsite {
    static SITES: OnceLock<RwLock<HashMap<Key, &'static DynamicCallsite>>> = OnceLock::new();
    let sites = SITES.get_or_init(RwLock::default);
    if let Some(site) = sites.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
        return site;
    }
    let mut sites = sites.write().unwrap_or_else(PoisonError::into_inner);
    let key = if sites.len() >= MAX_CALLSITES {
        Key { level: key.level, target: "attache::plugin".to_owned(), fields: Vec::new() }
    } else {
        key
    };
    if let Some(site) = sites.get(&key) {
        return site;
    }
    let site: &'static DynamicCallsite = Box::leak(Box::new(DynamicCallsite { metadata: OnceLock::new() }));
    let names: Vec<&'static str> = std::iter::once("message").chain(key.fields.iter().map(|name| leak(name))).collect();
    let metadata = Metadata::new(
        "plugin event",
        leak(&key.target),
        level_of(TraceLevel(key.level)),
        None,
        None,
        None,
        FieldSet::new(Box::leak(names.into_boxed_slice()), identify_callsite!(site)),
        Kind::EVENT,
    );
    let _ = site.metadata.set(metadata);
    sites.insert(key, site);
    site
}

/// Whether the subscriber wants events of this level and target.
pub(super) fn enabled(level: TraceLevel, target: &str) -> bool {
    if level_of(level) > tracing_core::LevelFilter::current() {
        return false;
    }
    let site = callsite(Key { level: level.0, target: target.to_owned(), fields: Vec::new() });
    tracing_core::dispatcher::get_default(|dispatch| dispatch.enabled(site.metadata()))
}

/// Hands an event to the subscriber.
pub(super) fn emit(level: TraceLevel, target: &str, message: &str, fields: &[(String, String)]) {
    let (named, rest) = fields.split_at(fields.len().min(MAX_FIELDS));
    let names = named.iter().map(|(name, _)| name.clone()).collect();
    let site = callsite(Key { level: level.0, target: target.to_owned(), fields: names });
    let metadata = site.metadata();
    let mut slots = metadata.fields().iter();
    let Some(message_field) = slots.next() else { return };
    let fields_of_site: Vec<Field> = slots.collect();
    // Fields that found no place of their own go into the message, so that nothing is lost.
    let mut text = message.to_owned();
    let homeless = if fields_of_site.len() == named.len() { rest } else { fields };
    for (name, value) in homeless {
        text.push_str(&format!(" {name}={value}"));
    }
    let padding = &message_field;
    let mut values: [(&Field, Option<&dyn Value>); MAX_FIELDS + 1] = [(padding, None); MAX_FIELDS + 1];
    values[0] = (&message_field, Some(&text as &dyn Value));
    let texts: Vec<&str> = named.iter().map(|(_, value)| value.as_str()).collect();
    for (slot, (field, value)) in values[1..].iter_mut().zip(fields_of_site.iter().zip(&texts)) {
        *slot = (field, Some(value as &dyn Value));
    }
    Event::dispatch(metadata, &metadata.fields().value_set(&values));
}
