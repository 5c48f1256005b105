//! What breaks the contract is refused, and nothing is written then.
//!
//! Must not know what a right result is: it compares with the result before.

use super::{Recorder, checks};
use crate::{
    case::Case,
    execute::{Lists, Output, Session},
    values::Values,
};
use attache_core::{
    BackendError, Dtype, ErrorCode, TensorView,
    runtime::{Backend, HostServices, Plan},
};
use std::sync::Arc;

pub(super) fn run(backend: &Arc<Backend>, host: HostServices, plain: &Case, recorder: &mut Recorder<'_>) {
    let mut record =
        |what: &str, outcome: Result<(), String>| recorder.record(checks::BAD_INPUT, Some(plain), what, outcome);
    let opened = Session::new(backend, host, plain).and_then(|mut session| {
        let plan = session.plan()?;
        let before = session.run(&plan)?;
        Ok((session, plan, before))
    });
    let (mut session, mut plan, before) = match opened {
        Ok(opened) => opened,
        Err(error) => return record("a plain case", Err(error.to_string())),
    };
    batches(&mut session, &mut plan, &mut record);
    record("the plan after refused updates", unchanged(&mut session, &plan, &before));
    calls(&mut session, &plan, &mut record);
    writes(&mut session, &mut record);
    record("the cache after refused writes", unchanged(&mut session, &plan, &before));
}

fn refused(outcome: Result<(), BackendError>) -> Result<(), String> {
    match outcome {
        Ok(()) => Err("accepted".to_owned()),
        Err(error) if error.code == ErrorCode::Panic => Err(error.to_string()),
        Err(_) => Ok(()),
    }
}

fn unchanged(session: &mut Session<'_>, plan: &Plan, before: &Output) -> Result<(), String> {
    let after = session.run(plan).map_err(|error| error.to_string())?;
    if after.same_bits(before) { Ok(()) } else { Err("something was written: the result has other bits".to_owned()) }
}

/// Batches that `plan` and `update` must refuse.
fn batches(session: &mut Session<'_>, plan: &mut Plan, record: &mut dyn FnMut(&str, Result<(), String>)) {
    let case = session.case;
    let good = Lists::of(case, &session.paging);
    let mut bad: Vec<(String, Lists)> = Vec::new();
    let mut add = |what: &str, change: &dyn Fn(&mut Lists)| {
        let mut lists = good.clone();
        change(&mut lists);
        bad.push((what.to_owned(), lists));
    };
    add("query_start_loc that starts with 1", &|lists| lists.query_start_loc[0] = 1);
    add("query_start_loc that falls", &|lists| {
        lists.query_start_loc[1] = lists.query_start_loc.last().map_or(1, |last| last + 1);
    });
    add("query_start_loc that is negative", &|lists| lists.query_start_loc[1] = -1);
    add("query_start_loc that is too long", &|lists| lists.query_start_loc.push(i32::MAX));
    add("a negative length", &|lists| lists.seq_lens[0] = -1);
    if good.table.is_some() {
        let owner = (0..case.num_requests()).find(|request| !case.kv_range(*request).is_empty()).unwrap_or(0);
        for id in [-1, good.num_blocks as i32, i32::MAX, i32::MIN] {
            add(&format!("block id {id} of {}", good.num_blocks), &move |lists| {
                let at = owner * lists.width;
                if let Some(entry) = lists.table.as_mut().and_then(|table| table.get_mut(at)) {
                    *entry = id;
                }
            });
        }
        add("a length beyond the block table", &|lists| lists.seq_lens[0] = i32::MAX);
    }
    for (what, lists) in bad {
        let planned = lists.with_batch(case, |batch| session.layer.plan(batch).map(drop));
        record(&format!("plan: {what}"), refused(planned));
        let updated = lists.with_batch(case, |batch| plan.update(batch));
        record(&format!("update: {what}"), refused(updated));
    }
}

/// A shape and an element type.
type Form = (Vec<usize>, Dtype);
/// Those of q, out and lse.
type Forms = (Form, Form, Option<Form>);

fn patterned((shape, dtype): &Form) -> Values {
    Values::from_f64(*dtype, (0..shape.iter().product::<usize>()).map(|index| -7.0 - (index % 5) as f64))
}

/// Calls that `forward` must refuse.
fn calls(session: &mut Session<'_>, plan: &Plan, record: &mut dyn FnMut(&str, Result<(), String>)) {
    let case = session.case;
    let (tokens, heads) = (case.num_tokens(), case.num_heads);
    let (q_size, out_size, dtype) = (case.q_head_size(), case.out_head_size(), case.dtype());
    let other = if dtype == Dtype::F32 { Dtype::BF16 } else { Dtype::F32 };
    let (q, out, lse) = (vec![tokens, heads, q_size], vec![tokens, heads, out_size], vec![heads, tokens]);
    let lse_form = case.lse.then(|| (lse.clone(), Dtype::F32));
    let with = |shape: &[usize], index: usize, size: usize| {
        let mut shape = shape.to_vec();
        shape[index] = size;
        shape
    };
    let good = ((q.clone(), dtype), (out.clone(), dtype), lse_form.clone());
    let mut bad: Vec<(&str, Forms)> = vec![
        ("q of another dtype", ((q.clone(), other), good.1.clone(), lse_form.clone())),
        ("q with a token less", ((with(&q, 0, tokens.saturating_sub(1)), dtype), good.1.clone(), lse_form.clone())),
        ("q with a token more", ((with(&q, 0, tokens + 1), dtype), good.1.clone(), lse_form.clone())),
        ("q with a head more", ((with(&q, 1, heads + 1), dtype), good.1.clone(), lse_form.clone())),
        ("q with larger heads", ((with(&q, 2, q_size + 1), dtype), good.1.clone(), lse_form.clone())),
        ("q of two dimensions", ((vec![tokens, heads * q_size], dtype), good.1.clone(), lse_form.clone())),
        ("out of another dtype", (good.0.clone(), (out.clone(), other), lse_form.clone())),
        ("out with a token less", (good.0.clone(), (with(&out, 0, tokens.saturating_sub(1)), dtype), lse_form.clone())),
        ("out with a head more", (good.0.clone(), (with(&out, 1, heads + 1), dtype), lse_form.clone())),
        ("out with larger heads", (good.0.clone(), (with(&out, 2, out_size + 1), dtype), lse_form.clone())),
    ];
    if case.lse {
        let lse_of = |shape: Vec<usize>, dtype: Dtype| (good.0.clone(), good.1.clone(), Some((shape, dtype)));
        bad.push(("lse of another dtype", lse_of(lse.clone(), Dtype::BF16)));
        bad.push(("lse with a token less", lse_of(with(&lse, 1, tokens.saturating_sub(1)), Dtype::F32)));
        bad.push(("lse with a head more", lse_of(with(&lse, 0, heads + 1), Dtype::F32)));
    }
    for (what, forms) in bad {
        record(&format!("forward: {what}"), attempt(session, plan, &forms));
    }
    if let Some(cache) = session.cache.take() {
        record("forward: no cache", attempt(session, plan, &good));
        session.cache = Some(cache);
    }
}

/// A call with tensors of these forms: it must be refused, and write nothing.
fn attempt(session: &mut Session<'_>, plan: &Plan, (q, out, lse): &(Form, Form, Option<Form>)) -> Result<(), String> {
    let (q_values, mut out_values) = (patterned(q), patterned(out));
    let mut lse_values = lse.as_ref().map(patterned);
    let mut call = || -> Result<(), BackendError> {
        let lse = match (&mut lse_values, lse) {
            (Some(values), Some((shape, _))) => Some(values.view_mut(shape)?),
            _ => None,
        };
        session.forward(plan, q_values.view(&q.0)?, out_values.view_mut(&out.0)?, lse)
    };
    refused(call())?;
    if out_values != patterned(out) {
        return Err("refused, but out was written".to_owned());
    }
    if lse_values != lse.as_ref().map(patterned) {
        return Err("refused, but lse was written".to_owned());
    }
    Ok(())
}

/// Writes that `write_kv` and `copy_blocks` must refuse; each holds good tokens before the bad one.
fn writes(session: &mut Session<'_>, record: &mut dyn FnMut(&str, Result<(), String>)) {
    let case = session.case;
    let owner = (0..case.num_requests()).max_by_key(|request| case.kv_range(*request).len()).unwrap_or(0);
    let tokens = case.kv_range(owner).len().min(4);
    let Some(mut cache) = session.cache.take().filter(|_| tokens > 1) else { return };
    let slots: Vec<i64> = (0..tokens).map(|position| session.paging.slot(owner, position)).collect();
    let slots_in_all = (session.paging.num_blocks * session.paging.block_size) as i64;
    let (heads, size, size_v, dtype) = (case.num_kv_heads, case.head_size, case.head_size_v, case.dtype());
    let is_mla = case.mla.is_some();
    let k_shape = |tokens: usize| if is_mla { vec![tokens, size] } else { vec![tokens, heads, size] };
    let v_form = || (!is_mla).then(|| (vec![tokens, heads, size_v], dtype));
    let other = if dtype == Dtype::F32 { Dtype::BF16 } else { Dtype::F32 };
    let larger = |mut shape: Vec<usize>| {
        *shape.last_mut().unwrap_or(&mut 0) += 1;
        shape
    };
    let with_last = |slot: i64| {
        let mut slots = slots.clone();
        slots[tokens - 1] = slot;
        slots
    };
    let k = (k_shape(tokens), dtype);
    let mut bad: Vec<(String, Form, Option<Form>, Vec<i64>)> = vec![
        ("k of another dtype".into(), (k_shape(tokens), other), v_form(), slots.clone()),
        ("k with larger heads".into(), (larger(k_shape(tokens)), dtype), v_form(), slots.clone()),
        ("k with a token less".into(), (k_shape(tokens - 1), dtype), v_form(), slots.clone()),
        ("a slot mapping that is too short".into(), k.clone(), v_form(), slots[1..].to_vec()),
    ];
    for slot in [slots_in_all, -2, i64::MAX, i64::MIN] {
        bad.push((format!("slot {slot} of {slots_in_all}"), k.clone(), v_form(), with_last(slot)));
    }
    if is_mla {
        bad.push(("v for a latent cache".into(), k.clone(), Some((vec![tokens, 1, size_v], dtype)), slots.clone()));
    } else {
        bad.push(("no v".into(), k.clone(), None, slots.clone()));
        bad.push(("v of another dtype".into(), k.clone(), Some((vec![tokens, heads, size_v], other)), slots.clone()));
        bad.push((
            "v with a head more".into(),
            k.clone(),
            Some((vec![tokens, heads + 1, size_v], dtype)),
            slots.clone(),
        ));
    }
    for (what, k, v, slots) in bad {
        let (k_values, v_values) = (patterned(&k), v.as_ref().map(patterned));
        let mut write = || -> Result<(), BackendError> {
            let v_view = match (&v_values, &v) {
                (Some(values), Some((shape, _))) => Some(values.view(shape)?),
                _ => None,
            };
            let mapping = TensorView::from_slice(&slots, &[slots.len()])?;
            session.layer.write_kv(&mut session.context, &k_values.view(&k.0)?, v_view.as_ref(), &mapping, &mut cache)
        };
        record(&format!("write_kv: {what}"), refused(write()));
    }
    // The first pair would overwrite a block in use with one that holds NaN.
    let used = slots[0] / session.paging.block_size as i64;
    let unused = (0..session.paging.num_blocks as i64).find(|id| !session.paging.uses(*id)).unwrap_or(0);
    for block in [-1, session.paging.num_blocks as i64, i64::MAX] {
        let pairs = [unused, used, block, used];
        let mut copy = || {
            let pairs = TensorView::from_slice(&pairs, &[2, 2])?;
            session.layer.copy_blocks(&mut session.context, &mut cache, &pairs)
        };
        record(&format!("copy_blocks: block {block}"), refused(copy()));
    }
    session.cache = Some(cache);
}
