//! What was found, in order of precedence, and what of it takes part in selection.

use super::{
    entry::{Entry, Stage},
    slot::{Failure, How, Slot},
};
use crate::{
    discovery::{Found, What},
    kv_cache_dtype::KvCacheDtype,
    loader::{self, check_generation, linux::FileId},
    manifest::Manifest,
    plugin::{LinkedPlugin, PluginMetadata},
    policy::{Origin, Policy},
    selector::{Candidate, Source},
    verdict::Reason,
};
use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::Arc,
};

/// Options by plugin, in lower case.
pub(super) type Options = BTreeMap<String, Vec<(String, String)>>;

/// One thing that was looked at.
#[derive(Clone)]
pub(super) struct Item {
    source: Source,
    manifest: Option<PathBuf>,
    origin: Origin,
    file: Option<FileId>,
    sha256: Option<String>,
    content: Content,
}

#[derive(Clone)]
enum Content {
    Plugin {
        slot: Arc<Slot>,
        /// How far it came at best without being opened: `Found`, or why it cannot be used.
        stage: Stage,
    },
    Listed {
        metadata: Option<PluginMetadata>,
        stage: Stage,
        reason: String,
    },
}

fn options_of(options: &Options, metadata: &PluginMetadata) -> Vec<(String, String)> {
    options.get(&metadata.name.to_ascii_lowercase()).cloned().unwrap_or_default()
}

impl Item {
    /// What discovery found.
    pub fn found(found: Found, options: &Options) -> Self {
        let Found { path, manifest_path, origin, what, file } = found;
        let slot = |metadata: PluginMetadata, how: How| {
            let options = options_of(options, &metadata);
            Arc::new(Slot::new(Arc::new(metadata), Source::File(path.clone()), how, options))
        };
        let broken = |manifest: &Manifest, reason: String, stage: Stage| {
            tracing::warn!(plugin = manifest.name, path = %path.display(), reason, "a plugin cannot be used");
            let backends = manifest.backends.iter().cloned().map(Arc::new).collect();
            let failure = Failure { reason: format!("{}: {reason}", path.display()), detail: None };
            Content::Plugin { slot: slot(manifest.metadata(), How::Broken(backends, failure)), stage }
        };
        let mut sha256 = None;
        let content = match what {
            What::Plugin(manifest) => {
                sha256 = Some(manifest.sha256.clone());
                match check_generation(&path, &manifest.metadata()) {
                    Ok(()) => Content::Plugin {
                        slot: slot(manifest.metadata(), How::Manifest(path.clone(), manifest)),
                        stage: Stage::Found,
                    },
                    Err(error) => broken(&manifest, error.reason(), Stage::Invalid),
                }
            }
            What::Broken { manifest, reason, foreign } => {
                broken(&manifest, reason, if foreign { Stage::Skipped } else { Stage::Invalid })
            }
            What::Bare(metadata) => match check_generation(&path, &metadata) {
                Ok(()) => Content::Plugin { slot: slot(metadata, How::Bare(path.clone())), stage: Stage::Found },
                Err(error) => {
                    Content::Listed { metadata: Some(metadata), stage: Stage::Invalid, reason: error.reason() }
                }
            },
            What::Skipped(reason) => Content::Listed { metadata: None, stage: Stage::Skipped, reason },
            What::Invalid(reason) => {
                tracing::warn!(path = %path.display(), reason, "not a usable plugin");
                Content::Listed { metadata: None, stage: Stage::Invalid, reason }
            }
        };
        Self { source: Source::File(path), manifest: manifest_path, origin, file, sha256, content }
    }

    /// A plugin of this program.
    pub fn linked(plugin: &LinkedPlugin, options: &Options) -> Self {
        let content = match loader::link(plugin) {
            Ok(open) => {
                let metadata = Arc::clone(open.metadata());
                let options = options_of(options, &metadata);
                let slot = Slot::new(metadata, Source::Linked, How::Linked(Arc::new(open)), options);
                Content::Plugin { slot: Arc::new(slot), stage: Stage::Found }
            }
            Err(error) => {
                tracing::warn!(%error, "a linked-in plugin cannot be used");
                let metadata = serde_json::from_str(plugin.metadata).ok();
                Content::Listed { metadata, stage: Stage::Invalid, reason: error.reason() }
            }
        };
        Self { source: Source::Linked, manifest: None, origin: Origin::Default, file: None, sha256: None, content }
    }

    /// Descriptors without kernels: those of one plugin and source, of which there is at least one.
    pub fn catalogue(first: &Candidate, candidates: Vec<Candidate>) -> Self {
        let (metadata, source) = (Arc::clone(&first.plugin), first.source.clone());
        let slot = Slot::new(metadata, source.clone(), How::Catalogue(candidates), Vec::new());
        let content = Content::Plugin { slot: Arc::new(slot), stage: Stage::Found };
        Self { source, manifest: None, origin: Origin::Api, file: None, sha256: None, content }
    }

    /// The plugin's name, where it is known.
    pub fn name(&self) -> Option<&str> {
        self.metadata().map(|metadata| metadata.name.as_str())
    }

    fn metadata(&self) -> Option<&PluginMetadata> {
        match &self.content {
            Content::Plugin { slot, .. } => Some(&slot.metadata),
            Content::Listed { metadata, .. } => metadata.as_ref(),
        }
    }

    /// The plugin, unless it is for another machine: a broken one keeps its place, so that another
    /// never takes it in silence.
    fn placed(&self) -> Option<(&Arc<Slot>, Stage)> {
        match &self.content {
            Content::Plugin { slot, stage } if *stage != Stage::Skipped => Some((slot, *stage)),
            _ => None,
        }
    }
}

/// Where an item stands among the others.
#[derive(Clone, Debug)]
pub(super) enum Standing {
    /// It takes part, or is listed with its own reason.
    Own,
    /// Another comes first.
    Shadowed(String),
    /// The operator refuses it.
    Policy(String),
}

/// Where each item stands: the first of a name and version wins, and each file counts once.
pub(super) fn standings(items: &[Item], policy: &Policy) -> Vec<Standing> {
    let mut names: HashMap<(String, semver::Version), &Item> = HashMap::new();
    let mut files: HashMap<FileId, &Item> = HashMap::new();
    let mut contents: HashMap<&str, &Item> = HashMap::new();
    let mut standings = Vec::with_capacity(items.len());
    for item in items {
        let Some((slot, stage)) = item.placed() else {
            standings.push(Standing::Own);
            continue;
        };
        let metadata = &slot.metadata;
        let catalogue = matches!(slot.how, How::Catalogue(_));
        let key = (metadata.name.to_ascii_lowercase(), metadata.version.clone());
        let same_file = item.file.as_ref().and_then(|file| files.get(file));
        let same_content = item.sha256.as_deref().and_then(|sha256| contents.get(sha256));
        let first = |what: &str, first: &Item| {
            Standing::Shadowed(format!("{what} {} ({}), which comes first", first.source, first.origin))
        };
        let standing = if let Some(other) = same_file {
            first("the same file as", other)
        } else if let Some(other) = same_content {
            first("a copy of", other)
        } else if let Some(other) = names.get(&key).filter(|_| !catalogue) {
            first(&format!("the same name and version as '{}' {} from", metadata.name, metadata.version), other)
        } else if let Some(reason) = refused_by_policy(policy, slot).filter(|_| stage == Stage::Found) {
            Standing::Policy(reason)
        } else {
            Standing::Own
        };
        if !matches!(standing, Standing::Shadowed(_)) {
            if !catalogue {
                names.entry(key).or_insert(item);
            }
            item.file.map(|file| files.entry(file).or_insert(item));
            item.sha256.as_deref().map(|sha256| contents.entry(sha256).or_insert(item));
        }
        standings.push(standing);
    }
    standings
}

/// Why the operator refuses the whole plugin, whatever the request.
fn refused_by_policy(policy: &Policy, slot: &Slot) -> Option<String> {
    let plugin = slot.metadata.name.to_ascii_uppercase();
    let refusal = |name: &str| {
        if let Some(denied) = policy.deny.iter().find(|denied| denied.name == name) {
            return Some(format!("denied by the operator: {denied}"));
        }
        let wanted = policy.versions.get(name)?;
        (!wanted.value.matches(&slot.metadata.version)).then(|| {
            format!(
                "version {} is not {} as the operator requires ({})",
                slot.metadata.version, wanted.value, wanted.origin
            )
        })
    };
    refusal(&plugin).or_else(|| {
        if matches!(slot.how, How::Bare(_)) {
            return None;
        }
        let reasons: Vec<_> = slot.descriptors().iter().map(|backend| refusal(&backend.name)).collect();
        // One backend that is not refused keeps the plugin.
        reasons.into_iter().collect::<Option<Vec<_>>>()?.into_iter().next()
    })
}

/// The backend that a candidate is.
#[derive(Clone)]
pub(super) struct Owner {
    pub slot: Arc<Slot>,
    pub index: usize,
}

impl Owner {
    /// Whether two are one.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.slot, &other.slot) && self.index == other.index
    }

    fn failure(&self) -> Option<&Failure> {
        self.slot.failure().or_else(|| self.slot.backend_failure(self.index))
    }

    /// Whether its failure is among the reasons.
    pub fn failure_is_in(&self, reasons: &[Reason]) -> bool {
        self.failure().is_none_or(|failure| reasons.iter().any(|reason| *reason == failure.reason))
    }
}

/// What the selector chooses from, in order of precedence. Of two plugins with a backend of one name
/// the first keeps it; the other's is refused and says so.
pub(super) fn candidates(items: &[Item], standings: &[Standing]) -> (Vec<Candidate>, Vec<Owner>) {
    let mut owners: HashMap<&str, &Slot> = HashMap::new();
    let (mut candidates, mut backends) = (Vec::new(), Vec::new());
    for (item, standing) in items.iter().zip(standings) {
        let Content::Plugin { slot, .. } = &item.content else { continue };
        if matches!(standing, Standing::Shadowed(_)) {
            continue;
        }
        let option_problem = slot.option_problem();
        for (index, descriptor) in slot.descriptors().iter().enumerate() {
            for format in &descriptor.registers_kv_cache_dtypes {
                KvCacheDtype::register(format);
            }
            let mut unavailable = slot.stated_reasons(index);
            unavailable.extend(option_problem.iter().cloned().map(Into::into));
            let this = Owner { slot: Arc::clone(slot), index };
            if let Some(failure) = this.failure() {
                unavailable.push(failure.reason.clone().into());
            }
            let owner = match (item.placed(), standing) {
                (Some(_), Standing::Own) => *owners.entry(&descriptor.name).or_insert(slot),
                // What the operator refuses, or is for another machine, keeps no name from others.
                _ => slot,
            };
            if !owner.metadata.name.eq_ignore_ascii_case(&slot.metadata.name) {
                let reason = format!(
                    "the name {} belongs to plugin '{}' from {}, which comes first",
                    descriptor.name, owner.metadata.name, owner.source
                );
                unavailable.push(reason.into());
            }
            candidates.push(Candidate {
                descriptor: Arc::clone(descriptor),
                plugin: Arc::clone(&slot.metadata),
                source: slot.source.clone(),
                unavailable,
            });
            backends.push(this);
        }
    }
    (candidates, backends)
}

/// Libraries without a manifest that must be opened to know their backends. Only those that
/// somebody named and that nothing speaks against.
pub(super) fn to_be_opened<'a>(items: &'a [Item], standings: &'a [Standing]) -> impl Iterator<Item = &'a Arc<Slot>> {
    items
        .iter()
        .zip(standings)
        .filter(|(_, standing)| matches!(standing, Standing::Own))
        .filter_map(|(item, _)| item.placed())
        .map(|(slot, _)| slot)
        .filter(|slot| matches!(slot.how, How::Bare(_)))
}

/// The report's entry of an item.
pub(super) fn entry(item: &Item, standing: &Standing) -> Entry {
    let (stage, reason, detail) = match (&item.content, standing) {
        (Content::Listed { stage, reason, .. }, _) => (*stage, Some(reason.clone()), None),
        (_, Standing::Shadowed(reason)) => (Stage::Shadowed, Some(reason.clone()), None),
        (_, Standing::Policy(reason)) => (Stage::Policy, Some(reason.clone()), None),
        (Content::Plugin { slot, stage }, Standing::Own) => progress(slot, *stage),
    };
    let metadata = item.metadata();
    Entry {
        name: metadata.map(|metadata| metadata.name.clone()),
        version: metadata.map(|metadata| metadata.version.clone()),
        vendor: metadata.map(|metadata| metadata.vendor.clone()),
        backends: match &item.content {
            Content::Plugin { slot, .. } => slot.descriptors().iter().map(|backend| backend.name.clone()).collect(),
            Content::Listed { .. } => Vec::new(),
        },
        source: item.source.clone(),
        manifest: item.manifest.clone(),
        origin: item.origin.clone(),
        stage,
        reason,
        detail,
    }
}

/// How far a plugin that takes part came.
fn progress(slot: &Slot, stage: Stage) -> (Stage, Option<String>, Option<String>) {
    if let Some(failure) = slot.failure() {
        let stage = if stage == Stage::Found { Stage::Failed } else { stage };
        return (stage, Some(failure.reason.clone()), failure.detail.clone());
    }
    let backends = slot.descriptors();
    let failures: Vec<String> = backends
        .iter()
        .enumerate()
        .filter_map(|(index, backend)| Some(format!("{}: {}", backend.name, slot.backend_failure(index)?.reason)))
        .collect();
    let stage = match () {
        () if (0..backends.len()).any(|index| slot.is_made(index)) => Stage::Ready,
        () if !failures.is_empty() => Stage::Failed,
        () if slot.is_open() => Stage::Opened,
        () => Stage::Found,
    };
    let remark = matches!(slot.how, How::Bare(_))
        .then(|| "it has no manifest: it was opened to learn what its backends are".to_owned());
    let reasons: Vec<String> = failures.into_iter().chain(slot.option_problem()).chain(remark).collect();
    (stage, (!reasons.is_empty()).then(|| reasons.join("; ")), None)
}
