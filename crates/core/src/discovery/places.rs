//! The places that are searched, in their order.

use super::linux;
use crate::policy::Origin;
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// A place to look at.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// A manifest or a library.
    File {
        /// Where.
        path: PathBuf,
        /// Who named it.
        origin: Origin,
    },
    /// A directory of manifests.
    Directory {
        /// Where.
        path: PathBuf,
        /// Who named it.
        origin: Origin,
    },
}

impl Place {
    /// A file by its absolute path.
    #[must_use]
    pub fn file(path: &Path, origin: Origin) -> Self {
        Self::File { path: absolute(path), origin }
    }

    /// A directory by its absolute path.
    #[must_use]
    pub fn directory(path: &Path, origin: Origin) -> Self {
        Self::Directory { path: absolute(path), origin }
    }

    pub(super) fn parts(&self) -> (&Path, &Origin) {
        match self {
            Self::File { path, origin } | Self::Directory { path, origin } => (path, origin),
        }
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The usual directories: the user's (unless the process has more rights than its user has), the
/// system's, and `plugins` beside the executable. The same from any working directory.
#[must_use]
pub fn default_directories() -> Vec<Place> {
    let user = if linux::is_elevated() { None } else { user_directory(|name| std::env::var_os(name)) };
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("plugins")));
    user.into_iter()
        .chain(linux::SYSTEM_DIRECTORIES.map(PathBuf::from))
        .chain(beside)
        .map(|path| Place::Directory { path, origin: Origin::Default })
        .collect()
}

fn user_directory(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = absolute("XDG_DATA_HOME").or_else(|| Some(absolute("HOME")?.join(".local/share")))?;
    Some(data.join("attache/plugins"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_s_directory_follows_the_xdg_rules() {
        let with = |xdg: Option<&str>, home: Option<&str>| {
            let (xdg, home) = (xdg.map(OsString::from), home.map(OsString::from));
            user_directory(move |name| if name == "HOME" { home.clone() } else { xdg.clone() })
        };
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(with(Some("/x"), Some("/h")), path("/x/attache/plugins"));
        assert_eq!(with(Some("relative"), Some("/h")), path("/h/.local/share/attache/plugins"));
        assert_eq!(with(None, None), None);
    }

    #[test]
    fn the_usual_directories_do_not_depend_on_the_working_directory() {
        let places = default_directories();
        assert!(places.iter().all(|place| place.parts().0.is_absolute()), "{places:?}");
        assert!(places.iter().any(|place| place.parts().0 == Path::new("/usr/lib/attache/plugins")));
    }
}
