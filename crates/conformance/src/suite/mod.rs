//! The checks that any backend must pass, and their report.
//!
//! Owns which checks there are and their tally. Must not know how a backend is made or found.

mod bad_input;
mod blocks;
mod refusals;

use crate::{
    case::Case,
    check::check,
    execute::{ExecuteError, Output, execute},
    generate::Space,
    pool::three_threads,
};
use attache_core::{
    Device, ErrorCode,
    descriptor::feature,
    runtime::{Backend, HostServices},
};
use serde::Serialize;
use std::{collections::BTreeMap, fmt, path::PathBuf, sync::Arc};

/// How much is checked.
#[derive(Debug, Clone)]
pub struct SuiteOptions {
    /// The most cases that are generated; enough to cover the claims pairwise when not stated.
    pub max_cases: usize,
    /// Where the files of failing cases go; absent = they are not written.
    pub save_failures: Option<PathBuf>,
}

impl Default for SuiteOptions {
    fn default() -> Self {
        Self { max_cases: usize::MAX, save_failures: None }
    }
}

/// How often a check passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Tally {
    /// Passed.
    pub passed: usize,
    /// Failed.
    pub failed: usize,
    /// Did not apply: not claimed, or refused where a refusal is right.
    pub skipped: usize,
}

/// A check that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// The check.
    pub check: &'static str,
    /// The case, or what was asked.
    pub what: String,
    /// What went wrong.
    pub message: String,
    /// The case as a file for `attache case run`, where it was written.
    pub case_file: Option<PathBuf>,
}

/// What a backend did under all checks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SuiteReport {
    /// The backend.
    pub backend: String,
    /// The seed of the cases.
    pub seed: u64,
    /// Cases generated.
    pub cases: usize,
    /// For each check how often it passed.
    pub checks: BTreeMap<&'static str, Tally>,
    /// Everything that failed.
    pub failures: Vec<Failure>,
    /// Claims that the reference cannot check.
    pub unchecked: Vec<String>,
}

impl SuiteReport {
    /// Whether nothing failed.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
    }

    /// How often a check passed.
    #[must_use]
    pub fn tally(&self, check: &str) -> Tally {
        self.checks.get(check).copied().unwrap_or_default()
    }
}

/// Failures that are printed.
const SHOWN: usize = 12;

impl fmt::Display for SuiteReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} cases of seed {}", self.backend, self.cases, self.seed)?;
        for (name, tally) in &self.checks {
            writeln!(f, "  {name}: {} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped)?;
        }
        if !self.unchecked.is_empty() {
            writeln!(f, "  claimed and not checked: {}", self.unchecked.join(", "))?;
        }
        for failure in self.failures.iter().take(SHOWN) {
            writeln!(f, "FAILED {}: {}\n       {}", failure.check, failure.what, failure.message)?;
            if let Some(file) = &failure.case_file {
                writeln!(f, "       case: {}", file.display())?;
            }
        }
        match self.failures.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => writeln!(f, "… and {more} more"),
        }
    }
}

/// Names of the checks.
pub mod checks {
    /// The descriptor makes sense and the backend finds a device.
    pub const DESCRIPTOR: &str = "descriptor";
    /// Output and LSE are near the reference's.
    pub const REFERENCE: &str = "reference";
    /// The same call twice gives the same bits.
    pub const DETERMINISM: &str = "determinism";
    /// A request gives the same bits alone and in a batch, and on any number of threads.
    pub const BATCH_INVARIANCE: &str = "batch_invariance";
    /// Views with strides give the same bits as compact ones.
    pub const STRIDES: &str = "strides";
    /// Copied and moved blocks give the same bits.
    pub const BLOCKS: &str = "blocks";
    /// What is not claimed is refused.
    pub const REFUSALS: &str = "refusals";
    /// What breaks the contract is refused, and changes nothing.
    pub const BAD_INPUT: &str = "bad_input";
}

/// The tally in the making.
struct Recorder<'a> {
    report: SuiteReport,
    options: &'a SuiteOptions,
}

impl Recorder<'_> {
    fn tally(&mut self, check: &'static str) -> &mut Tally {
        self.report.checks.entry(check).or_default()
    }

    fn skip(&mut self, check: &'static str) {
        self.tally(check).skipped += 1;
    }

    /// Counts; a failure's case is saved.
    fn record(&mut self, check: &'static str, case: Option<&Case>, what: &str, outcome: Result<(), String>) {
        let Err(mut message) = outcome else {
            self.tally(check).passed += 1;
            return;
        };
        self.tally(check).failed += 1;
        let mut case_file = None;
        if let (Some(directory), Some(case)) = (&self.options.save_failures, case) {
            let number = self.report.failures.len();
            let path = directory.join(format!("{}-{check}-{number}.safetensors", self.report.backend.to_lowercase()));
            match std::fs::create_dir_all(directory)
                .map_err(|error| error.to_string())
                .and_then(|()| case.save(&path).map_err(|error| error.to_string()))
            {
                Ok(()) => case_file = Some(path),
                Err(error) => message.push_str(&format!(" (the case was not saved: {error})")),
            }
        }
        self.report.failures.push(Failure { check, what: what.to_owned(), message, case_file });
    }
}

/// Runs every check on a backend. `host` is what its layers run on; batch invariance is also
/// checked on other numbers of threads.
#[must_use]
pub fn run(backend: &Arc<Backend>, host: HostServices, seed: u64, options: &SuiteOptions) -> SuiteReport {
    let report = SuiteReport {
        backend: backend.name().to_owned(),
        seed,
        cases: 0,
        checks: BTreeMap::new(),
        failures: Vec::new(),
        unchecked: Vec::new(),
    };
    let mut recorder = Recorder { report, options };
    let Some(device) = device(backend, &mut recorder) else { return recorder.report };
    let space = Space::new(backend.descriptor(), &device);
    recorder.report.unchecked = space.unchecked().to_vec();
    for case in space.cases(seed).take(options.max_cases) {
        recorder.report.cases += 1;
        one_case(backend, host, &device, &case, &mut recorder);
    }
    match space.plain(seed) {
        Ok(plain) => {
            refusals::run(backend, &space, &device, &plain, &mut recorder);
            bad_input::run(backend, host, &plain, &mut recorder);
            blocks::run(backend, host, &plain, &mut recorder);
        }
        Err(message) => recorder.record(checks::REFERENCE, None, "the claims", Err(message)),
    }
    recorder.report
}

fn device(backend: &Backend, recorder: &mut Recorder<'_>) -> Option<Device> {
    let descriptor = backend.descriptor().check().map_err(|error| error.to_string());
    recorder.record(checks::DESCRIPTOR, None, "the descriptor", descriptor);
    let found = match backend.probe() {
        Ok(devices) => devices.into_iter().next().ok_or_else(|| "it finds no device here".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    let device = found.as_ref().ok().cloned();
    recorder.record(checks::DESCRIPTOR, None, "probe", found.map(drop));
    device
}

/// A case in one line.
fn describe(case: &Case) -> String {
    let mut text = format!(
        "{} {} heads {}/{} size {}",
        case.attn_type,
        case.dtype(),
        case.num_heads,
        case.num_kv_heads,
        case.head_size
    );
    let mut add = |name: &str, value: String| text.push_str(&format!(", {name} {value}"));
    if case.head_size_v != case.head_size {
        add("head_size_v", case.head_size_v.to_string());
    }
    if let Some(mla) = &case.mla {
        add("mla", mla.form.name().to_owned());
    }
    if let Some(dtype) = case.kv_cache_dtype {
        add("kv_cache_dtype", dtype.name().to_owned());
    }
    if let Some(layout) = &case.layout {
        add("layout", layout.clone());
    }
    if let Some(size) = case.block_size {
        add("block_size", size.to_string());
    }
    add("causal", case.causal_per_request.as_ref().map_or(case.causal.to_string(), |flags| format!("{flags:?}")));
    let optional = [
        ("window", case.sliding_window > 0, case.sliding_window.to_string()),
        ("window_right", case.window_right >= 0, case.window_right.to_string()),
        ("chunked_local", case.chunked_local > 0, case.chunked_local.to_string()),
        ("softcap", case.softcap > 0.0, format!("{:.2}", case.softcap)),
        ("sinks", !case.sinks.is_empty(), format!("{:?}", case.sinks)),
        ("ALiBi", !case.alibi_slopes.is_empty(), format!("{:?}", case.alibi_slopes)),
        ("k_scales", !case.k_scales.is_empty(), format!("{:?}", case.k_scales)),
        ("prefix spans", !case.prefix_spans.is_empty(), format!("{:?}", case.prefix_spans)),
        ("top-k", case.topk.is_some(), case.topk.as_ref().map_or(0, |topk| topk.width).to_string()),
    ];
    for (name, is_on, value) in optional {
        if is_on {
            add(name, value);
        }
    }
    add("query_start_loc", format!("{:?}", case.query_start_loc));
    add("seq_lens", format!("{:?}", case.seq_lens));
    text
}

/// Whether a backend may refuse the case although its claims hold it: a descriptor has no word for
/// a window to the right of its own.
fn may_refuse(case: &Case, error: &ExecuteError) -> bool {
    case.window_right >= 0
        && matches!(error, ExecuteError::Backend { step: "create_layer", source, .. } if source.code == ErrorCode::Unsupported)
}

fn one_case(backend: &Arc<Backend>, host: HostServices, device: &Device, case: &Case, recorder: &mut Recorder<'_>) {
    let what = describe(case);
    match backend.validate(&case.request(), device) {
        Ok(reasons) if reasons.is_empty() => {}
        Ok(_) => return recorder.skip(checks::REFERENCE),
        Err(error) => {
            return recorder.record(checks::REFERENCE, Some(case), &what, Err(format!("validate: {error}")));
        }
    }
    let output = match execute(backend, host, case) {
        Ok(output) => output,
        Err(error) if may_refuse(case, &error) => return recorder.skip(checks::REFERENCE),
        Err(error) => return recorder.record(checks::REFERENCE, Some(case), &what, Err(error.to_string())),
    };
    let near = check(case, &output).map(drop).map_err(|error| error.to_string());
    recorder.record(checks::REFERENCE, Some(case), &what, near);
    let again = same(&output, execute(backend, host, case), "the second time");
    recorder.record(checks::DETERMINISM, Some(case), &what, again);
    if !backend.descriptor().capability.features.contains(feature::BATCH_INVARIANCE) {
        return recorder.skip(checks::BATCH_INVARIANCE);
    }
    let mut invariant = same(&output, execute(backend, HostServices::inline(), case), "on one thread")
        .and_then(|()| same(&output, execute(backend, three_threads(), case), "on three threads"));
    if case.num_requests() > 1 {
        for request in 0..case.num_requests() {
            invariant = invariant.and_then(|()| same_alone(backend, host, case, &output, request));
        }
    }
    recorder.record(checks::BATCH_INVARIANCE, Some(case), &what, invariant);
}

fn same(output: &Output, other: Result<Output, ExecuteError>, when: &str) -> Result<(), String> {
    let other = other.map_err(|error| format!("{when}: {error}"))?;
    if output.same_bits(&other) { Ok(()) } else { Err(format!("{when} the result has other bits")) }
}

fn same_alone(
    backend: &Arc<Backend>,
    host: HostServices,
    case: &Case,
    output: &Output,
    request: usize,
) -> Result<(), String> {
    let alone = case.alone(request).ok_or_else(|| format!("request {request} cannot be cut out"))?;
    let part = part_of(output, case, request).ok_or_else(|| format!("there is no output of request {request}"))?;
    same(&part, execute(backend, host, &alone), &format!("request {request} alone"))
}

/// A request's share of an output.
fn part_of(output: &Output, case: &Case, request: usize) -> Option<Output> {
    let rows = case.query_range(request);
    let row = output.num_heads * output.head_size;
    let tokens = output.num_tokens();
    let lse = output.lse.as_ref().map(|lse| {
        let heads = 0..output.num_heads;
        heads.flat_map(|head| lse[head * tokens + rows.start..head * tokens + rows.end].iter().copied()).collect()
    });
    Some(Output { out: output.out.part(rows.start * row..rows.end * row, 0)?, lse, ..output.clone() })
}
