//! Benchmarks. Prints a row each, and JSON on the last line.
//!
//! Figures of different runs do not compare on a machine that others use: compare within a run.

mod kernels;
mod selection;

use attache_fixture_null as _;
use attache_plugin_cpu as _;
use attache_plugin_mla as _;
use clap::Parser;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Benchmarks of kernels through the ABI, selection and discovery.
#[derive(Parser)]
struct Arguments {
    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    filter: String,
    /// Threads
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Repetitions, of which the median counts
    #[arg(long, default_value_t = 7)]
    reps: usize,
}

/// A measured case.
#[derive(Serialize)]
pub struct Row {
    /// Its name; those of kernels are the peers' names too.
    pub case: String,
    /// Milliseconds, the median.
    pub ms: f64,
    /// Billions of floating-point operations a second, over visible pairs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gflops: Option<f64>,
    /// Billions of bytes of K and V a second, read once per KV head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_gbs: Option<f64>,
}

/// The median time of `reps` runs, after two that do not count.
pub fn median(reps: usize, mut function: impl FnMut()) -> Duration {
    function();
    function();
    let mut times: Vec<Duration> = (0..reps.max(1))
        .map(|_| {
            let start = Instant::now();
            function();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

fn main() {
    let Arguments { filter, threads, reps } = Arguments::parse();
    let mut rows = Vec::new();
    let mut show = |row: Row| {
        let rate = |name: &str, value: Option<f64>| value.map(|v| format!(" {v:9.2} {name}")).unwrap_or_default();
        println!("{:34} {:12.6} ms{}{}", row.case, row.ms, rate("GFLOP/s", row.gflops), rate("GB/s", row.kv_gbs));
        rows.push(row);
    };
    kernels::run(&filter, threads, reps, &mut show);
    selection::run(&filter, &mut show);
    let report = serde_json::json!({ "threads": threads, "reps": reps, "rows": rows });
    println!("{report}");
}
