//! Answers of another, widely used selector, as data, compared with ours.
//!
//! | module | owns |
//! |---|---|
//! | [`facts`] | a machine's facts and a case's settings as a device |
//! | `selections`, `tables` | one sort of cases each |
//! | [`differences`] | where we differ on purpose, by rule |
//!
//! Must not know: how a selection is made.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod differences;
pub mod facts;
mod selections;
mod tables;

use attache_catalogue::{Catalogue, CatalogueError};
use serde_json::Value;
use std::{
    fmt,
    path::{Path, PathBuf},
};

/// Why cases cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum OracleError {
    /// A file cannot be read.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// The catalogue cannot be used.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
}

/// What became of a case.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Both say the same.
    Passed,
    /// They differ on purpose: the rule's name.
    Explained(&'static str),
    /// They differ: request, ours, theirs.
    Failed(String),
}

/// What became of the cases of one file.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// The file.
    pub file: String,
    /// Cases that agree.
    pub passed: usize,
    /// Cases that differ on purpose, by rule.
    pub explained: std::collections::BTreeMap<&'static str, usize>,
    /// Differences, one text each.
    pub failures: Vec<String>,
}

impl Tally {
    fn add(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Passed => self.passed += 1,
            Outcome::Explained(rule) => *self.explained.entry(rule).or_default() += 1,
            Outcome::Failed(text) => self.failures.push(text),
        }
    }
}

/// What became of all cases.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// One for each file that was there.
    pub files: Vec<Tally>,
    /// Print every difference.
    pub verbose: bool,
}

impl Report {
    /// Cases that agree, that differ on purpose, and that differ.
    #[must_use]
    pub fn totals(&self) -> (usize, usize, usize) {
        self.files.iter().fold((0, 0, 0), |(passed, explained, failed), file| {
            (passed + file.passed, explained + file.explained.values().sum::<usize>(), failed + file.failures.len())
        })
    }
}

/// Differences that are printed of a file.
const SHOWN: usize = 10;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for file in &self.files {
            let shown = if self.verbose { file.failures.len() } else { SHOWN.min(file.failures.len()) };
            file.failures[..shown].iter().try_for_each(|failure| writeln!(f, "{failure}"))?;
            if shown < file.failures.len() {
                writeln!(f, "… and {} more of {}", file.failures.len() - shown, file.file)?;
            }
        }
        for file in &self.files {
            let explained: usize = file.explained.values().sum();
            writeln!(
                f,
                "{}: {} passed, {explained} explained, {} failed",
                file.file,
                file.passed,
                file.failures.len()
            )?;
            for (rule, count) in &file.explained {
                writeln!(f, "  {count} explained: {rule}: {}", differences::why(rule))?;
            }
        }
        let (passed, explained, failed) = self.totals();
        writeln!(f, "{passed} passed, {explained} explained, {failed} failed")?;
        write!(f, "{} passed, {failed} failed", passed + explained)
    }
}

fn read(path: &Path) -> Result<String, OracleError> {
    std::fs::read_to_string(path)
        .map_err(|error| OracleError::File { path: path.to_owned(), reason: error.to_string() })
}

/// The lines of a file as JSON.
fn lines(path: &Path) -> Result<Vec<Value>, OracleError> {
    read(path)?
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(number, line)| {
            serde_json::from_str(line).map_err(|error| OracleError::File {
                path: path.to_owned(),
                reason: format!("line {}: {error}", number + 1),
            })
        })
        .collect()
}

/// Runs every case of a folder: `selections.jsonl`, `kinds.jsonl`, `config_parse.jsonl`, `layouts.jsonl`
/// and `mamba.jsonl`, those of them that are there.
///
/// # Errors
/// When a file cannot be read.
pub fn run(directory: &Path, verbose: bool) -> Result<Report, OracleError> {
    let catalogue = Catalogue::published()?;
    let mut report = Report { verbose, ..Report::default() };
    let machines = match read(&directory.join("facts.json")) {
        Ok(text) => serde_json::from_str::<Value>(&text).unwrap_or_default()["machines"].clone(),
        Err(_) => Value::Null,
    };
    type Run = fn(&Catalogue, &Value, &[Value], &mut Tally);
    let sorts: [(&str, Run); 5] = [
        ("selections.jsonl", selections::run),
        ("kinds.jsonl", tables::kinds),
        ("config_parse.jsonl", tables::config_parse),
        ("layouts.jsonl", tables::layouts),
        ("mamba.jsonl", tables::mamba),
    ];
    for (name, run) in sorts {
        let path = directory.join(name);
        if !path.is_file() {
            continue;
        }
        let mut cases = lines(&path)?;
        let mut machines = machines.clone();
        if let Some(header) = cases.first().and_then(|first| first.get("header")) {
            machines = header["machines"].clone();
            cases.remove(0);
        }
        let mut tally = Tally { file: name.to_owned(), ..Tally::default() };
        run(&catalogue, &machines, &cases, &mut tally);
        report.files.push(tally);
    }
    if report.files.is_empty() {
        return Err(OracleError::File { path: directory.to_owned(), reason: "no file of cases is there".to_owned() });
    }
    Ok(report)
}
