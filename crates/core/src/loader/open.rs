//! Opening a library. The only `unsafe` of the loader.

use super::{
    LoadOptions,
    error::LoadError,
    file::LibraryFile,
    linux::{self, FileId},
};
use crate::{
    abi::{ABI_GENERATION_MAX, ABI_GENERATION_MIN, BackendInterfaceV1, InterfaceGetter, PluginRootRef},
    descriptor::BackendDescriptor,
    manifest::{Manifest, check_descriptors, check_metadata},
    plugin::{LinkedPlugin, PluginMetadata},
    runtime::{self, interface::backend_interface},
};
use abi_stable::library::{AbiHeaderRef, LibraryError, ROOT_MODULE_LOADER_NAME, ROOT_MODULE_LOADER_NAME_WITH_NUL};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// A plugin whose function table was checked; it stays loaded for the life of the process.
pub struct OpenPlugin {
    metadata: Arc<PluginMetadata>,
    interface: InterfaceGetter,
    table: &'static BackendInterfaceV1,
    descriptors: Vec<Arc<BackendDescriptor>>,
    sha256: String,
}

impl OpenPlugin {
    /// Hands out its interfaces, of which [`OpenPlugin::table`] is one.
    #[must_use]
    pub fn interface(&self) -> InterfaceGetter {
        self.interface
    }

    /// What it says of itself.
    #[must_use]
    pub fn metadata(&self) -> &Arc<PluginMetadata> {
        &self.metadata
    }

    /// Its function table.
    #[must_use]
    pub fn table(&self) -> &'static BackendInterfaceV1 {
        self.table
    }

    /// Its backends, in its own order.
    #[must_use]
    pub fn descriptors(&self) -> &[Arc<BackendDescriptor>] {
        &self.descriptors
    }

    /// SHA-256 of its file in hexadecimal digits; empty for a plugin that is linked in.
    #[must_use]
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
}

impl std::fmt::Debug for OpenPlugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenPlugin").field("metadata", &self.metadata).finish_non_exhaustive()
    }
}

/// A library that `dlopen` accepted, with what came of it. Its mapping keeps the file's identity
/// taken, so that no other file can get it.
struct Opened {
    file: FileId,
    sha256: String,
    outcome: Result<Arc<OpenPlugin>, LoadError>,
}

/// Held while a library is opened: of several threads that want one library, one opens it.
static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

/// Opens the library at `path`, or gives the plugin that was opened from the same file, or from one
/// of the same content, before. With a manifest, the library must be the one that it describes.
///
/// # Errors
/// When a check fails, before or after opening. A library that was opened and then refused is
/// refused for the life of the process.
pub fn open(path: &Path, manifest: Option<&Manifest>, options: &LoadOptions) -> Result<Arc<OpenPlugin>, LoadError> {
    let span = tracing::info_span!("load", path = %path.display());
    let _entered = span.enter();
    let plugin = open_checked(path, manifest, options)?;
    tracing::info!(
        plugin = plugin.metadata.name,
        version = %plugin.metadata.version,
        backends = plugin.descriptors.len(),
        "opened"
    );
    Ok(plugin)
}

fn open_checked(path: &Path, manifest: Option<&Manifest>, options: &LoadOptions) -> Result<Arc<OpenPlugin>, LoadError> {
    let unreadable = |error: std::io::Error| LoadError::Unreadable { path: path.to_owned(), reason: error.to_string() };
    let real = std::fs::canonicalize(path).map_err(unreadable)?;
    if !options.allow_writable_by_others {
        linux::check_not_writable_by_others(&real)?;
    }
    let file = LibraryFile::open(path, &real)?;
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = match opened.iter().position(|known| known.file == file.id()) {
        Some(known) => known,
        None => {
            let metadata = file.metadata()?;
            let sha256 = file.sha256()?;
            check_manifest(path, manifest, &metadata, &sha256)?;
            check_generation(path, &metadata)?;
            match opened.iter().position(|known| known.sha256 == sha256) {
                Some(known) => known,
                None => {
                    let library = dlopen(path, &real)?;
                    let outcome = start(path, library, &metadata, &sha256).map(Arc::new);
                    opened.push(Opened { file: file.id(), sha256, outcome });
                    opened.len() - 1
                }
            }
        }
    };
    let known = &opened[known];
    let plugin = known.outcome.clone()?;
    check_manifest(path, manifest, &plugin.metadata, &known.sha256)?;
    if let Some(manifest) = manifest {
        check_backends(path, manifest, &plugin.descriptors)?;
    }
    Ok(plugin)
}

/// Checks a plugin that is linked into the program, as one from a file is checked.
///
/// # Errors
/// When its metadata, interface or descriptors cannot be used.
pub fn link(plugin: &LinkedPlugin) -> Result<OpenPlugin, LoadError> {
    let path = || PathBuf::from("linked in");
    let metadata: PluginMetadata = serde_json::from_str(plugin.metadata).map_err(|error| LoadError::Metadata {
        path: path(),
        reason: format!("its metadata cannot be read: {error}"),
    })?;
    check_generation(&path(), &metadata)?;
    plugin_of(&path(), metadata, plugin.interface, String::new())
}

fn check_manifest(
    path: &Path,
    manifest: Option<&Manifest>,
    metadata: &PluginMetadata,
    sha256: &str,
) -> Result<(), LoadError> {
    let Some(manifest) = manifest else { return Ok(()) };
    same_identity(path, ("the manifest", &manifest.metadata()), ("the library", metadata))?;
    if manifest.sha256 != sha256 {
        return Err(LoadError::Sha256 {
            path: path.to_owned(),
            expected: manifest.sha256.clone(),
            found: sha256.to_owned(),
        });
    }
    Ok(())
}

fn same_identity(
    path: &Path,
    (first, left): (&'static str, &PluginMetadata),
    (second, right): (&'static str, &PluginMetadata),
) -> Result<(), LoadError> {
    if left == right {
        return Ok(());
    }
    Err(LoadError::Identity {
        path: path.to_owned(),
        first,
        left: Box::new(left.clone()),
        second,
        right: Box::new(right.clone()),
    })
}

/// Versions are compared before anything of the library runs.
pub(crate) fn check_generation(path: &Path, metadata: &PluginMetadata) -> Result<(), LoadError> {
    check_metadata(metadata).map_err(|reason| LoadError::Metadata { path: path.to_owned(), reason })?;
    let found = (metadata.abi_generation_min, metadata.abi_generation_max);
    if found.0 > ABI_GENERATION_MAX || found.1 < ABI_GENERATION_MIN {
        let expected = (ABI_GENERATION_MIN, ABI_GENERATION_MAX);
        return Err(LoadError::Generation { path: path.to_owned(), found, expected });
    }
    let expected = env!("CARGO_PKG_VERSION_MAJOR").parse().unwrap_or_default();
    if metadata.sdk_version.major == expected {
        return Ok(());
    }
    Err(LoadError::SdkVersion { path: path.to_owned(), found: metadata.sdk_version.clone(), expected })
}

fn check_backends(path: &Path, manifest: &Manifest, found: &[Arc<BackendDescriptor>]) -> Result<(), LoadError> {
    if manifest.backends.iter().eq(found.iter().map(Arc::as_ref)) {
        return Ok(());
    }
    let stated: Vec<&str> = manifest.backends.iter().map(|backend| backend.name.as_str()).collect();
    let names: Vec<&str> = found.iter().map(|backend| backend.name.as_str()).collect();
    let difference = if stated == names {
        let differs = manifest.backends.iter().zip(found).find(|(stated, found)| **stated != ***found);
        let name = differs.map(|(stated, _)| stated.name.as_str()).unwrap_or_default();
        format!("the manifest describes backend {name} otherwise than the library does")
    } else {
        format!("the manifest states the backends {}, the library has {}", stated.join(", "), names.join(", "))
    };
    Err(LoadError::ManifestDiffers { path: path.to_owned(), difference })
}

/// Opens the file with immediate, local binding, for good.
fn dlopen(path: &Path, real: &Path) -> Result<&'static Library, LoadError> {
    tracing::debug!(path = %real.display(), "dlopen");
    // SAFETY: static constructors of the library run here. That cannot be made safe; the file was
    // checked to be complete, for this machine, the one its manifest names, and not writable by
    // others, and nothing opens a library that was not chosen or asked for by name.
    let library = unsafe { Library::open(Some(real), RTLD_NOW | RTLD_LOCAL) };
    match library {
        Ok(library) => Ok(Box::leak(Box::new(library))),
        Err(error) => Err(LoadError::Open { path: path.to_owned(), reason: one_line(&error_text(&error)) }),
    }
}

/// The innermost cause: `libloading` wraps the system's words.
fn error_text(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => error_text(source),
        None => error.to_string(),
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// From an opened library to its checked table.
fn start(
    path: &Path,
    library: &'static Library,
    section: &PluginMetadata,
    sha256: &str,
) -> Result<OpenPlugin, LoadError> {
    // SAFETY: the symbol of this name is, by `abi_stable`'s convention, a `LibHeader`, which starts
    // with an `AbiHeader`; its address is read as a reference to one. The header's magic and version
    // are checked by `upgrade` before anything else of it is used, and the library is never unloaded.
    let header = unsafe { library.get::<AbiHeaderRef>(ROOT_MODULE_LOADER_NAME_WITH_NUL.as_bytes()) };
    let header =
        *header.map_err(|_| LoadError::NoRoot { path: path.to_owned(), symbol: ROOT_MODULE_LOADER_NAME.to_owned() })?;
    let layout = |error: &LibraryError| LoadError::RootLayout { path: path.to_owned(), detail: error.to_string() };
    let header = header.upgrade().map_err(|error| layout(&error))?;
    header.ensure_layout::<PluginRootRef>().map_err(|error| layout(&error))?;
    let root = header.init_root_module::<PluginRootRef>().map_err(|error| match error {
        LibraryError::RootModule { err, .. } => {
            LoadError::Init { path: path.to_owned(), reason: one_line(&err.to_string()) }
        }
        other => layout(&other),
    })?;
    // SAFETY: the root's layout was checked; its metadata is text that lives as long as the library.
    let text = unsafe { root.metadata().to_string_lossy() };
    let stated: PluginMetadata = serde_json::from_str(&text).map_err(|error| LoadError::Metadata {
        path: path.to_owned(),
        reason: format!("the metadata of its root module cannot be read: {error}"),
    })?;
    same_identity(path, ("the metadata section", section), ("the root module", &stated))?;
    let generations = PluginMetadata {
        abi_generation_min: root.generation_min(),
        abi_generation_max: root.generation_max(),
        ..stated.clone()
    };
    same_identity(path, ("the root module's metadata", &stated), ("its range of generations", &generations))?;
    plugin_of(path, stated, root.interface(), sha256.to_owned())
}

fn plugin_of(
    path: &Path,
    metadata: PluginMetadata,
    interface: InterfaceGetter,
    sha256: String,
) -> Result<OpenPlugin, LoadError> {
    let table = backend_interface(interface).map_err(|error| LoadError::Interface { path: path.to_owned(), error })?;
    let refused = |reason: String| LoadError::Descriptors { path: path.to_owned(), reason };
    let descriptors: Vec<_> =
        runtime::descriptors(table).map_err(|error| refused(error.to_string()))?.into_iter().map(Arc::new).collect();
    check_descriptors(descriptors.iter().map(Arc::as_ref)).map_err(refused)?;
    Ok(OpenPlugin { metadata: Arc::new(metadata), interface, table, descriptors, sha256 })
}
