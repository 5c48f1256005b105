//! Which plugins lie where: files and directories in, what was found out. Opens no library.
//!
//! A plugin is found by its manifest. Only places that somebody named, or that are listed in
//! [`default_directories`], are searched: never the current directory nor the library path of the
//! system's loader. The order is that of the places, and of names inside a directory. Nothing that
//! was looked at is dropped in silence.
//!
//! Must not know: policy, requests, how a library is opened.

pub(crate) mod linux;
mod places;

pub use places::{Place, default_directories};

use crate::{
    loader::{header_problem, linux::FileId, read_metadata},
    manifest::{MANIFEST_SUFFIX, Manifest},
    plugin::PluginMetadata,
    policy::Origin,
};
use serde::Serialize;
use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    ffi::{OsStr, OsString},
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

/// One thing that was looked at.
#[derive(Clone, Debug)]
pub struct Found {
    /// The library; for an invalid manifest the manifest, for an unreadable directory the directory.
    pub path: PathBuf,
    /// The manifest, where there is one.
    pub manifest_path: Option<PathBuf>,
    /// Who named the place.
    pub origin: Origin,
    /// What it is.
    pub what: What,
    pub(crate) file: Option<FileId>,
}

/// What was found.
#[derive(Clone, Debug)]
pub enum What {
    /// A manifest beside its library.
    Plugin(Box<Manifest>),
    /// A library without a manifest that was named itself. Its identity is from its metadata
    /// section; what its backends are is known once it is opened.
    Bare(PluginMetadata),
    /// A manifest whose library cannot be used.
    Broken {
        /// What the manifest says.
        manifest: Box<Manifest>,
        /// Why the library cannot be used.
        reason: String,
        /// The library is a good one for another machine.
        foreign: bool,
    },
    /// Not taken, and no error: an unreadable directory, a library without a manifest.
    Skipped(String),
    /// An error: a manifest that cannot be read, a file that is no plugin.
    Invalid(String),
}

/// A place that was searched.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Searched {
    /// The file or directory.
    pub path: PathBuf,
    /// Who named it.
    pub origin: Origin,
    /// Whether it is there.
    pub exists: bool,
}

/// What was found, in order, and where it was searched.
#[derive(Clone, Debug, Default)]
pub struct Discovery {
    /// What was found.
    pub found: Vec<Found>,
    /// Every place.
    pub searched: Vec<Searched>,
}

/// Looks at every place, in order.
#[must_use]
pub fn discover(places: &[Place]) -> Discovery {
    let span = tracing::info_span!("discover", places = places.len());
    let _entered = span.enter();
    let mut discovery = Discovery::default();
    let mut directories: HashMap<FileId, PathBuf> = HashMap::new();
    for place in places {
        let before = discovery.found.len();
        let exists = match place {
            Place::File { path, origin } => {
                discovery.found.push(named_file(path, origin));
                path.exists()
            }
            Place::Directory { path, origin } => search_directory(path, origin, &mut directories, &mut discovery.found),
        };
        let (path, origin) = place.parts();
        let new = discovery.found.len() - before;
        tracing::debug!(path = %path.display(), %origin, exists, found = new, "searched");
        discovery.searched.push(Searched { path: path.to_owned(), origin: origin.clone(), exists });
    }
    discovery
}

fn is_manifest(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.ends_with(MANIFEST_SUFFIX))
}

/// A file that somebody named: a manifest, or a library.
fn named_file(path: &Path, origin: &Origin) -> Found {
    if path.extension().is_some_and(|extension| extension == "toml") {
        return from_manifest(path, origin);
    }
    let found =
        |what| Found { path: path.to_owned(), manifest_path: None, origin: origin.clone(), file: file_id(path), what };
    match std::fs::metadata(path) {
        Err(error) => return found(What::Invalid(format!("cannot read the plugin: {error}"))),
        Ok(metadata) if metadata.is_dir() => {
            return found(What::Invalid(
                "a directory; name a manifest or a library, or search it as a path".to_owned(),
            ));
        }
        Ok(_) => {}
    }
    if let Some(manifest) = manifest_beside(path) {
        return from_manifest(&manifest, origin);
    }
    match read_metadata(path) {
        Ok(metadata) => found(What::Bare(metadata)),
        Err(error) => found(What::Invalid(error.reason())),
    }
}

/// The manifest in the library's directory that names the library, if there is one; it need not be
/// a good one: then its error is what is to be told.
fn manifest_beside(library: &Path) -> Option<PathBuf> {
    let name = library.file_name()?.to_str()?;
    let directory = library.parent()?;
    let names_it = |path: &PathBuf| {
        let table = std::fs::read_to_string(path).ok().and_then(|text| text.parse::<toml::Table>().ok());
        table.is_some_and(|table| table.get("library").and_then(toml::Value::as_str) == Some(name))
    };
    let (names, _) = names(directory).ok()?;
    names.into_iter().filter(|name| is_manifest(name)).map(|name| directory.join(name)).find(names_it)
}

/// The names in a directory, sorted, and how many could not be read.
fn names(directory: &Path) -> std::io::Result<(BTreeSet<OsString>, usize)> {
    let mut failed = 0;
    let names = std::fs::read_dir(directory)?
        .filter_map(|entry| entry.map_err(|_| failed += 1).ok())
        .map(|entry| entry.file_name())
        .collect();
    Ok((names, failed))
}

/// Adds what a directory holds; false = it is not there.
fn search_directory(path: &Path, origin: &Origin, seen: &mut HashMap<FileId, PathBuf>, found: &mut Vec<Found>) -> bool {
    let skipped = |path: &Path, reason: String| Found {
        path: path.to_owned(),
        manifest_path: None,
        origin: origin.clone(),
        file: None,
        what: What::Skipped(reason),
    };
    let named = *origin != Origin::Default;
    match std::fs::metadata(path) {
        Err(error) => {
            let missing = error.kind() == std::io::ErrorKind::NotFound;
            // That one of the usual directories does not exist is the usual case.
            if named || !missing {
                found.push(skipped(path, format!("cannot read the directory: {error}")));
            }
            return !missing;
        }
        Ok(metadata) if !metadata.is_dir() => {
            found.push(skipped(path, "not a directory".to_owned()));
            return true;
        }
        Ok(metadata) => match seen.entry(FileId::of(&metadata)) {
            Entry::Occupied(first) => {
                let reason = format!("the same directory as {}, which was searched before", first.get().display());
                found.push(skipped(path, reason));
                return true;
            }
            Entry::Vacant(place) => drop(place.insert(path.to_owned())),
        },
    }
    let (names, failed) = match names(path) {
        Ok(names) => names,
        Err(error) => {
            found.push(skipped(path, format!("cannot read the directory: {error}")));
            return true;
        }
    };
    if failed > 0 {
        found.push(skipped(path, format!("{failed} entries of the directory cannot be read")));
    }
    let first = found.len();
    found.extend(names.iter().filter(|name| is_manifest(name)).map(|name| from_manifest(&path.join(name), origin)));
    let claimed: BTreeSet<PathBuf> = found[first..].iter().map(|found| found.path.clone()).collect();
    for name in names.iter().filter(|name| Path::new(name).extension().is_some_and(|extension| extension == "so")) {
        let library = path.join(name);
        if !claimed.contains(&library) {
            found.push(skipped(&library, "no manifest here names this library; to use it, name it itself".to_owned()));
        }
    }
    true
}

fn from_manifest(path: &Path, origin: &Origin) -> Found {
    let found = |library: PathBuf, file, what| Found {
        path: library,
        manifest_path: Some(path.to_owned()),
        origin: origin.clone(),
        file,
        what,
    };
    match Manifest::read(path) {
        // The whole cause; the path is shown beside it.
        Err(error) => found(path.to_owned(), None, What::Invalid(without_path(&error.to_string(), path))),
        Ok(manifest) => {
            let library = manifest.library_path(path);
            let manifest = Box::new(manifest);
            match look_at(&library) {
                Ok(file) => found(library, Some(file), What::Plugin(manifest)),
                Err((reason, foreign)) => {
                    let file = file_id(&library);
                    found(library, file, What::Broken { manifest, reason, foreign })
                }
            }
        }
    }
}

/// What the first bytes of a library say.
fn look_at(library: &Path) -> Result<FileId, (String, bool)> {
    let unreadable = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => ("the manifest's library is missing".to_owned(), false),
        _ => (format!("cannot read the library: {error}"), false),
    };
    let metadata = std::fs::metadata(library).map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(("the library is not a regular file".to_owned(), false));
    }
    let mut start = Vec::with_capacity(crate::loader::HEADER_BYTES);
    File::open(library)
        .and_then(|file| file.take(crate::loader::HEADER_BYTES as u64).read_to_end(&mut start))
        .map_err(unreadable)?;
    match header_problem(&start) {
        None => Ok(FileId::of(&metadata)),
        Some(problem) => Err((problem.to_string(), problem.is_foreign())),
    }
}

fn file_id(path: &Path) -> Option<FileId> {
    std::fs::metadata(path).ok().map(|metadata| FileId::of(&metadata))
}

fn without_path(text: &str, path: &Path) -> String {
    text.strip_prefix(&format!("{}: ", path.display())).unwrap_or(text).to_owned()
}
