//! What an operator set for a plugin, checked against what its backends declare.

use crate::{
    descriptor::{BackendDescriptor, OptionSpec, OptionType},
    policy::{did_you_mean, nearest},
};
use std::{collections::BTreeSet, sync::Arc};

/// Why an option cannot be used; `None` = all can. An option counts for each backend that declares it.
pub(super) fn problem(options: &[(String, String)], backends: &[Arc<BackendDescriptor>]) -> Option<String> {
    options.iter().find_map(|(name, value)| {
        let mut specs = backends.iter().filter_map(|backend| backend.options.get(name)).peekable();
        if specs.peek().is_none() {
            return Some(unknown(name, backends));
        }
        let expected = specs.find_map(|spec| expectation(spec, value))?;
        Some(format!("option {name} = '{value}': must be {expected}"))
    })
}

fn unknown(name: &str, backends: &[Arc<BackendDescriptor>]) -> String {
    let valid: BTreeSet<&str> =
        backends.iter().flat_map(|backend| backend.options.keys()).map(String::as_str).collect();
    let hint = did_you_mean(nearest(name, valid.iter().copied()));
    let valid = if valid.is_empty() { "none".to_owned() } else { valid.into_iter().collect::<Vec<_>>().join(", ") };
    format!("the plugin has no option '{name}'; valid: {valid}{hint}")
}

/// What would be right, when the value is not.
fn expectation(spec: &OptionSpec, value: &str) -> Option<String> {
    let (of_type, expected) = match spec.option_type {
        OptionType::Bool => (value.parse::<bool>().is_ok(), "true or false"),
        OptionType::Integer => (value.parse::<i64>().is_ok(), "a whole number"),
        OptionType::Number => (value.parse::<f64>().is_ok_and(f64::is_finite), "a number"),
        OptionType::String => (true, "text"),
    };
    if !of_type {
        return Some(expected.to_owned());
    }
    let choice = spec.choices.is_empty() || spec.choices.iter().any(|choice| choice == value);
    (!choice).then(|| format!("one of {}", spec.choices.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_of_their_type_and_one_of_the_choices() {
        let spec = |option_type, choices: &[&str]| OptionSpec {
            option_type,
            choices: choices.iter().map(|choice| (*choice).to_owned()).collect(),
            ..OptionSpec::default()
        };
        let backend = BackendDescriptor::builder("X")
            .option("fast", spec(OptionType::Bool, &[]))
            .option("tile", spec(OptionType::Integer, &["16", "32"]))
            .option("share", spec(OptionType::Number, &[]))
            .option("isa", spec(OptionType::String, &["avx2", "avx512"]))
            .build();
        let backends = [Arc::new(backend)];
        for (name, value, expected) in [
            ("fast", "true", None),
            ("fast", "yes", Some("option fast = 'yes': must be true or false")),
            ("tile", "32", None),
            ("tile", "8", Some("option tile = '8': must be one of 16, 32")),
            ("tile", "1.5", Some("option tile = '1.5': must be a whole number")),
            ("share", "0.5", None),
            ("share", "NaN", Some("option share = 'NaN': must be a number")),
            ("isa", "sse", Some("option isa = 'sse': must be one of avx2, avx512")),
            (
                "tiles",
                "8",
                Some("the plugin has no option 'tiles'; valid: fast, isa, share, tile; did you mean 'tile'?"),
            ),
        ] {
            let found = problem(&[(name.to_owned(), value.to_owned())], &backends);
            assert_eq!(found.as_deref(), expected, "{name} = {value}");
        }
        assert_eq!(problem(&[], &backends), None);
    }
}
