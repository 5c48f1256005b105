use super::*;
use proptest::prelude::*;

fn layouts(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[derive(Debug)]
struct Backend {
    name: String,
    layouts: Vec<String>,
    block_sizes: BlockSizes,
}

fn backend(name: &str, names: &[&str], block_sizes: BlockSizes) -> Backend {
    Backend { name: name.to_owned(), layouts: layouts(names), block_sizes }
}

fn group<'a>(label: &str, num_layers: usize, options: &[&'a Backend]) -> Group<'a> {
    let options = options
        .iter()
        .map(|b| GroupOption { name: &b.name, layouts: &b.layouts, block_sizes: &b.block_sizes })
        .collect();
    Group { label: label.to_owned(), num_layers, family: Some(CacheFamily::Heads), options }
}

#[test]
fn the_block_size_is_common_whatever_the_order() {
    let any = backend("ANY", &["head_major"], BlockSizes::multiples_of(1));
    let only_64 = backend("ONLY_64", &["head_major"], BlockSizes::exact([64]));
    for order in [[&any, &only_64], [&only_64, &any]] {
        let groups = [group("a", 1, &[order[0]]), group("b", 1, &[order[1]])];
        assert_eq!(resolve(&groups, None).unwrap().block_size, Some(64));
        let error = resolve(&groups, Some(16)).unwrap_err().to_string();
        assert!(error.contains("ONLY_64 takes layout head_major, block size 64"), "{error}");
        assert!(!error.contains("ANY"), "only the one in the way is named: {error}");
    }
    let step_24 = backend("STEP_24", &["head_major"], BlockSizes::multiples_of(24));
    let step_36 = backend("STEP_36", &["head_major"], BlockSizes::multiples_of(36));
    let groups = [group("a", 1, &[&step_24]), group("b", 1, &[&step_36])];
    assert_eq!(resolve(&groups, None).unwrap().block_size, Some(72));
}

#[test]
fn the_fewest_layers_move_and_conflicts_are_named() {
    let a = backend("A", &["x"], BlockSizes::multiples_of(16));
    let b = backend("B", &["y"], BlockSizes::multiples_of(16));
    let c = backend("C", &["x", "y"], BlockSizes::multiples_of(16));
    let groups = [group("few", 2, &[&a, &c]), group("many", 10, &[&b, &c])];
    let found = resolve(&groups, None).unwrap();
    assert_eq!(found.chosen, [1, 0]);
    assert_eq!(found.layouts, [(CacheFamily::Heads, "y".to_owned())]);
    let apart = [group("few", 2, &[&a]), group("free", 3, &[&c]), group("many", 10, &[&b])];
    let error = resolve(&apart, None).unwrap_err();
    assert_eq!(error.groups.len(), 2, "{error}");
    assert!(error.to_string().contains("few") && error.to_string().contains("many"), "{error}");
}

#[test]
fn families_and_layers_without_a_cache_do_not_meet() {
    let heads = backend("HEADS", &["head_major"], BlockSizes::multiples_of(16));
    let latent = backend("LATENT", &["latent"], BlockSizes::multiples_of(1));
    let nothing = backend("NO_CACHE", &[], BlockSizes::default());
    let groups = [
        group("a", 1, &[&heads]),
        Group { family: Some(CacheFamily::Latent), ..group("b", 1, &[&latent]) },
        Group { family: None, ..group("c", 1, &[&nothing]) },
    ];
    let found = resolve(&groups, None).unwrap();
    assert_eq!(found.layouts.len(), 2);
    assert_eq!(found.block_size, Some(16));
    assert_eq!(resolve(&groups[2..], None).unwrap().block_size, None);
}

fn any_backend(index: usize) -> impl Strategy<Value = Backend> {
    let sizes = prop_oneof![
        prop::sample::select(vec![1_u32, 8, 16, 24, 64]).prop_map(BlockSizes::multiples_of),
        prop::collection::vec(prop::sample::select(vec![16_u32, 32, 48, 64]), 1..3).prop_map(BlockSizes::exact),
    ];
    (prop::sample::subsequence(vec!["x", "y", "z"], 0..=3), sizes)
        .prop_map(move |(names, sizes)| backend(&format!("B{index}"), &names, sizes))
}

proptest! {
    /// Against all assignments, one by one.
    #[test]
    fn nothing_is_better_than_what_is_found(
        backends in (any_backend(0), any_backend(1), any_backend(2), any_backend(3)),
        shapes in prop::collection::vec((1_usize..5, prop::collection::vec(0_usize..4, 1..4)), 1..4),
    ) {
        let backends = [&backends.0, &backends.1, &backends.2, &backends.3];
        let groups: Vec<Group<'_>> = shapes
            .iter()
            .map(|(layers, options)| group("g", *layers, &options.iter().map(|i| backends[*i]).collect::<Vec<_>>()))
            .collect();
        let cost = |chosen: &[usize]| {
            let moved: usize = chosen.iter().zip(&groups).filter(|(i, _)| **i > 0).map(|(_, g)| g.num_layers).sum();
            let lost: usize = chosen.iter().zip(&groups).map(|(i, g)| i * g.num_layers).sum();
            (moved, lost)
        };
        let feasible = |chosen: &[usize]| {
            let all: Vec<&GroupOption<'_>> = chosen.iter().zip(&groups).map(|(i, g)| &g.options[*i]).collect();
            ["x", "y", "z"].iter().any(|name| all.iter().all(|o| o.layouts.iter().any(|l| l == name)))
                && (1..=20_000).any(|size| all.iter().all(|o| o.block_sizes.contains(size)))
        };
        let mut best = None;
        let total: usize = groups.iter().map(|g| g.options.len()).product();
        for mut code in 0..total {
            let chosen: Vec<usize> = groups.iter().map(|g| {
                let i = code % g.options.len();
                code /= g.options.len();
                i
            }).collect();
            if feasible(&chosen) && best.is_none_or(|least| cost(&chosen) < least) {
                best = Some(cost(&chosen));
            }
        }
        match resolve(&groups, None) {
            Ok(found) => {
                let size = found.block_size.expect("every group has a cache");
                for (index, group) in found.chosen.iter().zip(&groups) {
                    prop_assert!(group.options[*index].block_sizes.contains(size));
                    prop_assert!(group.options[*index].layouts.contains(&found.layouts[0].1));
                }
                prop_assert_eq!(Some(cost(&found.chosen)), best);
            }
            Err(_) => prop_assert_eq!(best, None),
        }
    }
}
