//! What a registry is made of.

use super::{Registry, item, item::Item};
use crate::{
    device::Device,
    discovery::{self, Place},
    loader::LoadOptions,
    plugin::linked_plugins,
    policy::{Origin, Policy},
    selector::Candidate,
};
use std::path::Path;

/// Makes a [`Registry`]; [`Config::registry`](crate::config::Config::registry) starts one from what the
/// operator configures. Files that are named themselves come first, then linked-in plugins, then
/// directories in the order in which they are named, then the catalogue.
#[must_use]
pub struct RegistryBuilder {
    linked: bool,
    files: Vec<Place>,
    directories: Vec<Place>,
    catalogue: Vec<Candidate>,
    device: Option<Device>,
    policy: Policy,
    options: item::Options,
    load: LoadOptions,
}

impl Default for RegistryBuilder {
    fn default() -> Self {
        Self {
            linked: true,
            files: Vec::new(),
            directories: Vec::new(),
            catalogue: Vec::new(),
            device: None,
            policy: Policy::default(),
            options: item::Options::new(),
            load: LoadOptions::default(),
        }
    }
}

impl RegistryBuilder {
    /// Whether the plugins of this program take part; they do unless this says otherwise.
    pub fn linked(mut self, linked: bool) -> Self {
        self.linked = linked;
        self
    }

    /// Adds a manifest or a library.
    pub fn file(mut self, path: impl AsRef<Path>, origin: Origin) -> Self {
        self.files.push(Place::file(path.as_ref(), origin));
        self
    }

    /// Adds a directory of manifests.
    pub fn directory(mut self, path: impl AsRef<Path>, origin: Origin) -> Self {
        self.directories.push(Place::directory(path.as_ref(), origin));
        self
    }

    /// Adds the usual directories: the user's, the system's, and the executable's `plugins`.
    pub fn default_directories(mut self) -> Self {
        self.directories.extend(discovery::default_directories());
        self
    }

    /// Adds descriptors without kernels: they can be selected and planned with, never run.
    pub fn catalogue(mut self, candidates: Vec<Candidate>) -> Self {
        self.catalogue.extend(candidates);
        self
    }

    /// Sets the device to select for; this machine's processor unless this says otherwise.
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Sets what the operator wants.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Sets options of a plugin; the case of its name does not count.
    pub fn plugin_options(mut self, name: &str, options: Vec<(String, String)>) -> Self {
        self.options.entry(name.to_ascii_lowercase()).or_default().extend(options);
        self
    }

    /// Sets what may be opened.
    pub fn load_options(mut self, load: LoadOptions) -> Self {
        self.load = load;
        self
    }

    /// Looks at every place. A plugin that cannot be used is in the report, and no error.
    #[must_use]
    pub fn build(self) -> Registry {
        let mut items = Vec::new();
        let mut searched = Vec::new();
        let mut discover = |places: &[Place], items: &mut Vec<Item>| {
            let discovery = discovery::discover(places);
            items.extend(discovery.found.into_iter().map(|found| Item::found(found, &self.options)));
            searched.extend(discovery.searched);
        };
        discover(&self.files, &mut items);
        if self.linked {
            items.extend(linked_items(&self.options));
        }
        discover(&self.directories, &mut items);
        items.extend(catalogue_items(self.catalogue));
        let is_there = |name: &str| items.iter().filter_map(Item::name).any(|item| item.eq_ignore_ascii_case(name));
        for name in self.options.keys().filter(|name| !is_there(name)) {
            tracing::warn!(plugin = name, "options are set for a plugin that was not found");
        }
        Registry::new(
            items,
            searched,
            self.options,
            self.load,
            self.policy,
            self.device.unwrap_or_else(Device::host_cpu),
        )
    }
}

/// `inventory` gives plugins in an order of the linker's; here they are sorted by what they say.
fn linked_items(options: &item::Options) -> Vec<Item> {
    let mut plugins: Vec<_> = linked_plugins().collect();
    plugins.sort_by_key(|plugin| plugin.metadata);
    plugins.into_iter().map(|plugin| Item::linked(plugin, options)).collect()
}

/// One item for each plugin and source, in the order in which they are first named.
fn catalogue_items(candidates: Vec<Candidate>) -> Vec<Item> {
    let mut groups: Vec<Vec<Candidate>> = Vec::new();
    for candidate in candidates {
        let same = |group: &&mut Vec<Candidate>| {
            group.first().is_some_and(|first| first.plugin == candidate.plugin && first.source == candidate.source)
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.push(candidate),
            None => groups.push(vec![candidate]),
        }
    }
    groups.into_iter().filter_map(|group| Some(Item::catalogue(&group.first()?.clone(), group))).collect()
}
