//! What is found where, in which order, and that nothing is dropped in silence.

mod common;

use attache_core::{
    discovery::{Discovery, Place, What, discover},
    policy::Origin,
};
use common::{Plugins, header, manifest};
use std::{os::unix::fs::PermissionsExt, path::Path};

type TestResult = Result<(), Box<dyn std::error::Error>>;

fn search(directories: &[&Path]) -> Discovery {
    let places: Vec<_> = directories.iter().map(|path| Place::directory(path, Origin::Api)).collect();
    discover(&places)
}

/// File name and what it is, as text.
fn listing(discovery: &Discovery) -> Vec<(String, String)> {
    let what = |what: &What| match what {
        What::Plugin(manifest) => format!("plugin {} {}", manifest.name, manifest.version),
        What::Bare(metadata) => format!("bare {}", metadata.name),
        What::Broken { reason, foreign, .. } => format!("broken({foreign}): {reason}"),
        What::Skipped(reason) => format!("skipped: {reason}"),
        What::Invalid(reason) => format!("invalid: {reason}"),
    };
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    discovery.found.iter().map(|found| (name(&found.path), what(&found.what))).collect()
}

#[test]
fn directories_in_order_names_sorted_and_everything_is_listed() -> TestResult {
    let (one, two) = (Plugins::new(), Plugins::new());
    two.add(&manifest("a", "1.0.0", "A"));
    one.add(&manifest("z", "1.0.0", "Z"));
    one.add(&manifest("b", "2.0.0", "B"));
    one.add_manifest(&manifest("gone", "1.0.0", "GONE"));
    one.write("libtext-1.0.0.so", "#!/bin/sh");
    one.add_manifest(&manifest("text", "1.0.0", "TEXT"));
    let mut foreign = header();
    foreign[18..20].copy_from_slice(&99_u16.to_ne_bytes());
    one.write("libforeign-1.0.0.so", foreign);
    one.add_manifest(&manifest("foreign", "1.0.0", "FOREIGN"));
    one.write("lonely.so", header());
    one.write("broken.attache.toml", "name = \"x\"\nvendor = 7\n");
    one.write("notes.txt", "nothing");
    let listing = listing(&search(&[one.path(), two.path()]));
    let starts: Vec<(&str, &str)> =
        listing.iter().map(|(name, what)| (name.as_str(), what.split(';').next().unwrap_or_default())).collect();
    let mine = format!("({})", std::env::consts::ARCH);
    let broken = &listing[1].1;
    assert!(broken.starts_with("invalid: line 2, column 10: invalid type: integer `7`, expected a string"), "{broken}");
    assert!(listing[2].1.ends_with(&mine), "{listing:?}");
    assert_eq!(
        starts,
        [
            ("libb-2.0.0.so", "plugin b 2.0.0"),
            ("broken.attache.toml", starts[1].1),
            ("libforeign-1.0.0.so", "broken(true): a library for another machine: ELF machine 99"),
            ("libgone-1.0.0.so", "broken(false): the manifest's library is missing"),
            ("libtext-1.0.0.so", "broken(false): not a library: it starts with '#!/b', not with an ELF header"),
            ("libz-1.0.0.so", "plugin z 1.0.0"),
            ("lonely.so", "skipped: no manifest here names this library"),
            ("liba-1.0.0.so", "plugin a 1.0.0"),
        ]
    );
    Ok(())
}

#[test]
fn a_directory_that_cannot_be_read_or_comes_twice_is_listed_and_the_others_go_on() -> TestResult {
    let good = Plugins::new();
    good.add(&manifest("a", "1.0.0", "A"));
    let link = good.path().join("link");
    std::os::unix::fs::symlink(good.path(), &link)?;
    let missing = good.path().join("missing");
    let file = good.write("file", "");
    let discovery = search(&[&missing, &file, good.path(), good.path(), &link]);
    let listing = listing(&discovery);
    assert_eq!(listing.len(), 5, "{listing:?}");
    assert!(listing[0].1.starts_with("skipped: cannot read the directory: No such file"), "{listing:?}");
    assert_eq!(listing[1].1, "skipped: not a directory");
    assert_eq!(listing[2].1, "plugin a 1.0.0");
    assert!(listing[3..].iter().all(|(_, what)| what.starts_with("skipped: the same directory")), "{listing:?}");
    let exists: Vec<bool> = discovery.searched.iter().map(|place| place.exists).collect();
    assert_eq!(exists, [false, true, true, true, true]);

    // Root reads every directory; everyone else is refused.
    std::fs::set_permissions(good.path(), PermissionsExt::from_mode(0o000))?;
    let readable = std::fs::read_dir(good.path()).is_ok();
    let found = search(&[good.path()]).found;
    std::fs::set_permissions(good.path(), PermissionsExt::from_mode(0o700))?;
    assert!(readable || matches!(&found[0].what, What::Skipped(reason) if reason.contains("Permission denied")));
    // That a usual directory is missing is no entry.
    let usual = discover(&[Place::Directory { path: missing, origin: Origin::Default }]);
    assert!(usual.found.is_empty() && !usual.searched[0].exists);
    Ok(())
}

#[test]
fn a_named_file_is_a_manifest_or_a_library_with_or_without_one() {
    let plugins = Plugins::new();
    let sample = manifest("a", "1.0.0", "A");
    let path = plugins.add(&sample);
    let other = plugins.write("other.so", header());
    let names = [
        path.clone(),
        plugins.path().join(&sample.library),
        other,
        plugins.path().join("none.so"),
        plugins.path().into(),
    ];
    let places: Vec<_> = names.iter().map(|path| Place::file(path, Origin::Flag("--plugin".into()))).collect();
    let discovery = discover(&places);
    let listing: Vec<String> = listing(&discovery).into_iter().map(|(_, what)| what).collect();
    assert_eq!(listing[..2], ["plugin a 1.0.0", "plugin a 1.0.0"]);
    assert!(discovery.found[..2].iter().all(|found| found.manifest_path.as_ref() == Some(&path)));
    assert!(listing[2].starts_with("invalid: truncated: the table of segments"), "{listing:?}");
    assert!(listing[3].starts_with("invalid: cannot read the plugin"), "{listing:?}");
    assert!(listing[4].starts_with("invalid: a directory"), "{listing:?}");
}

#[test]
fn a_hundred_manifests_are_found_and_no_library_is_read() {
    let plugins = Plugins::new();
    for index in 0..100 {
        let sample = manifest(&format!("p{index:03}"), "1.0.0", &format!("B{index:03}"));
        plugins.add(&sample);
        // A sparse file: whoever reads it in full reads a tebibyte.
        let library = std::fs::OpenOptions::new().write(true).open(plugins.path().join(&sample.library));
        library.and_then(|file| file.set_len(1 << 40)).expect("a sparse file");
    }
    let discovery = search(&[plugins.path()]);
    assert_eq!(discovery.found.len(), 100);
    assert!(discovery.found.iter().all(|found| matches!(found.what, What::Plugin(_))));
}
