//! Where things lie does not matter: blocks that were copied and moved, and views with strides,
//! give the same bits.
//!
//! Must not know what a right result is: it compares with the result before.

use super::{Recorder, checks};
use crate::{
    case::Case,
    execute::{Output, Session},
    values::Values,
};
use attache_core::{
    BackendError, ErrorCode, TensorView, TensorViewMut,
    runtime::{Backend, HostServices, KvCache, Plan},
};
use std::sync::Arc;

pub(super) fn run(backend: &Arc<Backend>, host: HostServices, plain: &Case, recorder: &mut Recorder<'_>) {
    let opened = Session::new(backend, host, plain).and_then(|mut session| {
        let plan = session.plan()?;
        let before = session.run(&plan)?;
        Ok((session, plan, before))
    });
    let (mut session, plan, before) = match opened {
        Ok(opened) => opened,
        Err(error) => return recorder.record(checks::BLOCKS, Some(plain), "a plain case", Err(error.to_string())),
    };
    let strided = strided(&mut session, &plan, &before);
    report(recorder, checks::STRIDES, plain, "q and out with strides", strided);
    if session.cache.is_some() {
        let moved = moved(&mut session, &before);
        report(recorder, checks::BLOCKS, plain, "swap_blocks and copy_blocks", moved);
    }
}

/// What a backend does not offer is skipped, as long as it says so.
fn report(
    recorder: &mut Recorder<'_>,
    check: &'static str,
    plain: &Case,
    what: &str,
    outcome: Result<bool, BackendError>,
) {
    match outcome {
        Ok(true) => recorder.record(check, Some(plain), what, Ok(())),
        Ok(false) => recorder.record(check, Some(plain), what, Err("the result has other bits".to_owned())),
        Err(error) if error.code == ErrorCode::Unsupported => recorder.skip(check),
        Err(error) => recorder.record(check, Some(plain), what, Err(error.to_string())),
    }
}

fn text(error: impl std::fmt::Display) -> BackendError {
    BackendError::new(ErrorCode::Internal, error.to_string())
}

/// Moves the cache into a larger one and each block to another place.
fn moved(session: &mut Session<'_>, before: &Output) -> Result<bool, BackendError> {
    let n = session.paging.num_blocks;
    let Some(cache) = session.cache.take() else { return Ok(true) };
    let mut larger = KvCache::allocate(&session.spec, 2 * n).map_err(text)?;
    let pairs = |offset: i64| (0..n as i64).flat_map(|id| [id, id + offset]).collect::<Vec<_>>();
    let (same, away) = (pairs(0), pairs(n as i64));
    session.layer.swap_blocks(&mut session.context, &cache, &mut larger, &TensorView::from_slice(&same, &[n, 2])?)?;
    session.layer.copy_blocks(&mut session.context, &mut larger, &TensorView::from_slice(&away, &[n, 2])?)?;
    session.cache = Some(larger);
    session.paging.num_blocks = 2 * n;
    for id in &mut session.paging.table {
        if (0..n as i32).contains(id) {
            *id += n as i32;
        }
    }
    let plan = session.plan().map_err(text)?;
    Ok(session.run(&plan).map_err(text)?.same_bits(before))
}

/// Rows and heads with gaps between them, which hold NaN.
fn strided(session: &mut Session<'_>, plan: &Plan, before: &Output) -> Result<bool, BackendError> {
    const GAP: usize = 5;
    let case = session.case;
    let (tokens, heads, dtype) = (case.num_tokens(), case.num_heads, case.dtype());
    let strides = |size: usize| (heads * (size + GAP) + GAP, size + GAP);
    let places = |size: usize| {
        let (row, head_stride) = strides(size);
        (0..tokens * heads * size)
            .map(move |index| index / (heads * size) * row + index / size % heads * head_stride + index % size)
    };
    let abi = |size: usize| {
        let (row, head) = strides(size);
        [row as i64, head as i64, 1]
    };
    let (q_size, out_size) = (case.q_head_size(), case.out_head_size());
    let mut spread = vec![f64::NAN; tokens * strides(q_size).0];
    for (place, number) in places(q_size).zip(case.q.to_f64()) {
        spread[place] = number;
    }
    let q = Values::from_f64(dtype, spread);
    let mut out = Values::nan(dtype, tokens * strides(out_size).0);
    let mut lse = case.lse.then(|| vec![f32::NAN; heads * tokens]);
    let lse_view = match &mut lse {
        Some(lse) => Some(TensorViewMut::from_slice(lse, &[heads, tokens])?),
        None => None,
    };
    session.forward(
        plan,
        q.strided(&[tokens, heads, q_size], &abi(q_size))?,
        out.strided_mut(&[tokens, heads, out_size], &abi(out_size))?,
        lse_view,
    )?;
    let all = out.to_f64();
    let written = Values::from_f64(dtype, places(out_size).map(|place| all[place]));
    let gaps_are_nan = all.iter().filter(|number| number.is_nan()).count() == all.len() - written.len();
    Ok(gaps_are_nan && Output { out: written, lse, ..before.clone() }.same_bits(before))
}
