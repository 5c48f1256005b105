//! Hands a library's own `tracing` events and panics to the engine's subscriber.
//!
//! A library has its own copy of `tracing`, so its events would go nowhere. Linked-in plugins share
//! the engine's and do not need this.

use crate::context::HostServices;
use attache_core::abi::{AbiSlice, AbiStr, Attribute, TraceLevel};
use std::{
    fmt::{Debug, Write as _},
    sync::{
        Once,
        atomic::{AtomicU64, Ordering},
    },
};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
    subscriber::Interest,
};

struct Forward {
    host: HostServices,
    next_span: AtomicU64,
}

fn level(level: &Level) -> TraceLevel {
    match *level {
        Level::ERROR => TraceLevel::ERROR,
        Level::WARN => TraceLevel::WARN,
        Level::INFO => TraceLevel::INFO,
        Level::DEBUG => TraceLevel::DEBUG,
        Level::TRACE => TraceLevel::TRACE,
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.message);
        } else {
            self.fields.push((field.name(), value.to_owned()));
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let mut text = String::new();
        // Writing to a `String` fails only when the value's own `Debug` does; then it stays empty.
        let _ = write!(text, "{value:?}");
        self.record_str(field, &text);
    }
}

impl Forward {
    fn send(&self, at: TraceLevel, target: &str, message: &str, fields: &[(&'static str, String)]) {
        let fields: Vec<Attribute> =
            fields.iter().map(|(key, value)| Attribute { key: AbiStr::new(key), value: AbiStr::new(value) }).collect();
        let table = self.host.table;
        // SAFETY: the host's table lives as long as the process; the texts live for the call.
        unsafe {
            (table.trace)(table.context, at, AbiStr::new(target), AbiStr::new(message), AbiSlice::new(&fields));
        }
    }
}

impl Subscriber for Forward {
    fn register_callsite(&self, _metadata: &'static Metadata<'static>) -> Interest {
        // The host's filter may change at any time.
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let table = self.host.table;
        // SAFETY: as in `send`.
        metadata.is_event()
            && unsafe { (table.trace_enabled)(table.context, level(metadata.level()), AbiStr::new(metadata.target())) }
                != 0
    }

    fn new_span(&self, _attributes: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(self.next_span.fetch_add(1, Ordering::Relaxed).max(1))
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}
    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let metadata = event.metadata();
        self.send(level(metadata.level()), metadata.target(), &fields.message, &fields.fields);
    }

    fn enter(&self, _span: &span::Id) {}
    fn exit(&self, _span: &span::Id) {}
}

/// Installs the forwarding in a library; once.
pub(crate) fn forward_to(host: HostServices) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Fails only when the plugin installed a subscriber of its own: its choice.
        let _ = tracing::subscriber::set_global_default(Forward { host, next_span: AtomicU64::new(1) });
        std::panic::set_hook(Box::new(|info| {
            tracing::error!(location = info.location().map(ToString::to_string), "{info}");
        }));
    });
}
