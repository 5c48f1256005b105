//! One plugin: opened when it is first needed, its backends made when they are first needed, each
//! once, whoever asks. What failed stays failed and says why.

use super::options;
use crate::{
    descriptor::BackendDescriptor,
    device::{Device, Platform},
    loader::{self, LoadError, LoadOptions, OpenPlugin},
    manifest::Manifest,
    plugin::PluginMetadata,
    runtime::Backend,
    selector::{Candidate, Source},
    verdict::Reason,
};
use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

/// How a plugin comes to its function table.
pub(super) enum How {
    /// It is linked in, and checked.
    Linked(Arc<OpenPlugin>),
    /// From a library with a manifest.
    Manifest(PathBuf, Box<Manifest>),
    /// From a library without a manifest.
    Bare(PathBuf),
    /// Not at all: descriptors without kernels.
    Catalogue(Vec<Candidate>),
    /// Not at all: what it says of itself is known, and why it cannot be used.
    Broken(Vec<Arc<BackendDescriptor>>, Failure),
}

/// Why a backend of a catalogue cannot run.
pub(super) const NO_KERNELS: &str = "from a catalogue: it has no kernels in this program";

/// Why a plugin or one of its backends cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    /// One line.
    pub reason: String,
    /// The long words of a layout check.
    pub detail: Option<String>,
}

impl From<&LoadError> for Failure {
    fn from(error: &LoadError) -> Self {
        Self { reason: error.to_string(), detail: error.detail().map(str::to_owned) }
    }
}

/// A backend that was made, and the devices that it found.
pub(super) struct Made {
    pub backend: Arc<Backend>,
    devices: Vec<Device>,
}

impl Made {
    /// Why the backend cannot be used on a platform.
    pub fn no_device(&self, platform: &Platform) -> Option<String> {
        if self.devices.iter().any(|device| device.platform == *platform) {
            return None;
        }
        let found: Vec<String> = self.devices.iter().map(ToString::to_string).collect();
        let found = if found.is_empty() { "none".to_owned() } else { found.join(", ") };
        Some(format!("its probe finds no {platform} device (found: {found})"))
    }
}

type MadeOnce = OnceLock<Result<Made, Failure>>;

/// One plugin.
pub(super) struct Slot {
    pub metadata: Arc<PluginMetadata>,
    pub source: Source,
    pub how: How,
    /// From the manifest; a library's own are in `opened`.
    stated: Vec<Arc<BackendDescriptor>>,
    options: Vec<(String, String)>,
    opened: OnceLock<Result<Arc<OpenPlugin>, Failure>>,
    made: OnceLock<Box<[MadeOnce]>>,
}

impl Slot {
    pub fn new(metadata: Arc<PluginMetadata>, source: Source, how: How, options: Vec<(String, String)>) -> Self {
        let stated = match &how {
            How::Linked(plugin) => plugin.descriptors().to_vec(),
            How::Manifest(_, manifest) => manifest.backends.iter().cloned().map(Arc::new).collect(),
            How::Catalogue(candidates) => candidates.iter().map(|known| Arc::clone(&known.descriptor)).collect(),
            How::Broken(descriptors, _) => descriptors.clone(),
            How::Bare(_) => Vec::new(),
        };
        let opened = match &how {
            How::Linked(plugin) => OnceLock::from(Ok(Arc::clone(plugin))),
            How::Broken(_, failure) => OnceLock::from(Err(failure.clone())),
            _ => OnceLock::new(),
        };
        Self { metadata, source, how, stated, options, opened, made: OnceLock::new() }
    }

    /// What is known of its backends without opening it.
    pub fn descriptors(&self) -> &[Arc<BackendDescriptor>] {
        match self.opened.get() {
            Some(Ok(plugin)) if self.stated.is_empty() => plugin.descriptors(),
            _ => &self.stated,
        }
    }

    /// What a catalogue says against one of its backends.
    pub fn stated_reasons(&self, index: usize) -> Vec<Reason> {
        match &self.how {
            How::Catalogue(candidates) => candidates[index].unavailable.clone(),
            _ => Vec::new(),
        }
    }

    /// Opens the plugin, the first time.
    pub fn open(&self, load: &LoadOptions) -> Result<&Arc<OpenPlugin>, &Failure> {
        let opened = self.opened.get_or_init(|| {
            let opened = match &self.how {
                How::Linked(plugin) => return Ok(Arc::clone(plugin)),
                How::Broken(_, failure) => return Err(failure.clone()),
                How::Manifest(path, manifest) => loader::open(path, Some(manifest), load),
                How::Bare(path) => loader::open(path, None, load),
                How::Catalogue(_) => return Err(Failure { reason: NO_KERNELS.to_owned(), detail: None }),
            };
            opened.map_err(|error| {
                tracing::warn!(plugin = %self.metadata.name, %error, "a plugin cannot be used");
                Failure::from(&error)
            })
        });
        opened.as_ref()
    }

    /// Makes and probes a backend, the first time.
    pub fn make(&self, index: usize, load: &LoadOptions) -> Result<&Made, Failure> {
        let plugin = self.open(load).map_err(Clone::clone)?;
        let made = self.made.get_or_init(|| plugin.descriptors().iter().map(|_| OnceLock::new()).collect());
        let Some(made) = made.get(index) else {
            return Err(Failure { reason: format!("the plugin has no backend {index}"), detail: None });
        };
        let made = made.get_or_init(|| {
            self.make_now(plugin, index).map_err(|reason| {
                let backend = plugin.descriptors().get(index).map(|descriptor| descriptor.name.as_str());
                tracing::warn!(plugin = %self.metadata.name, backend, reason, "a backend cannot be used");
                Failure { reason, detail: None }
            })
        });
        made.as_ref().map_err(Clone::clone)
    }

    fn make_now(&self, plugin: &OpenPlugin, index: usize) -> Result<Made, String> {
        let descriptor = Arc::clone(&plugin.descriptors()[index]);
        let mine = |name: &String| descriptor.options.contains_key(name);
        let options: Vec<_> = self.options.iter().filter(|(name, _)| mine(name)).cloned().collect();
        let backend = Backend::create(
            plugin.table(),
            index,
            Arc::clone(&descriptor),
            PluginMetadata::clone(plugin.metadata()),
            self.source.to_string(),
            &options,
        )
        .map_err(|error| format!("it cannot be created: {error}"))?;
        let devices = backend.probe().map_err(|error| format!("its probe failed: {error}"))?;
        tracing::debug!(backend = %descriptor.name, devices = devices.len(), "probed");
        Ok(Made { backend, devices })
    }

    /// Why what the operator set for the plugin cannot be used.
    pub fn option_problem(&self) -> Option<String> {
        options::problem(&self.options, self.descriptors())
    }

    /// Whether it is open.
    pub fn is_open(&self) -> bool {
        matches!(self.opened.get(), Some(Ok(_)))
    }

    /// Why the whole plugin cannot be used, as far as it was tried.
    pub fn failure(&self) -> Option<&Failure> {
        self.opened.get().and_then(|opened| opened.as_ref().err())
    }

    /// Why one backend cannot be used, as far as it was tried.
    pub fn backend_failure(&self, index: usize) -> Option<&Failure> {
        self.made.get()?.get(index)?.get()?.as_ref().err()
    }

    /// Whether one backend was made.
    pub fn is_made(&self, index: usize) -> bool {
        self.made.get().and_then(|made| made.get(index)?.get()).is_some_and(Result::is_ok)
    }
}
