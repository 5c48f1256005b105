//! One cache layout and one block size for all layers of a model.
//!
//! A single selection cannot see its peers; this step can, and revises automatic choices where they
//! do not meet. Pure: groups of layers in, an assignment or a conflict out.
//!
//! The search is exact: once layouts and block size are fixed, groups no longer depend on each
//! other and each takes its first option that accepts them; the combinations to try are few.
//!
//! Must not know: requests, verdicts, policy.

use crate::descriptor::BlockSizes;
use serde::Serialize;
use std::{cmp::Ordering, collections::BTreeSet};

/// The block size that is preferred where all backends take it.
pub const PREFERRED_BLOCK_SIZE: u32 = 16;
/// The largest block size that is tried.
const MAX_BLOCK_SIZE: u32 = 1 << 16;

/// Which layers must have the same cache layout.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheFamily {
    /// Keys and values per head.
    Heads,
    /// Latent rows.
    Latent,
}

/// A backend that a group of layers may run on.
#[derive(Clone, Copy, Debug)]
pub struct GroupOption<'a> {
    /// The backend's name.
    pub name: &'a str,
    /// Cache layouts, the preferred one first.
    pub layouts: &'a [String],
    /// Tokens of a block.
    pub block_sizes: &'a BlockSizes,
}

/// Layers that ask for the same.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// What to call it in a conflict, for instance `layers 0-5 (sliding_window)`.
    pub label: String,
    /// Number of layers.
    pub num_layers: usize,
    /// Which layers must have the same layout; absent = no cache.
    pub family: Option<CacheFamily>,
    /// Valid backends, the first choice first; an override leaves one.
    pub options: Vec<GroupOption<'a>>,
}

/// The best assignment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolution {
    /// For each group, which of its options.
    pub chosen: Vec<usize>,
    /// The layout of each family that occurs.
    pub layouts: Vec<(CacheFamily, String)>,
    /// Tokens of a block; absent when no group has a cache.
    pub block_size: Option<u32>,
}

/// No common layout and block size exist.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no common KV-cache layout and block size: {}", .groups.join("; "))]
pub struct LayoutConflict {
    /// A smallest set of groups that do not meet, and what each accepts.
    pub groups: Vec<String>,
}

/// Finds the assignment with the fewest layers moved off their first choice, then the least sum of
/// lost ranks over all layers, then the first in names.
///
/// # Errors
/// When there is none: names a smallest set of groups in conflict and what each accepts.
pub fn resolve(groups: &[Group<'_>], block_size: Option<u32>) -> Result<Resolution, LayoutConflict> {
    let all: Vec<&Group<'_>> = groups.iter().collect();
    search(&all, block_size).ok_or_else(|| conflict(groups, block_size))
}

/// What an assignment costs; the least one wins.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Cost<'a> {
    moved: usize,
    lost_ranks: usize,
    names: Vec<&'a str>,
    layout_preference: usize,
    block_size: (bool, u32),
}

fn search(groups: &[&Group<'_>], fixed_block_size: Option<u32>) -> Option<Resolution> {
    let cached = groups.iter().filter(|group| group.family.is_some());
    let block_sizes = match fixed_block_size {
        Some(size) => vec![size],
        None => block_size_candidates(cached.clone().flat_map(|group| &group.options).map(|option| option.block_sizes)),
    };
    let layouts = |family| -> Vec<Option<&str>> {
        let mut members = cached.clone().filter(|group| group.family == Some(family)).peekable();
        if members.peek().is_none() {
            return vec![None];
        }
        let names: BTreeSet<&str> =
            members.flat_map(|group| &group.options).flat_map(|option| option.layouts).map(String::as_str).collect();
        names.into_iter().map(Some).collect()
    };
    let (heads, latent) = (layouts(CacheFamily::Heads), layouts(CacheFamily::Latent));
    let mut best: Option<(Cost<'_>, Resolution)> = None;
    for block_size in block_sizes {
        for heads in &heads {
            for latent in &latent {
                let Some((cost, chosen)) = assign(groups, *heads, *latent, block_size) else { continue };
                if best.as_ref().is_none_or(|(least, _)| cost.cmp(least) == Ordering::Less) {
                    let families = [(CacheFamily::Heads, heads), (CacheFamily::Latent, latent)];
                    let layouts: Vec<_> =
                        families.into_iter().filter_map(|(f, name)| name.map(|name| (f, name.to_owned()))).collect();
                    let block_size = (!layouts.is_empty()).then_some(block_size);
                    best = Some((cost, Resolution { chosen, layouts, block_size }));
                }
            }
        }
    }
    best.map(|(_, resolution)| resolution)
}

/// Each group's first option that takes the layouts and the block size.
fn assign<'a>(
    groups: &[&Group<'a>],
    heads: Option<&str>,
    latent: Option<&str>,
    block_size: u32,
) -> Option<(Cost<'a>, Vec<usize>)> {
    let is_preferred = block_size == PREFERRED_BLOCK_SIZE;
    let mut cost = Cost {
        moved: 0,
        lost_ranks: 0,
        names: Vec::with_capacity(groups.len()),
        layout_preference: 0,
        block_size: (!is_preferred, block_size),
    };
    let mut chosen = Vec::with_capacity(groups.len());
    for group in groups {
        let layout = match group.family {
            Some(CacheFamily::Heads) => heads,
            Some(CacheFamily::Latent) => latent,
            None => None,
        };
        let accepts = |option: &GroupOption<'_>| {
            group.family.is_none()
                || (option.block_sizes.contains(block_size)
                    && option.layouts.iter().any(|name| Some(name.as_str()) == layout))
        };
        let index = group.options.iter().position(accepts)?;
        let option = &group.options[index];
        if index > 0 {
            cost.moved += group.num_layers;
        }
        cost.lost_ranks += index * group.num_layers;
        cost.names.push(option.name);
        let preference = option.layouts.iter().position(|name| Some(name.as_str()) == layout);
        cost.layout_preference += preference.unwrap_or(0) * group.num_layers;
        chosen.push(index);
    }
    Some((cost, chosen))
}

/// Every block size that can be the best: stated sizes, and the common multiples of stated steps.
fn block_size_candidates<'a>(all: impl Iterator<Item = &'a BlockSizes>) -> Vec<u32> {
    let mut exact = BTreeSet::new();
    let mut multiples = BTreeSet::from([PREFERRED_BLOCK_SIZE]);
    let mut steps = BTreeSet::new();
    for sizes in all {
        exact.extend(sizes.exact.iter().copied());
        steps.extend(sizes.multiples_of.iter().copied().filter(|step| *step != 0));
    }
    // Closed under the least common multiple: one step of each backend at a time.
    for step in steps {
        let more: Vec<u32> =
            multiples.iter().map(|size| least_common_multiple(*size, step)).chain([Some(step)]).flatten().collect();
        multiples.extend(more);
    }
    exact.extend(multiples);
    exact.into_iter().filter(|size| *size != 0 && *size <= MAX_BLOCK_SIZE).collect()
}

fn least_common_multiple(a: u32, b: u32) -> Option<u32> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b).filter(|size| *size <= MAX_BLOCK_SIZE)
}

fn conflict(groups: &[Group<'_>], block_size: Option<u32>) -> LayoutConflict {
    let cached: Vec<&Group<'_>> = groups.iter().filter(|group| group.family.is_some()).collect();
    // Leave out every group without which the rest still does not meet.
    let mut left = cached;
    let mut at = 0;
    while at < left.len() {
        let mut fewer = left.clone();
        fewer.remove(at);
        if !fewer.is_empty() && search(&fewer, block_size).is_none() {
            left = fewer;
        } else {
            at += 1;
        }
    }
    LayoutConflict { groups: left.into_iter().map(|group| accepts(group, block_size)).collect() }
}

fn accepts(group: &Group<'_>, block_size: Option<u32>) -> String {
    let options: Vec<String> = group
        .options
        .iter()
        .map(|option| {
            let layouts = match option.layouts {
                [] => "no layout".to_owned(),
                names => format!("layout {}", names.join(" or ")),
            };
            format!("{} takes {layouts}, block size {}", option.name, option.block_sizes)
        })
        .collect();
    let asked = block_size.map(|size| format!(" (block_size {size} is fixed)")).unwrap_or_default();
    match options.as_slice() {
        [] => format!("{}: no backend{asked}", group.label),
        options => format!("{}: {}{asked}", group.label, options.join(", ")),
    }
}

#[cfg(test)]
#[path = "joint_tests.rs"]
mod tests;
