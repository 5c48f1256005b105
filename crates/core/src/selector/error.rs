//! Why nothing was selected.

use super::change::Change;
use crate::{
    device::Device,
    kind::Kind,
    policy::{Origin, did_you_mean, nearest},
    verdict::Reason,
};

/// The reason of a backend that an exclusive priority list leaves out.
pub(super) const EXCLUSIVE: &str = "not in the operator's exclusive priority list";

/// A backend that was refused, and every reason.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refused {
    /// Its name.
    pub name: String,
    /// The reasons.
    pub reasons: Vec<Reason>,
    /// One change of the request or of the engine's settings that would admit it, if there is one.
    pub change: Option<Change>,
}

/// Backends for other platforms, and those that an exclusive priority list leaves out, are counted, not
/// listed, where there are others: the explanation has them.
fn refusals(refused: &[Refused], device: &Device) -> String {
    let foreign = format!("platform {} not supported", device.platform);
    let is_near = |refused: &&Refused| !refused.reasons.iter().any(|reason| *reason == foreign || reason == EXCLUSIVE);
    let near: Vec<&Refused> = refused.iter().filter(is_near).collect();
    let (listed, rest) =
        if near.is_empty() { (refused.iter().collect(), 0) } else { (near.clone(), refused.len() - near.len()) };
    let one = |refused: &Refused| {
        let change = refused.change.as_ref().map(|change| format!(" ({change} would admit {})", refused.name));
        format!("{}: {}{}", refused.name, refused.reasons.join(", "), change.unwrap_or_default())
    };
    let mut texts: Vec<String> = listed.into_iter().map(one).collect();
    if rest > 0 {
        texts.push(format!("{rest} more are for other platforms or left out by a priority list"));
    }
    texts.join("; ")
}

/// Why nothing was selected.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum SelectionError {
    /// The request makes no sense.
    #[error("{field} is {value}; valid: {valid}")]
    Request {
        /// The field.
        field: &'static str,
        /// What was found.
        value: String,
        /// What is valid.
        valid: &'static str,
    },
    /// The override names a backend that does not exist.
    #[error("unknown backend '{name}' ({origin}); valid: {}{}", .valid.join(", "), did_you_mean(nearest(.name, .valid.iter().map(String::as_str))))]
    UnknownBackend {
        /// The name that was asked for.
        name: String,
        /// Where the override came from.
        origin: Origin,
        /// The names that exist.
        valid: Vec<String>,
    },
    /// The override names a backend that cannot serve the layer.
    #[error(
        "backend {name} ({origin}) cannot serve a layer of kind {kind}: {}; take the override back, or set one for this kind alone (backend_per_kind {kind}=NAME)",
        .reasons.join(", ")
    )]
    OverrideInvalid {
        /// The name that was asked for.
        name: String,
        /// Where the override came from.
        origin: Origin,
        /// The layer's kind.
        kind: Kind,
        /// Every reason.
        reasons: Vec<Reason>,
    },
    /// No backend can serve the layer.
    #[error("no backend can serve a layer of kind {kind} on {device}: {}", refusals(.refused, .device))]
    NothingSuitable {
        /// The layer's kind.
        kind: Kind,
        /// The device.
        device: Box<Device>,
        /// Each backend with its reasons.
        refused: Vec<Refused>,
    },
    /// There is no backend at all.
    #[error(
        "no backend is registered; link a plugin in, or name one with --plugin FILE, --plugin-path DIR or ATTACHE_PLUGIN_PATH"
    )]
    NoBackends,
}
