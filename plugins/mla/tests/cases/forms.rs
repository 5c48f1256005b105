//! The forms of latent attention against the reference and against each other.

use crate::common::{DEEPSEEK, ODD, Shape, TINY, backend, case};
use attache_conformance::{Case, MlaForm, Output, Values, check, execute, pool::three_threads};
use attache_core::{
    Device, Dtype, KvCacheDtype,
    runtime::{Backend, HostServices},
};
use std::sync::Arc;

fn run(backend: &Arc<Backend>, case: &Case) -> Output {
    execute(backend, three_threads(), case).unwrap_or_else(|error| panic!("{error}"))
}

fn run_and_check(what: &str, backend: &Arc<Backend>, case: &Case) -> Output {
    let output = run(backend, case);
    if let Err(error) = check(case, &output) {
        panic!("{what}: {:?} {:?} of {:?}: {error}", case.dtype(), case.query_start_loc, case.seq_lens);
    }
    output
}

/// The instruction sets of this machine; one may be missing only where the machine lacks it.
fn isas() -> impl Iterator<Item = &'static str> {
    let has = |feature: &str| Device::host_cpu().features.contains(feature);
    // The kernel's list: it leaves out what it does not save for processes.
    let listed = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has_tiles = listed.split_whitespace().any(|flag| flag == "amx_bf16");
    [("amx", has_tiles), ("avx512", has("avx512f")), ("avx2", has("avx2")), ("portable", true)].into_iter().filter_map(
        |(isa, is_here)| {
            if !is_here {
                assert!(backend(&[("isa", isa)]).is_err());
                eprintln!("skipped: this machine has no {isa}");
            }
            is_here.then_some(isa)
        },
    )
}

/// Decoding, a prompt, a chunk on a cached prefix, nothing at all, more queries than keys.
const RAGGED: &[(usize, usize)] = &[(1, 70), (33, 33), (5, 90), (0, 12), (0, 0), (4, 2), (3, 66)];

fn with_features(mut case: Case, features: usize) -> Case {
    match features {
        1 => case.sliding_window = 9,
        2 => {
            case.sinks = (0..case.num_heads).map(|head| head as f32 - 1.0).collect();
            case.softcap = 1.5;
        }
        3 => {
            case.causal_per_request = Some(RAGGED.iter().enumerate().map(|(request, _)| request % 2 == 0).collect());
            case.sliding_window = 20;
            case.sinks = vec![0.5; case.num_heads];
        }
        _ => {}
    }
    case
}

#[test]
fn every_form_on_every_instruction_set_is_right() {
    for isa in isas() {
        // A small workspace, so that requests are cut into chunks and merged.
        for tokens in ["4096", "24"] {
            let paths = ["auto", "absorbed", "expanded"]
                .map(|path| (path, backend(&[("isa", isa), ("path", path), ("workspace_tokens", tokens)]).unwrap()));
            for (shape, dtype, features, block_size) in [
                (TINY, Dtype::F32, 0, 16),
                (TINY, Dtype::BF16, 1, 7),
                (TINY, Dtype::F16, 2, 1),
                (ODD, Dtype::F32, 3, 5),
                (ODD, Dtype::BF16, 2, 64),
                (ODD, Dtype::F16, 0, 16),
                (DEEPSEEK, Dtype::BF16, 3, 64),
            ] {
                for form in MlaForm::ALL {
                    let case = with_features(case(shape, dtype, form, RAGGED, 7), features);
                    let case = Case { block_size: Some(block_size), ..case };
                    let used = if form == MlaForm::Auto { &paths[..] } else { &paths[..1] };
                    for (path, backend) in used {
                        let what = format!("{isa} {tokens} {path} {form:?} {shape:?} features {features}");
                        run_and_check(&what, backend, &case);
                    }
                }
            }
        }
    }
}

#[test]
fn long_contexts_are_split_and_merged() {
    let backend = backend(&[("workspace_tokens", "1024")]).unwrap();
    for (dtype, window) in [(Dtype::F32, 0), (Dtype::BF16, 0), (Dtype::BF16, 1500)] {
        for form in [MlaForm::Absorbed, MlaForm::Expanded] {
            let requests = [(2, 3000), (1, 1024), (70, 1060), (1, 5)];
            let case = Case { sliding_window: window, sinks: vec![1.0; 4], ..case(TINY, dtype, form, &requests, 3) };
            run_and_check(&format!("{form:?} window {window}"), &backend, &case);
        }
    }
}

#[test]
fn caches_and_projections_of_another_float_type_are_read_as_they_are() {
    for (compute, stored) in
        [(Dtype::BF16, "float32"), (Dtype::F32, "bfloat16"), (Dtype::F16, "bfloat16"), (Dtype::BF16, "float16")]
    {
        for form in MlaForm::ALL {
            let mut case = case(TINY, compute, form, RAGGED, 11);
            case.kv_cache_dtype = Some(KvCacheDtype::parse(stored).unwrap());
            run_and_check(&format!("{stored} {form:?}"), &backend(&[]).unwrap(), &case);
        }
    }
    for path in ["absorbed", "expanded"] {
        let backend = backend(&[("path", path)]).unwrap();
        let mut case = case(TINY, Dtype::BF16, MlaForm::Auto, RAGGED, 12);
        let output = run_and_check(path, &backend, &case);
        let projection = &mut case.mla.as_mut().unwrap().kv_b_proj;
        *projection = projection.as_ref().map(|values| Values::from_f64(Dtype::F32, values.to_f64()));
        assert!(run(&backend, &case).same_bits(&output), "{path}: the same projection in f32");
    }
}

#[test]
fn one_head_and_many_and_rows_without_a_rotary_part() {
    for (heads, rope) in [(1, 8), (128, 8), (130, 4), (2, 0)] {
        let shape = Shape { heads, rank: 24, rope, nope: 8, v: 9 };
        for form in MlaForm::ALL {
            let case = case(shape, Dtype::F32, form, &[(1, 40), (3, 3)], 2);
            run_and_check(&format!("{heads} heads {form:?}"), &backend(&[]).unwrap(), &case);
        }
    }
}

#[test]
fn without_a_projection_absorbed_queries_alone_are_taken() {
    for form in MlaForm::ALL {
        let mut case = case(TINY, Dtype::F32, form, RAGGED, 4);
        case.mla.as_mut().unwrap().kv_b_proj = None;
        let result = execute(&backend(&[]).unwrap(), three_threads(), &case);
        match form {
            MlaForm::Absorbed => assert!(check(&case, &result.unwrap()).is_ok()),
            _ => assert!(result.unwrap_err().to_string().contains("kv_b_proj")),
        }
    }
}

/// With queries of zero every output is the mean of the latent rows that are seen: exact.
#[test]
fn zero_queries_give_means() {
    let backend = backend(&[]).unwrap();
    let shape = Shape { heads: 2, rank: 2, rope: 1, nope: 1, v: 1 };
    for (window, expected) in [(0, [1.5, 2.0]), (2, [2.5, 3.5]), (1, [3.0, 4.0])] {
        let mut case = case(shape, Dtype::F32, MlaForm::Absorbed, &[(2, 5)], 1);
        case.sliding_window = window;
        case.q = Values::from_f64(Dtype::F32, vec![0.0; 12]);
        let rows = (0..5).flat_map(|position| [f64::from(position), 1.0, -7.0]);
        case.k = Values::from_f64(Dtype::F32, rows.collect::<Vec<_>>());
        let out = run(&backend, &case).out.to_f64();
        for (token, mean) in expected.iter().enumerate() {
            for head in 0..2 {
                assert!((out[(token * 2 + head) * 2] - mean).abs() < 1e-6, "window {window}: {out:?}");
                assert!((out[(token * 2 + head) * 2 + 1] - 1.0).abs() < 1e-6);
            }
        }
    }
}

/// The rows of one request of a batch.
fn rows_of(case: &Case, output: &Output, request: usize) -> (Vec<u8>, Vec<u32>) {
    let (start, end) = (case.query_start_loc[request] as usize, case.query_start_loc[request + 1] as usize);
    let row = case.num_heads * case.out_head_size();
    let out = output.out.part(start * row..end * row, 0).unwrap().to_le_bytes();
    let lse = output.lse.as_ref().unwrap();
    let tokens = case.num_tokens();
    let lse = (0..case.num_heads).flat_map(|head| lse[head * tokens + start..head * tokens + end].iter());
    (out, lse.map(|lse| lse.to_bits()).collect())
}

#[test]
fn a_row_does_not_depend_on_its_batch_nor_on_the_threads() {
    let requests = [(1, 40), (3, 2100), (30, 30), (1, 1100), (2, 7)];
    for path in ["absorbed", "expanded"] {
        for tokens in ["4096", "1024", "48"] {
            let backend = backend(&[("path", path), ("workspace_tokens", tokens)]).unwrap();
            for dtype in [Dtype::F32, Dtype::BF16] {
                for window in [0, 50] {
                    let whole = Case {
                        sliding_window: window,
                        sinks: vec![0.25; 4],
                        ..case(TINY, dtype, MlaForm::Auto, &requests, 5)
                    };
                    let together = run(&backend, &whole);
                    let single = execute(&backend, HostServices::inline(), &whole).unwrap();
                    assert!(together.same_bits(&single), "{path} {tokens}: threads");
                    for request in 0..requests.len() {
                        let alone = whole.alone(request).unwrap();
                        let output = run(&backend, &alone);
                        assert!(
                            rows_of(&whole, &together, request) == rows_of(&alone, &output, 0),
                            "{path} {tokens} {dtype:?} window {window}: request {request}"
                        );
                    }
                }
            }
        }
    }
}

/// The last `new` tokens of the first `all` of a case of one request.
fn chunk(whole: &Case, new: usize, all: usize) -> Case {
    let (q_row, k_row) = (whole.num_heads * whole.q_head_size(), whole.head_size);
    Case {
        q: whole.q.part((all - new) * q_row..all * q_row, 0).unwrap(),
        k: whole.k.part(0..all * k_row, 0).unwrap(),
        query_start_loc: vec![0, new as i32],
        seq_lens: vec![all as i32],
        ..whole.clone()
    }
}

#[test]
fn a_prompt_in_chunks_is_the_same_as_in_one_piece() {
    for path in ["absorbed", "expanded"] {
        for tokens in ["4096", "100"] {
            let backend = backend(&[("path", path), ("workspace_tokens", tokens)]).unwrap();
            for window in [0, 30] {
                let whole = Case {
                    sliding_window: window,
                    sinks: vec![0.0; 5],
                    ..case(ODD, Dtype::BF16, MlaForm::Auto, &[(260, 260)], 9)
                };
                let row = whole.num_heads * whole.out_head_size();
                let all = run_and_check(path, &backend, &whole).out;
                let mut done = 0;
                for new in [1, 64, 3, 100, 31, 60, 1] {
                    done += new;
                    let piece = run(&backend, &chunk(&whole, new, done)).out;
                    assert_eq!(piece, all.part((done - new) * row..done * row, 0).unwrap(), "{path} {tokens} {done}");
                }
                assert_eq!(done, 260);
            }
        }
    }
}
