//! `attache matrix`: what each backend claims, side by side.

use crate::{
    arguments::{Common, Matrix, MatrixFormat},
    exit::Outcome,
    output, setup,
};
use attache_core::{BackendDescriptor, NumberRule, Support, descriptor::feature, selector::Candidate};
use std::fmt::Write as _;

/// One property of a backend.
struct Column {
    name: &'static str,
    text: fn(&BackendDescriptor) -> String,
}

fn list(items: impl IntoIterator<Item = impl ToString>) -> String {
    let all: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    if all.is_empty() { "–".to_owned() } else { all.join(", ") }
}

fn numbers(rules: &[NumberRule]) -> String {
    list(rules.iter().map(|rule| match rule {
        NumberRule::Exact(number) => number.to_string(),
        NumberRule::Range(range) => {
            let step = range.multiple_of.filter(|step| *step > 1).map(|step| format!(" in steps of {step}"));
            let bounds = match (range.min, range.max) {
                (None | Some(0 | 1), None) => "any".to_owned(),
                (min, None) => format!("from {}", min.unwrap_or(1)),
                (min, Some(max)) => format!("{}–{max}", min.unwrap_or(1)),
            };
            format!("{bounds}{}", step.unwrap_or_default())
        }
    }))
}

fn support(support: Support) -> String {
    match support {
        Support::No => "no",
        Support::Only => "only",
        Support::Both => "both",
    }
    .to_owned()
}

const COLUMNS: &[Column] = &[
    Column { name: "platform", text: |d| list(&d.platforms) },
    Column { name: "dtypes", text: |d| list(&d.capability.dtypes) },
    Column { name: "KV dtypes", text: |d| list(&d.capability.kv_cache_dtypes) },
    Column { name: "head sizes", text: |d| numbers(&d.capability.head_sizes) },
    Column {
        name: "value head sizes",
        text: |d| d.capability.head_sizes_v.as_deref().map_or_else(|| "as keys".to_owned(), numbers),
    },
    Column {
        name: "query heads per KV head",
        text: |d| d.capability.gqa_ratios.as_deref().map_or_else(|| "1".to_owned(), numbers),
    },
    Column { name: "block sizes", text: |d| d.capability.block_sizes.to_string() },
    Column { name: "layouts", text: |d| list(&d.capability.layouts) },
    Column { name: "attention types", text: |d| list(&d.capability.attn_types) },
    Column { name: "MLA", text: |d| support(d.capability.mla) },
    Column { name: "sparse", text: |d| support(d.capability.sparse) },
];

/// Properties as rows, backends as columns: there are more properties than backends.
fn rows(candidates: &[Candidate]) -> Vec<Vec<String>> {
    let row = |name: &str, text: &dyn Fn(&BackendDescriptor) -> String| {
        let cells = candidates.iter().map(|candidate| text(&candidate.descriptor));
        std::iter::once(name.to_owned()).chain(cells).collect()
    };
    let mut rows: Vec<Vec<String>> = COLUMNS.iter().map(|column| row(column.name, &column.text)).collect();
    rows.extend(feature::ALL.iter().map(|name| {
        let text = |d: &BackendDescriptor| if d.capability.features.contains(*name) { "yes" } else { "no" }.to_owned();
        row(&name.replace('_', " "), &text)
    }));
    rows
}

pub fn run(common: &Common, flags: &Matrix) -> Outcome {
    let (_, registry) = setup::registry(common)?;
    let mut candidates = registry.candidates();
    candidates.sort_by(|a, b| (a.name(), &a.source).cmp(&(b.name(), &b.source)));
    if common.json {
        let descriptors: Vec<&BackendDescriptor> =
            candidates.iter().map(|candidate| candidate.descriptor.as_ref()).collect();
        output::json(&descriptors)?;
        return Ok(());
    }
    let mut header = vec!["".to_owned()];
    header.extend(candidates.iter().map(|candidate| candidate.name().to_owned()));
    let rows = rows(&candidates);
    match flags.format {
        MatrixFormat::Terminal => {
            let mut table = output::table(&header.iter().map(String::as_str).collect::<Vec<_>>());
            rows.into_iter().for_each(|row| {
                table.add_row(row);
            });
            output::line(table)?;
        }
        MatrixFormat::Markdown => output::now(&markdown(&header, &rows))?,
        MatrixFormat::Html => output::now(&html(&header, &rows))?,
    }
    Ok(())
}

fn markdown(header: &[String], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| {
        format!("| {} |\n", cells.iter().map(|cell| cell.replace('|', "\\|")).collect::<Vec<_>>().join(" | "))
    };
    let rule = header.iter().map(|_| "---".to_owned()).collect::<Vec<_>>();
    rows.iter().fold(line(header) + &line(&rule), |text, row| text + &line(row))
}

fn html(header: &[String], rows: &[Vec<String>]) -> String {
    let escape = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let mut text = String::from("<!doctype html>\n<meta charset=\"utf-8\">\n<title>Backends</title>\n<table>\n");
    for (tag, row) in std::iter::once(("th", header)).chain(rows.iter().map(|row| ("td", row.as_slice()))) {
        let cells: String = row.iter().fold(String::new(), |mut cells, cell| {
            // Writing to a string cannot fail.
            let _ = write!(cells, "<{tag}>{}</{tag}>", escape(cell));
            cells
        });
        text += &format!("<tr>{cells}</tr>\n");
    }
    text + "</table>\n"
}
