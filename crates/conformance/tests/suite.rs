//! The suite passes the reference behind the ABI, and catches each of a list of faults by the check
//! that is made for it.

mod common;

use attache_conformance::{
    Case,
    suite::{SuiteOptions, SuiteReport, checks, run},
};
use attache_core::runtime::HostServices;
use common::{Fault, backend};

fn suite(fault: Fault, options: &SuiteOptions) -> SuiteReport {
    run(&backend(fault), HostServices::inline(), 11, options)
}

#[test]
fn the_reference_passes_and_every_check_was_made() {
    let report = suite(Fault::None, &SuiteOptions::default());
    assert!(report.passed(), "{report}");
    assert!(report.cases > 100 && report.unchecked.is_empty(), "{report}");
    let made = [
        checks::REFERENCE,
        checks::DETERMINISM,
        checks::BATCH_INVARIANCE,
        checks::STRIDES,
        checks::BLOCKS,
        checks::REFUSALS,
        checks::BAD_INPUT,
        checks::DESCRIPTOR,
    ];
    for check in made {
        assert!(report.tally(check).passed > 0, "{check}: {report}");
    }
    assert_eq!(report.tally(checks::REFERENCE).passed, report.cases);
}

#[test]
fn each_fault_is_caught_by_its_check() {
    let faults = [
        (Fault::IgnoresSoftcap, checks::REFERENCE),
        (Fault::WindowIsOneLarger, checks::REFERENCE),
        (Fault::ReadsBeyondTheEnd, checks::REFERENCE),
        (Fault::LseInBaseTwo, checks::REFERENCE),
        (Fault::SinkIsNotInTheLse, checks::REFERENCE),
        (Fault::PanicsOnEmptyBatches, checks::REFERENCE),
        (Fault::DependsOnTheBatch, checks::BATCH_INVARIANCE),
        (Fault::ChangesEveryTime, checks::DETERMINISM),
        (Fault::IgnoresStrides, checks::STRIDES),
        (Fault::AcceptsAnything, checks::REFUSALS),
        (Fault::WritesBeforeItChecks, checks::BAD_INPUT),
    ];
    for (fault, check) in faults {
        let report = suite(fault, &SuiteOptions { max_cases: 20, ..SuiteOptions::default() });
        assert!(report.tally(check).failed > 0, "{fault:?} is not caught: {report}");
    }
}

#[test]
fn failing_cases_are_saved_and_fail_again() {
    let directory = tempfile::tempdir().unwrap();
    let options = SuiteOptions { max_cases: 25, save_failures: Some(directory.path().join("cases")) };
    let report = suite(Fault::IgnoresSoftcap, &options);
    let failure = report.failures.iter().find(|failure| failure.check == checks::REFERENCE).expect("a failure");
    let case = Case::load(failure.case_file.as_ref().expect("a file")).unwrap();
    let wrong = backend(Fault::IgnoresSoftcap);
    let output = attache_conformance::execute(&wrong, HostServices::inline(), &case).unwrap();
    let error = attache_conformance::check(&case, &output).unwrap_err();
    assert_eq!(error.to_string(), failure.message);
    let right = attache_conformance::execute(&backend(Fault::None), HostServices::inline(), &case).unwrap();
    attache_conformance::check(&case, &right).unwrap();
}
