//! Every check, and a summary.

use crate::{cargo, plugins};
use anyhow::{Result, bail};
use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// Tests as cargo counts them.
#[derive(Default, Clone, Copy)]
struct Counts {
    passed: usize,
    failed: usize,
    ignored: usize,
}

struct Step {
    name: &'static str,
    time: Duration,
    counts: Option<Counts>,
    error: Option<String>,
}

pub fn run() -> Result<()> {
    let mut steps = Vec::new();
    let go_on = |steps: &mut Vec<Step>, name, work: &mut dyn FnMut() -> Result<Option<Counts>>| {
        println!("\n== {name}");
        let start = Instant::now();
        let (counts, error) = match work() {
            Ok(counts) => (counts, None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        let is_good = error.is_none();
        steps.push(Step { name, time: start.elapsed(), counts, error });
        is_good
    };
    let cargo = |arguments: &[&str]| -> Result<Option<Counts>> {
        cargo::run(cargo::cargo().args(arguments))?;
        Ok(None)
    };
    let _ = go_on(&mut steps, "formatting", &mut || cargo(&["fmt", "--all", "--check"]))
        && go_on(&mut steps, "lints", &mut || {
            cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "--deny", "warnings"])
        })
        && go_on(&mut steps, "the core as plugins link it", &mut || {
            cargo(&["check", "--quiet", "--package", "attache-core", "--no-default-features"])
        })
        && go_on(&mut steps, "the program without plugins", &mut || {
            cargo(&["check", "--quiet", "--package", "attache", "--no-default-features"])
        })
        && go_on(&mut steps, "plugins as libraries", &mut || plugins::build(false, None).map(|_| None))
        && go_on(&mut steps, "tests", &mut || test(&["test", "--workspace", "--quiet"]).map(Some))
        && go_on(&mut steps, "documentation", &mut || {
            let mut doc = cargo::cargo();
            doc.args(["doc", "--workspace", "--no-deps", "--quiet"]).env("RUSTDOCFLAGS", "--deny warnings");
            cargo::run(&mut doc).map(|()| None)
        });
    summary(&steps)
}

/// Runs cargo's tests, lets their output through, and counts.
fn test(arguments: &[&str]) -> Result<Counts> {
    let mut command: Command = cargo::cargo();
    command.args(arguments).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let mut counts = Counts::default();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line?;
            if let Some(result) = line.strip_prefix("test result: ") {
                let number = |word: &str| -> usize {
                    let before = result.split(word).next().unwrap_or_default();
                    before.rsplit(' ').find_map(|part| part.parse().ok()).unwrap_or(0)
                };
                counts.passed += number(" passed");
                counts.failed += number(" failed");
                counts.ignored += number(" ignored");
            }
            println!("{line}");
        }
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("{} failed ({status}): {} passed, {} failed", cargo::text(&command), counts.passed, counts.failed);
    }
    if counts.ignored > 0 {
        bail!("{} tests are ignored: a test that does not run says nothing", counts.ignored);
    }
    if counts.passed == 0 {
        bail!("no test ran");
    }
    Ok(counts)
}

fn summary(steps: &[Step]) -> Result<()> {
    println!("\n== summary");
    for step in steps {
        let counts = step.counts.map(|counts| format!(": {} passed, 0 failed, 0 skipped", counts.passed));
        let state = if step.error.is_none() { "ok" } else { "FAILED" };
        println!("{state:>6}  {:<28} {:>6.1} s{}", step.name, step.time.as_secs_f64(), counts.unwrap_or_default());
    }
    match steps.iter().find_map(|step| step.error.as_ref().map(|error| (step.name, error))) {
        None => Ok(()),
        Some((name, error)) => bail!("{name}: {error}"),
    }
}
