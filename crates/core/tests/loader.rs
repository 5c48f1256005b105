//! Files that are no plugin, or no longer one, are refused without being opened.

use attache_core::{
    abi::METADATA_MAGIC,
    loader::{ElfProblem, LoadError, LoadOptions, open, read_metadata},
    manifest::{Manifest, ManifestError},
};
use object::elf;
use proptest::prelude::*;
use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

type TestResult = Result<(), Box<dyn std::error::Error>>;

/// Any complete ELF library or position-independent program: the one that runs this test.
fn this_program() -> Vec<u8> {
    std::fs::read(std::env::current_exe().expect("a path")).expect("readable")
}

fn write(directory: &TempDir, bytes: &[u8]) -> PathBuf {
    let path = directory.path().join("plugin.so");
    std::fs::write(&path, bytes).expect("written");
    path
}

fn problem(bytes: &[u8]) -> ElfProblem {
    let directory = TempDir::new().expect("a directory");
    let path = write(&directory, bytes);
    let error = open(&path, None, &LoadOptions::default()).expect_err("no plugin");
    assert_eq!(read_metadata(&path).expect_err("no plugin"), error);
    let line = error.to_string();
    assert!(line.starts_with(path.to_str().expect("UTF-8")) && !line.contains('\n'), "{line}");
    match error {
        LoadError::Elf { problem, .. } => problem,
        other => panic!("{other:?}"),
    }
}

fn patched(offset: usize, bytes: &[u8]) -> Vec<u8> {
    let mut program = this_program();
    program[offset..offset + bytes.len()].copy_from_slice(bytes);
    program
}

#[test]
fn other_files_are_refused_by_what_they_are() {
    assert_eq!(problem(b""), ElfProblem::TooShort { size: 0 });
    assert_eq!(problem(b"\x7fELF\x02\x01"), ElfProblem::TooShort { size: 6 });
    assert_eq!(problem(b"#!/bin/sh\n"), ElfProblem::NotElf { found: *b"#!/b" });
    assert_eq!(problem(&this_program()), ElfProblem::NoMetadata);
    let foreign_machine = if cfg!(target_arch = "s390x") { elf::EM_386.0 } else { elf::EM_S390.0 };
    for (offset, value) in [(4, vec![1]), (5, vec![2]), (18, foreign_machine.to_ne_bytes().to_vec())] {
        let found = problem(&patched(offset, &value));
        assert!(found.is_foreign(), "{found:?}");
    }
    assert_eq!(problem(&patched(16, &2_u16.to_ne_bytes())), ElfProblem::NotLibrary { found: 2 });
}

#[test]
fn a_truncated_file_is_refused_wherever_it_ends() {
    let program = this_program();
    let ends = (0..64).chain((1..40).map(|part| program.len() * part / 40)).chain([program.len() - 1]);
    for end in ends {
        match problem(&program[..end]) {
            ElfProblem::TooShort { size } => assert_eq!(size, end),
            ElfProblem::Truncated { size, .. } => assert_eq!(size, end as u64),
            other => panic!("cut at {end}: {other:?}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_damage_to_the_headers_is_a_panic(offset in 6_usize..64, value: u8) {
        let _ = problem(&patched(offset, &[value]));
    }

    #[test]
    fn no_content_is_a_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..400), header in any::<bool>()) {
        if header && bytes.len() >= 20 {
            bytes[..20].copy_from_slice(&this_program()[..20]);
        }
        let _ = problem(&bytes);
    }
}

#[test]
fn a_file_that_others_may_write_to_is_refused_unless_that_is_allowed() -> TestResult {
    let directory = TempDir::new()?;
    let path = write(&directory, b"text");
    let allow = LoadOptions { allow_writable_by_others: true };
    for (target, mode, what) in [(path.as_path(), 0o666, "the file"), (directory.path(), 0o777, "its directory")] {
        let before = std::fs::metadata(target)?.permissions();
        std::fs::set_permissions(target, PermissionsExt::from_mode(mode))?;
        let error = open(&path, None, &LoadOptions::default()).expect_err("refused");
        assert!(matches!(&error, LoadError::WritableByOthers { what: found, .. } if *found == what), "{error}");
        assert!(matches!(open(&path, None, &allow), Err(LoadError::Elf { .. })));
        std::fs::set_permissions(target, before)?;
    }
    Ok(())
}

#[test]
fn a_file_that_is_too_large_is_not_read() -> TestResult {
    let directory = TempDir::new()?;
    let path = write(&directory, &this_program());
    std::fs::OpenOptions::new().write(true).open(&path)?.set_len(1 << 40)?;
    let error = open(&path, None, &LoadOptions::default()).expect_err("refused");
    assert!(matches!(error, LoadError::Elf { problem: ElfProblem::TooLarge { size }, .. } if size == 1 << 40));
    Ok(())
}

#[test]
fn what_is_no_file_is_not_read() -> TestResult {
    let directory = TempDir::new()?;
    std::fs::create_dir(directory.path().join("directory"))?;
    for path in ["missing.so", "directory"].map(|name| directory.path().join(name)) {
        let error = open(&path, None, &LoadOptions::default()).expect_err("refused");
        assert!(matches!(error, LoadError::Unreadable { .. }), "{error}");
        assert!(matches!(Manifest::for_library(&path), Err(ManifestError::Load(same)) if same == error));
    }
    Ok(())
}

/// This program with a metadata section: an unused one gets its name and content.
fn with_section(content: &[u8]) -> Option<Vec<u8>> {
    use object::read::elf::{FileHeader, SectionHeader};
    let mut program = this_program();
    let header = elf::FileHeader64::<object::NativeEndian>::parse(&*program).ok()?;
    let endian = object::NativeEndian;
    let sections = header.sections(endian, &*program).ok()?;
    let strings = sections.section(object::SectionIndex(header.shstrndx(endian, &*program).ok()? as usize)).ok()?;
    let (_, comment) = sections.section_by_name(endian, b".comment")?;
    let name = strings.sh_offset(endian) as usize + comment.sh_name(endian) as usize;
    let (offset, size) = (comment.sh_offset(endian) as usize, comment.sh_size(endian) as usize);
    if content.len() > size {
        return None;
    }
    program[name..name + 8].copy_from_slice(b".attache");
    program[offset..offset + size].fill(0);
    program[offset..offset + content.len()].copy_from_slice(content);
    Some(program)
}

fn framed(length: u32, json: &str) -> Vec<u8> {
    [METADATA_MAGIC.as_slice(), &length.to_le_bytes(), json.as_bytes()].concat()
}

#[test]
fn a_damaged_metadata_section_says_what_is_wrong() {
    for (content, expected) in [
        (b"other".to_vec(), "magic"),
        (METADATA_MAGIC.to_vec(), "it says 0 bytes"),
        (framed(99_999, "{}"), "it says 99999 bytes"),
        (framed(2, "{}"), "missing field"),
        (framed(2, "{}{}"), "more than one plugin"),
    ] {
        let bytes = with_section(&content).expect("room in this program");
        let expected = if expected == "it says 0 bytes" { "EOF" } else { expected };
        match problem(&bytes) {
            ElfProblem::Metadata(reason) => assert!(reason.contains(expected), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn paths_and_lines_go_together() {
    let error = LoadError::Unreadable { path: Path::new("/p/x.so").into(), reason: "gone".into() };
    assert_eq!(error.to_string(), "/p/x.so: cannot read the library: gone");
    assert_eq!((error.path(), error.reason()), (Path::new("/p/x.so"), "cannot read the library: gone".to_owned()));
    assert_eq!(error.detail(), None);
}
