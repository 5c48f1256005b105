//! `attache explain`: how one layer's backend is chosen.

use crate::{
    arguments::{Common, Explain},
    exit::{Failure, Outcome},
    output, setup,
};
use attache_core::{AttentionType, Kind, LayerRequest, StateSpaceType, policy::nearest, selector::Explanation};

/// The request that the flags describe.
pub fn request(flags: &Explain) -> Result<LayerRequest, Failure> {
    Ok(LayerRequest {
        head_size: flags.head_size,
        dtype: setup::dtype(&flags.dtype)?,
        kv_cache_dtype: flags.kv_cache_dtype.as_deref().map(setup::kv_cache_dtype).transpose()?,
        block_size: flags.block_size,
        use_mla: flags.use_mla,
        has_sink: flags.has_sink,
        use_sparse: flags.use_sparse,
        use_mm_prefix: flags.use_mm_prefix,
        use_per_head_quant_scales: flags.use_per_head_quant_scales,
        attn_type: AttentionType::parse(&flags.attn_type),
        num_heads: flags.num_heads,
        has_sliding_window: flags.has_sliding_window,
        use_non_causal: flags.use_non_causal,
        use_batch_invariant: flags.use_batch_invariant,
        use_kv_connector: flags.use_kv_connector,
        use_pcp: flags.use_pcp,
        use_dcp: flags.use_dcp,
        use_adaptive_verification: flags.use_adaptive_verification,
        use_rswa: flags.use_rswa,
        head_size_v: flags.head_size_v,
        num_kv_heads: flags.num_kv_heads,
        has_softcap: flags.has_softcap,
        has_alibi: flags.has_alibi,
        chunked_local: flags.chunked_local,
        needs_lse: flags.needs_lse,
        state_space: flags.state_space.as_deref().map(state_space).transpose()?,
    })
}

fn state_space(name: &str) -> Result<StateSpaceType, Failure> {
    StateSpaceType::parse(name).ok_or_else(|| {
        let valid = StateSpaceType::ALL.map(StateSpaceType::name);
        Failure::usage(format!("--state-space '{name}'; valid: {}", valid.join(", ")))
    })
}

fn kind(name: &str) -> Result<Kind, Failure> {
    Kind::parse(name).ok_or_else(|| {
        let valid = Kind::ALL.map(Kind::name);
        let hint = nearest(name, valid).map(|near| format!("; did you mean '{near}'?")).unwrap_or_default();
        Failure::usage(format!("--kind '{name}'; valid: {}{hint}", valid.join(", ")))
    })
}

pub fn run(common: &Common, flags: &Explain) -> Outcome {
    let request = request(flags)?;
    let kind = flags.kind.as_deref().map(kind).transpose()?;
    let (_, registry) = setup::registry(common)?;
    let explanation = registry.explain(&request, kind);
    if common.json {
        output::json(&explanation)?;
    } else {
        print(&explanation)?;
    }
    match explanation.result() {
        Ok(_) => Ok(()),
        Err(error) => {
            let hints = registry.hints(&error);
            let failure = Failure::from(error.clone());
            Err(if hints.is_empty() {
                failure
            } else {
                Failure::new(crate::exit::Code::NothingSuitable, format!("{error}{hints}"))
            })
        }
    }
}

fn print(explanation: &Explanation) -> Outcome {
    let what_if = explanation.what_if();
    let kind = explanation.kind.map_or("unknown", Kind::name);
    if let Ok(chosen) = explanation.result() {
        output::line(format!("{} for {kind} on {}: {}", chosen.name(), explanation.device, explanation.why))?;
    }
    let mut table = output::table(&["rank", "backend", "version", "source", "reasons", "would be admitted by"]);
    for candidate in &explanation.candidates {
        let changes = what_if.iter().find(|(other, _)| other.index == candidate.index);
        let changes =
            changes.map(|(_, changes)| changes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and "));
        table.add_row([
            candidate.rank.map_or_else(|| "-".to_owned(), |rank| rank.to_string()),
            candidate.name().to_owned(),
            candidate.plugin.version.to_string(),
            candidate.source.to_string(),
            if candidate.is_valid() { "valid".to_owned() } else { candidate.reasons.join(", ") },
            changes.unwrap_or_default(),
        ]);
    }
    if !explanation.candidates.is_empty() {
        output::line(table)?;
    }
    output::warnings(&explanation.warnings);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_field_of_a_request_has_a_flag() {
        let full = LayerRequest {
            kv_cache_dtype: Some(attache_core::KvCacheDtype::AUTO),
            block_size: Some(1),
            num_heads: Some(1),
            num_kv_heads: Some(1),
            head_size_v: Some(1),
            ..LayerRequest::default()
        };
        let serde_json::Value::Object(fields) = serde_json::to_value(full).unwrap() else { panic!("an object") };
        let command = crate::arguments::Arguments::command();
        let explain = command.find_subcommand("explain").unwrap();
        for field in fields.keys() {
            let flag = field.replace('_', "-");
            assert!(explain.get_arguments().any(|a| a.get_long() == Some(&flag)), "no flag --{flag}");
        }
    }
}
