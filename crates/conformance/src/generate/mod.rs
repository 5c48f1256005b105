//! Seeded random cases that cover what a backend claims, pairwise: every two values of any two axes
//! (dtype, head size, block size, window, …) meet in some case, where the backend claims it.
//!
//! Owns the axes and the covering. Must not know how a case is run or checked.

mod fill;

use crate::{case::Case, check::can_check, rng::Rng, stored::Storage};
use attache_core::{
    AttentionType, BackendDescriptor, Device, Dtype, KvCacheDtype, LayerRequest, NumberRule, Support,
    condition::any_contains,
    descriptor::feature,
    verdict::{Effective, verdict},
};
use fill::{Batch, Dims, MASKS, Mask, Numbers};

/// What a case can differ in; the number of values of each is [`Space::sizes`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum Axis {
    Dtype,
    KvCacheDtype,
    Dims,
    GqaRatio,
    BlockSize,
    Layout,
    AttnType,
    Causality,
    Mask,
    Softcap,
    Alibi,
    Sinks,
    Lse,
    PrefixSpans,
    Scales,
    MlaForm,
    TopK,
    Batch,
    Numbers,
}

const AXES: usize = Axis::Numbers as usize + 1;

/// For each axis the index of its value.
type Row = [usize; AXES];

/// What a backend claims, as axes.
#[derive(Debug, Clone)]
pub struct Space {
    descriptor: BackendDescriptor,
    device: Device,
    dtypes: Vec<Dtype>,
    kv_cache_dtypes: Vec<Option<KvCacheDtype>>,
    dims: Vec<Dims>,
    gqa_ratios: Vec<usize>,
    block_sizes: Vec<Option<u32>>,
    layouts: Vec<Option<String>>,
    attn_types: Vec<AttentionType>,
    masks: Vec<Mask>,
    unchecked: Vec<String>,
}

/// The numbers that fit any rule, nearest to some wanted ones.
fn near(rules: &[NumberRule], wanted: &[u32]) -> Vec<u32> {
    let mut found = Vec::new();
    for wanted in wanted {
        let nearest = rules.iter().filter_map(|rule| rule.nearest(*wanted)).min_by_key(|size| size.abs_diff(*wanted));
        // Far away is another wanted number's business, or too large for a quick case.
        found.extend(nearest.filter(|size| (1..=1024).contains(size) && !found.contains(size)));
    }
    found
}

impl Space {
    /// The space of what `descriptor` claims on `device`. Claims that the reference cannot check
    /// are left out and listed by [`Space::unchecked`].
    #[must_use]
    pub fn new(descriptor: &BackendDescriptor, device: &Device) -> Self {
        let capability = &descriptor.capability;
        let has = |name: &str| {
            let added = descriptor.overrides.iter().any(|part| part.add_features.contains(name));
            added || capability.features.contains(name)
        };
        let mut unchecked = Vec::new();
        let mut kv_cache_dtypes: Vec<Option<KvCacheDtype>> = vec![None];
        for name in &capability.kv_cache_dtypes {
            let dtype = Some(KvCacheDtype::register(name));
            if Storage::of(dtype, Dtype::F32).is_some() {
                kv_cache_dtypes.push(dtype);
            } else {
                unchecked.push(format!("kv_cache_dtype {name}"));
            }
        }
        let mut attn_types = Vec::new();
        for attn_type in &capability.attn_types {
            if can_check(attn_type, None) {
                attn_types.push(attn_type.clone());
            } else {
                unchecked.push(format!("attention type {attn_type}"));
            }
        }
        let block_sizes =
            [16, 1, 3, 32, 64, 128, 256].into_iter().filter(|size| capability.block_sizes.contains(*size));
        let mut block_sizes: Vec<Option<u32>> = block_sizes.map(Some).collect();
        let exact = capability.block_sizes.exact.iter().filter(|size| **size <= 1024).map(|size| Some(*size));
        block_sizes.extend(exact.filter(|size| !block_sizes.contains(size)).collect::<Vec<_>>());
        block_sizes.truncate(5);
        block_sizes.push(None);
        let mut layouts: Vec<Option<String>> = capability.layouts.iter().cloned().map(Some).collect();
        layouts.push(None);
        let mut space = Self {
            descriptor: descriptor.clone(),
            device: device.clone(),
            dtypes: capability.dtypes.clone(),
            kv_cache_dtypes,
            dims: Vec::new(),
            gqa_ratios: Vec::new(),
            block_sizes,
            layouts,
            attn_types,
            masks: MASKS.into_iter().filter(|mask| mask.feature().is_none_or(has)).collect(),
            unchecked,
        };
        space.gqa_ratios = match &capability.gqa_ratios {
            // A latent cache needs no claim; with plain layers the verdict decides.
            _ if capability.mla != Support::No => vec![1, 2, 5],
            None => vec![1],
            Some(rules) => near(rules, &[1, 2, 3, 4, 8]).into_iter().map(|ratio| ratio as usize).collect(),
        };
        space.add_dims();
        space
    }

    fn add_dims(&mut self) {
        let capability = &self.descriptor.capability;
        if capability.mla != Support::Only {
            let sizes = near(&capability.head_sizes, &[64, 128, 80, 7, 1, 256]);
            self.dims.extend(sizes.iter().map(|size| Dims::Plain { head_size: *size, head_size_v: *size }));
            let rules = capability.head_sizes_v.as_deref().unwrap_or_default();
            for wanted in [32, 96, 9] {
                let other = near(rules, &[wanted]);
                let size = sizes.iter().min_by_key(|size| size.abs_diff(64));
                if let (Some(size), Some(other)) = (size, other.first().filter(|other| size != Some(other))) {
                    self.dims.push(Dims::Plain { head_size: *size, head_size_v: *other });
                }
            }
        }
        if capability.mla != Support::No {
            let fits = |dims: &&Dims| any_contains(&capability.head_sizes, dims.head_size() as u32);
            self.dims.extend(fill::MLA_DIMS.iter().filter(fits));
        }
    }

    /// Claims that the reference cannot check.
    #[must_use]
    pub fn unchecked(&self) -> &[String] {
        &self.unchecked
    }

    /// Whether the claims hold this request on the space's device.
    #[must_use]
    pub fn claims(&self, request: &LayerRequest) -> bool {
        verdict(&self.descriptor, request, &self.device).is_valid()
    }

    /// The cases of a seed: the same ones in every version with the same claims.
    #[must_use]
    pub fn cases(&self, seed: u64) -> Cases<'_> {
        Cases::new(self, seed)
    }

    /// A case of mixed requests with nothing special about it.
    ///
    /// # Errors
    /// When the claims hold no such case: the core's reasons against a layer of the space.
    pub fn plain(&self, seed: u64) -> Result<Case, String> {
        let mut rng = Rng::new(seed);
        let rows = self.plain_rows();
        if let Some(case) = rows.iter().find_map(|row| self.build(row, &mut rng)) {
            return Ok(case);
        }
        let outline = rows.iter().find_map(|row| fill::outline(self, row, &mut rng));
        let reasons = outline.map(|case| verdict(&self.descriptor, &case.request(), &self.device).reasons);
        Err(format!(
            "the claims hold no layer that the reference can check: {}",
            reasons.unwrap_or_default().join("; ")
        ))
    }

    fn plain_rows(&self) -> Vec<Row> {
        let sizes = self.sizes();
        if sizes.contains(&0) {
            return Vec::new();
        }
        let last = |axis: Axis| sizes[axis as usize] - 1;
        let cached = [(0, 0), (last(Axis::BlockSize), last(Axis::Layout))];
        let mut rows = Vec::new();
        for attn_type in 0..sizes[Axis::AttnType as usize] {
            for (causality, (block_size, layout)) in [0, 1].into_iter().flat_map(|c| cached.map(|form| (c, form))) {
                for (dims, top_k) in
                    (0..sizes[Axis::Dims as usize]).flat_map(|dims| [(dims, 0), (dims, last(Axis::TopK))])
                {
                    let mut row = [0; AXES];
                    row[Axis::AttnType as usize] = attn_type;
                    row[Axis::Causality as usize] = causality;
                    row[Axis::BlockSize as usize] = block_size;
                    row[Axis::Layout as usize] = layout;
                    row[Axis::Dims as usize] = dims;
                    row[Axis::TopK as usize] = top_k;
                    row[Axis::Lse as usize] = last(Axis::Lse);
                    rows.push(row);
                }
            }
        }
        rows
    }

    fn sizes(&self) -> Row {
        let has = |name: &str| 1 + usize::from(self.descriptor.capability.features.contains(name));
        let quantised =
            self.kv_cache_dtypes.iter().any(|dtype| Storage::of(*dtype, Dtype::F32).is_some_and(Storage::takes_scales));
        let mla = self.descriptor.capability.mla != Support::No;
        let mut sizes = [1; AXES];
        let mut set = |axis: Axis, size: usize| sizes[axis as usize] = size;
        set(Axis::Dtype, self.dtypes.len());
        set(Axis::KvCacheDtype, self.kv_cache_dtypes.len());
        set(Axis::Dims, self.dims.len());
        set(Axis::GqaRatio, self.gqa_ratios.len());
        set(Axis::BlockSize, self.block_sizes.len());
        set(Axis::Layout, self.layouts.len());
        set(Axis::AttnType, self.attn_types.len());
        set(Axis::Causality, 3);
        set(Axis::Mask, self.masks.len());
        set(Axis::Softcap, has(feature::SOFTCAP));
        set(Axis::Alibi, has(feature::ALIBI));
        set(Axis::Sinks, if has(feature::SINK) == 2 { 3 } else { 1 });
        set(Axis::Lse, has(feature::LSE));
        set(Axis::PrefixSpans, has(feature::MM_PREFIX));
        set(Axis::Scales, if quantised { 3 } else { 1 });
        set(Axis::MlaForm, if mla { 3 } else { 1 });
        set(Axis::TopK, 1 + usize::from(self.descriptor.capability.sparse != Support::No));
        set(Axis::Batch, Batch::ALL.len());
        set(Axis::Numbers, Numbers::ALL.len());
        sizes
    }

    /// The case of a row; `None` when its values do not go together or are not claimed.
    fn build(&self, row: &Row, rng: &mut Rng) -> Option<Case> {
        let case = fill::outline(self, row, rng)?;
        let request = case.request();
        if !self.claims(&request) {
            return None;
        }
        let layouts = Effective::new(&self.descriptor, &request, &self.device).layouts();
        if case.layout.as_ref().is_some_and(|layout| !layouts.contains(layout)) {
            return None;
        }
        let case = fill::fill(case, row, rng);
        // A case that contradicts itself is none; the outline should not let one through.
        case.check().is_ok().then_some(case)
    }
}

/// The cases of a space; see [`Space::cases`].
pub struct Cases<'a> {
    space: &'a Space,
    rng: Rng,
    sizes: Row,
    /// Index of each axis' first value among all values.
    first: Row,
    values: usize,
    /// `[values, values]`: pairs that some case has, or that no case can have.
    done: Vec<bool>,
    impossible: usize,
}

/// How often a pair is tried with other values around it before it counts as impossible.
const ATTEMPTS: usize = 48;

impl<'a> Cases<'a> {
    fn new(space: &'a Space, seed: u64) -> Self {
        let sizes = space.sizes();
        let mut first = [0; AXES];
        for axis in 1..AXES {
            first[axis] = first[axis - 1] + sizes[axis - 1];
        }
        let values = first[AXES - 1] + sizes[AXES - 1];
        // Without a value on some axis there is no case at all.
        let none = sizes.contains(&0);
        Self { space, rng: Rng::new(seed), sizes, first, values, done: vec![none; values * values], impossible: 0 }
    }

    /// Pairs that were found to be impossible, so far.
    #[must_use]
    pub fn impossible_pairs(&self) -> usize {
        self.impossible
    }

    fn at(&self, (a, value_a): (usize, usize), (b, value_b): (usize, usize)) -> usize {
        let ((a, value_a), (b, value_b)) =
            if a < b { ((a, value_a), (b, value_b)) } else { ((b, value_b), (a, value_a)) };
        (self.first[a] + value_a) * self.values + self.first[b] + value_b
    }

    /// A random pair that no case has yet.
    fn open_pair(&mut self) -> Option<[(usize, usize); 2]> {
        let mut open = Vec::new();
        for a in 0..AXES {
            for b in a + 1..AXES {
                for value_a in 0..self.sizes[a] {
                    for value_b in 0..self.sizes[b] {
                        let pair = [(a, value_a), (b, value_b)];
                        if !self.done[self.at(pair[0], pair[1])] {
                            open.push(pair);
                        }
                    }
                }
            }
        }
        let index = self.rng.below(open.len());
        open.get(index).copied()
    }

    /// A row with this pair: greedy, or with random values around it.
    fn row(&mut self, pair: [(usize, usize); 2], greedy: bool) -> Row {
        let mut row = [0; AXES];
        let mut chosen: Vec<(usize, usize)> = pair.to_vec();
        let mut rest: Vec<usize> = (0..AXES).filter(|axis| pair.iter().all(|(other, _)| other != axis)).collect();
        self.rng.shuffle(&mut rest);
        for axis in rest {
            let start = self.rng.below(self.sizes[axis]);
            let values = (0..self.sizes[axis]).map(|offset| (start + offset) % self.sizes[axis]);
            let gain =
                |value: &usize| chosen.iter().filter(|other| !self.done[self.at((axis, *value), **other)]).count();
            let value = if greedy { values.max_by_key(gain).unwrap_or(0) } else { start };
            chosen.push((axis, value));
        }
        for (axis, value) in chosen {
            row[axis] = value;
        }
        row
    }

    fn mark(&mut self, row: &Row) {
        for a in 0..AXES {
            for b in a + 1..AXES {
                let at = self.at((a, row[a]), (b, row[b]));
                self.done[at] = true;
            }
        }
    }
}

impl Iterator for Cases<'_> {
    type Item = Case;

    fn next(&mut self) -> Option<Case> {
        loop {
            let pair = self.open_pair()?;
            for attempt in 0..ATTEMPTS {
                let row = self.row(pair, attempt < ATTEMPTS / 4);
                if let Some(case) = self.space.build(&row, &mut self.rng) {
                    self.mark(&row);
                    return Some(case);
                }
            }
            let at = self.at(pair[0], pair[1]);
            self.done[at] = true;
            self.impossible += 1;
        }
    }
}
