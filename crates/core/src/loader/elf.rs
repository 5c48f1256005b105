//! What can be known of a library without opening it: whether it is a complete ELF library for this
//! machine, and the plugin's metadata section.
//!
//! `dlopen` maps a file by what its headers say; pages past the end of a truncated file end the
//! process with SIGBUS. So every extent is compared with the file's size here.

use crate::{
    abi::{METADATA_MAGIC, METADATA_SECTION},
    plugin::PluginMetadata,
};
use object::{
    NativeEndian, ReadRef, elf,
    read::elf::{FileHeader, ProgramHeader, SectionHeader},
};

#[cfg(target_pointer_width = "64")]
type Header = elf::FileHeader64<NativeEndian>;
#[cfg(target_pointer_width = "32")]
type Header = elf::FileHeader32<NativeEndian>;

/// Bytes of the header that [`header_problem`] looks at.
pub(crate) const HEADER_BYTES: usize = size_of::<Header>();

/// Bytes of a metadata section, at most.
const MAX_METADATA_BYTES: u64 = 1 << 16;

/// Why a file is not a usable library.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ElfProblem {
    /// Nothing in it, or less than a header.
    #[error("not a library: the file has {size} bytes, less than an ELF header")]
    TooShort {
        /// Bytes of the file.
        size: usize,
    },
    /// More than any library has.
    #[error("not a library: the file has {size} bytes")]
    TooLarge {
        /// Bytes of the file.
        size: u64,
    },
    /// Another sort of file.
    #[error("not a library: it starts with '{}', not with an ELF header", found.escape_ascii())]
    NotElf {
        /// Its first bytes.
        found: [u8; 4],
    },
    /// A library for other machines.
    #[error("a library for another machine: {found}; this program is {expected}")]
    Foreign {
        /// Of the file.
        found: String,
        /// Of this program.
        expected: String,
    },
    /// An executable or an object file.
    #[error("not a library: its ELF type is {found}, a library's is 3 (ET_DYN)")]
    NotLibrary {
        /// Its type.
        found: u16,
    },
    /// A part that lies outside the file.
    #[error("truncated: {part} ends at byte {end}, the file has {size} bytes; copy it again")]
    Truncated {
        /// Which part.
        part: String,
        /// Where it should end.
        end: u64,
        /// Bytes of the file.
        size: u64,
    },
    /// Headers that contradict themselves.
    #[error("damaged: {0}; copy it again")]
    Damaged(String),
    /// No metadata section.
    #[error("not a plugin: it has no section {METADATA_SECTION}; build it with the SDK and the feature 'dylib'")]
    NoMetadata,
    /// A metadata section that cannot be read.
    #[error("the section {METADATA_SECTION} cannot be read: {0}")]
    Metadata(String),
}

impl ElfProblem {
    /// Whether the file is a good library for a machine other than this one.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        matches!(self, Self::Foreign { .. })
    }
}

/// The `e_machine` of this program; `None` on a processor that is not listed: then any is taken.
fn this_machine() -> Option<elf::Machine> {
    Some(match std::env::consts::ARCH {
        "x86_64" => elf::EM_X86_64,
        "aarch64" => elf::EM_AARCH64,
        "riscv64" => elf::EM_RISCV,
        "loongarch64" => elf::EM_LOONGARCH,
        "s390x" => elf::EM_S390,
        "powerpc64" => elf::EM_PPC64,
        "x86" => elf::EM_386,
        "arm" => elf::EM_ARM,
        _ => return None,
    })
}

/// What is wrong with the first bytes of a file; cheap enough for discovery.
pub(crate) fn header_problem(bytes: &[u8]) -> Option<ElfProblem> {
    header(bytes).err()
}

fn header(bytes: &[u8]) -> Result<&Header, ElfProblem> {
    let size = bytes.len();
    let Some(&found) = bytes.first_chunk::<4>() else { return Err(ElfProblem::TooShort { size }) };
    if found != elf::ELFMAG {
        return Err(ElfProblem::NotElf { found });
    }
    let ident = |index: usize| bytes.get(index).copied().ok_or(ElfProblem::TooShort { size });
    let class = |class: u8| match class {
        1 => "32 bits".to_owned(),
        2 => "64 bits".to_owned(),
        other => format!("ELF class {other}"),
    };
    let order = |order: u8| match order {
        1 => "little-endian".to_owned(),
        2 => "big-endian".to_owned(),
        other => format!("byte order {other}"),
    };
    let (my_class, my_order) =
        (if cfg!(target_pointer_width = "64") { 2 } else { 1 }, if cfg!(target_endian = "little") { 1 } else { 2 });
    let (its_class, its_order) = (ident(4)?, ident(5)?);
    let foreign = |found: String, expected: String| Err(ElfProblem::Foreign { found, expected });
    if its_class != my_class {
        return foreign(class(its_class), class(my_class));
    }
    if its_order != my_order {
        return foreign(order(its_order), order(my_order));
    }
    if size < HEADER_BYTES {
        return Err(ElfProblem::TooShort { size });
    }
    let header = Header::parse(bytes).map_err(|error| ElfProblem::Damaged(error.to_string()))?;
    let machine = header.e_machine(NativeEndian);
    if let Some(mine) = this_machine()
        && machine != mine
    {
        return foreign(format!("ELF machine {}", machine.0), format!("{} ({})", mine.0, std::env::consts::ARCH));
    }
    let found = header.e_type(NativeEndian);
    if found != elf::ET_DYN {
        return Err(ElfProblem::NotLibrary { found: found.0 });
    }
    Ok(header)
}

/// A word of a header: of 32 or 64 bits, as the machine has it.
fn wide(word: impl Into<u64>) -> u64 {
    word.into()
}

/// Checks a library and reads its metadata section. Reads the tables and the section alone.
pub(super) fn metadata<'data>(data: impl ReadRef<'data>) -> Result<PluginMetadata, ElfProblem> {
    let damaged = |error: object::read::Error| ElfProblem::Damaged(error.to_string());
    let unreadable = |()| ElfProblem::Damaged("the file cannot be read".to_owned());
    let size = data.len().map_err(unreadable)?;
    let start = data.read_bytes_at(0, size.min(HEADER_BYTES as u64)).map_err(unreadable)?;
    let header = header(start)?;
    let within = |part: &dyn Fn() -> String, start: u64, length: u64| match start.checked_add(length) {
        Some(end) if end <= size => Ok(()),
        end => Err(ElfProblem::Truncated { part: part(), end: end.unwrap_or(u64::MAX), size }),
    };

    // Counts beyond 16 bits stand elsewhere in the file; no library needs them.
    if header.e_phnum(NativeEndian) == elf::PN_XNUM {
        return Err(ElfProblem::Damaged("it has too many segments".to_owned()));
    }
    if header.e_shnum(NativeEndian) == 0 {
        return Err(ElfProblem::NoMetadata);
    }
    let table = |count: u16, entry: u16| u64::from(count) * u64::from(entry);
    let segments_length = table(header.e_phnum(NativeEndian), header.e_phentsize(NativeEndian));
    within(&|| "the table of segments".to_owned(), wide(header.e_phoff(NativeEndian)), segments_length)?;
    let segments = header.program_headers(NativeEndian, data).map_err(damaged)?;
    let mut loaded = 0;
    for (index, segment) in segments.iter().enumerate() {
        let kind = segment.p_type(NativeEndian);
        if kind == elf::PT_NULL {
            continue;
        }
        let (start, length) = segment.file_range(NativeEndian);
        within(&|| format!("segment {index}"), start, length)?;
        if kind == elf::PT_LOAD {
            loaded += 1;
            if length > wide(segment.p_memsz(NativeEndian)) {
                return Err(ElfProblem::Damaged(format!("segment {index} is larger in the file than in memory")));
            }
        }
    }
    if loaded == 0 {
        return Err(ElfProblem::Damaged("no segment to load".to_owned()));
    }

    let sections_length = table(header.e_shnum(NativeEndian), header.e_shentsize(NativeEndian));
    within(&|| "the table of sections".to_owned(), wide(header.e_shoff(NativeEndian)), sections_length)?;
    let sections = header.sections(NativeEndian, data).map_err(damaged)?;
    for (index, section) in sections.iter().enumerate() {
        if let Some((start, length)) = section.file_range(NativeEndian) {
            within(&|| format!("section {index}"), start, length)?;
        }
    }
    let Some((_, section)) = sections.section_by_name(NativeEndian, METADATA_SECTION.as_bytes()) else {
        return Err(ElfProblem::NoMetadata);
    };
    if wide(section.sh_size(NativeEndian)) > MAX_METADATA_BYTES {
        return Err(ElfProblem::Metadata(format!("it is larger than {MAX_METADATA_BYTES} bytes")));
    }
    section_metadata(section.data(NativeEndian, data).map_err(damaged)?)
}

fn section_metadata(section: &[u8]) -> Result<PluginMetadata, ElfProblem> {
    let problem = |text: String| ElfProblem::Metadata(text);
    let rest = section
        .strip_prefix(METADATA_MAGIC.as_slice())
        .ok_or_else(|| problem("it does not start with the magic of this format".to_owned()))?;
    let (length, rest) = rest.split_first_chunk::<4>().ok_or_else(|| problem("it has no length".to_owned()))?;
    let length = u32::from_le_bytes(*length) as usize;
    let (json, padding) = rest
        .split_at_checked(length)
        .ok_or_else(|| problem(format!("it says {length} bytes and holds {}", rest.len())))?;
    if padding.iter().any(|byte| *byte != 0) {
        return Err(problem("it holds more than one plugin's metadata; a library is one plugin".to_owned()));
    }
    serde_json::from_slice(json).map_err(|error| problem(error.to_string()))
}
