//! Parity with another selector, on a sample of its answers that lies beside this file.
//!
//! `tests/oracle/` holds a seeded sample of recorded answers with the facts of the machines that they were
//! recorded on; `cargo xtask oracle DIR` runs a whole recording.

use attache_oracle::{differences::RULES, run};
use std::path::Path;

fn sample() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle")
}

#[test]
fn every_case_agrees_or_differs_by_a_stated_rule() -> Result<(), Box<dyn std::error::Error>> {
    let report = run(&sample(), false)?;
    let (passed, explained, failed) = report.totals();
    assert_eq!(failed, 0, "{report}");
    assert_eq!(passed + explained, 3000, "{report}");
    assert_eq!(report.files.len(), 5, "{report}");
    assert!(explained * 5 < passed, "differences are the exception: {report}");
    let text = report.to_string();
    assert!(text.ends_with("3000 passed, 0 failed"), "{text}");
    for rule in report.files.iter().flat_map(|file| file.explained.keys()) {
        assert!(RULES.iter().any(|(name, why)| name == rule && !why.is_empty()), "{rule} is not explained");
    }
    Ok(())
}

/// A case whose answer is altered must fail, and be printed with both answers.
#[test]
fn a_wrong_answer_is_caught() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    for file in ["facts.json", "kinds.jsonl"] {
        std::fs::copy(sample().join(file), folder.path().join(file))?;
    }
    let cases = std::fs::read_to_string(sample().join("selections.jsonl"))?;
    let altered = cases.replace(r#""backend":"FLASH_ATTN""#, r#""backend":"TRITON_ATTN""#);
    assert_ne!(cases, altered);
    std::fs::write(folder.path().join("selections.jsonl"), altered)?;
    let report = run(folder.path(), true)?;
    let (_, _, failed) = report.totals();
    assert!(failed > 20, "{failed}");
    let text = report.to_string();
    assert!(text.contains("ours: FLASH_ATTN\n  theirs: {\"backend\":\"TRITON_ATTN\""), "{text}");
    Ok(())
}

#[test]
fn a_folder_without_cases_is_an_error() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let error = run(folder.path(), false).expect_err("nothing is there").to_string();
    assert!(error.contains("no file of cases"), "{error}");
    std::fs::write(folder.path().join("kinds.jsonl"), "{\"in\": {}}\nnot JSON\n")?;
    let error = run(folder.path(), false).expect_err("not JSON").to_string();
    assert!(error.contains("line 2"), "{error}");
    Ok(())
}
