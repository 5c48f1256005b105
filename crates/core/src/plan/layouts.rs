//! One KV-cache layout for engines that name layouts by the order of their axes.
//!
//! Layers, blocks, heads, tokens and bytes of content (L, B, H, N, C) lie in the cache in one of six
//! orders. Backends state which they take, workers what their backends have in common, and one order is
//! settled for all. The planner's own search ([`super::joint`]) knows layouts by name alone; this module
//! is for engines that must tell which of them can hold layers of differing sizes.
//!
//! Pure. Must not know: requests, backends, files, the environment.

use serde::Serialize;
use std::fmt;

/// An axis of the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Axis {
    Layer,
    Block,
    Head,
    Token,
    Content,
}

use Axis::{Block, Content, Head, Layer, Token};

/// The order of a cache's axes, the outermost one first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum KvCacheLayout {
    /// Layers, blocks, heads, tokens: also called HND.
    Lbhnc,
    /// Layers, blocks, tokens, heads: also called NHD.
    Lbnhc,
    /// Layers, heads, blocks, tokens.
    Lhbnc,
    /// Blocks, layers, heads, tokens.
    Blhnc,
    /// Blocks, layers, tokens, heads.
    Blnhc,
    /// Blocks, heads, layers, tokens.
    Bhlnc,
}

impl KvCacheLayout {
    /// All of them; of two that are equally good the first one here is taken.
    pub const ALL: [Self; 6] = [Self::Lbhnc, Self::Lbnhc, Self::Lhbnc, Self::Blhnc, Self::Blnhc, Self::Bhlnc];

    /// The order of preference where no backend states one.
    pub const PREFERRED: [Self; 6] = [Self::Lbnhc, Self::Lbhnc, Self::Blnhc, Self::Blhnc, Self::Bhlnc, Self::Lhbnc];

    /// The name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lbhnc => "LBHNC",
            Self::Lbnhc => "LBNHC",
            Self::Lhbnc => "LHBNC",
            Self::Blhnc => "BLHNC",
            Self::Blnhc => "BLNHC",
            Self::Bhlnc => "BHLNC",
        }
    }

    /// The layout of that name, in capitals; `NHD` and `HND` are the older names of two.
    ///
    /// # Errors
    /// For any other text.
    pub fn parse(name: &str) -> Result<Self, LayoutError> {
        let found = Self::ALL.into_iter().find(|layout| layout.name() == name);
        found
            .or(match name {
                "NHD" => Some(Self::Lbnhc),
                "HND" => Some(Self::Lbhnc),
                _ => None,
            })
            .ok_or_else(|| LayoutError::Unknown { found: name.to_owned() })
    }

    fn axes(self) -> [Axis; 5] {
        match self {
            Self::Lbhnc => [Layer, Block, Head, Token, Content],
            Self::Lbnhc => [Layer, Block, Token, Head, Content],
            Self::Lhbnc => [Layer, Head, Block, Token, Content],
            Self::Blhnc => [Block, Layer, Head, Token, Content],
            Self::Blnhc => [Block, Layer, Token, Head, Content],
            Self::Bhlnc => [Block, Head, Layer, Token, Content],
        }
    }

    /// For each place from the outermost in, which of the axes L, B, H, N, C (0 to 4) lies there.
    #[must_use]
    pub fn stride_order(self) -> [usize; 5] {
        self.axes().map(|axis| axis as usize)
    }

    /// A layer is one piece of memory.
    #[must_use]
    pub fn is_layer_compact(self) -> bool {
        self.axes()[0] == Layer
    }

    /// A layer's part of a block is one piece of memory, whole heads one behind the other.
    #[must_use]
    pub fn is_block_contiguous(self) -> bool {
        self.axes()[2..] == [Head, Token, Content]
    }

    /// A layer's part of a block is one piece of memory.
    #[must_use]
    pub fn is_block_compact(self) -> bool {
        matches!(self.axes()[..2], [Layer, Block] | [Block, Layer])
    }

    /// A block of all layers is one piece of memory.
    #[must_use]
    pub fn is_block_outermost(self) -> bool {
        self.axes()[0] == Block
    }
}

impl fmt::Display for KvCacheLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why no layout can be settled on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutError {
    /// No layout has that name.
    #[error("unknown KV-cache layout '{found}'; valid: {}, NHD, HND", names(&KvCacheLayout::ALL))]
    Unknown {
        /// The name.
        found: String,
    },
    /// Backends share no layout.
    #[error("no KV-cache layout is taken by all backends: {}", sets(.declared))]
    NothingInCommon {
        /// What each takes.
        declared: Vec<Vec<KvCacheLayout>>,
    },
    /// No worker says what it takes.
    #[error("no worker states the KV-cache layouts that it takes")]
    NoWorkers,
    /// Workers that are not set up alike.
    #[error("workers state different KV-cache layouts: {}", .workers.iter().map(|names| names.join(", ")).collect::<Vec<_>>().join("; "))]
    WorkersDisagree {
        /// What each states.
        workers: Vec<Vec<String>>,
    },
    /// Layers of several shapes share blocks.
    #[error(
        "layers differ in KV heads, tokens or bytes of a block: each one's part must be one piece of memory \
         ({}); the workers take {}", matching(KvCacheLayout::is_block_compact), names(.workers)
    )]
    MixedShapes {
        /// What the workers take.
        workers: Vec<KvCacheLayout>,
    },
    /// Some layers' caches are spread over ranks and some are not, with blocks of several sizes.
    #[error(
        "decode context parallelism spreads some layers and not others, and their blocks differ in bytes: blocks \
         must be outermost ({}); the workers take {}", matching(KvCacheLayout::is_block_outermost), names(.workers)
    )]
    MixedSharding {
        /// What the workers take.
        workers: Vec<KvCacheLayout>,
    },
    /// The operator's layout cannot hold this model, or is not taken.
    #[error("KV-cache layout {asked} is asked for; this model and its backends take {}", names(.valid))]
    NotTaken {
        /// What the operator asks for.
        asked: KvCacheLayout,
        /// What would do.
        valid: Vec<KvCacheLayout>,
    },
}

fn names(layouts: &[KvCacheLayout]) -> String {
    layouts.iter().map(|layout| layout.name()).collect::<Vec<_>>().join(", ")
}

fn sets(all: &[Vec<KvCacheLayout>]) -> String {
    all.iter().map(|layouts| names(layouts)).collect::<Vec<_>>().join("; ")
}

fn matching(is: fn(KvCacheLayout) -> bool) -> String {
    names(&KvCacheLayout::ALL.into_iter().filter(|layout| is(*layout)).collect::<Vec<_>>())
}

/// The layouts that all backends take, the best one first. `declared` has one entry for each backend, a
/// backend of several layers as often as it has layers; `None` = it takes any.
///
/// Where all state the same, in the same order, that order stands. Otherwise a layout stands before
/// another when more of the backends name it first.
///
/// # Errors
/// When they share none.
pub fn common(declared: &[Option<Vec<KvCacheLayout>>]) -> Result<Vec<KvCacheLayout>, LayoutError> {
    let stated: Vec<&Vec<KvCacheLayout>> = declared.iter().flatten().collect();
    let Some(first) = stated.first() else { return Ok(KvCacheLayout::PREFERRED.to_vec()) };
    if stated.iter().all(|other| other == first) && !first.is_empty() {
        return Ok((*first).clone());
    }
    let is_shared = |layout: &KvCacheLayout| stated.iter().all(|other| other.contains(layout));
    let mut shared: Vec<KvCacheLayout> = KvCacheLayout::ALL.into_iter().filter(is_shared).collect();
    let votes = |layout: &KvCacheLayout| stated.iter().filter(|other| other.first() == Some(layout)).count();
    // A stable sort: layouts with as many votes stay in the order of `ALL`.
    shared.sort_by_key(|layout| std::cmp::Reverse(votes(layout)));
    if shared.is_empty() {
        return Err(LayoutError::NothingInCommon { declared: stated.into_iter().cloned().collect() });
    }
    Ok(shared)
}

/// What a layer keeps in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheShape {
    /// Whether it is cut out of the common cache; others do not count.
    pub has_layer_views: bool,
    /// Whether it is attention, and its tokens are found by slots.
    pub uses_slot_mapping: bool,
    /// KV heads.
    pub num_heads: u32,
    /// Tokens, or other states, of a block.
    pub num_states: u32,
    /// Bytes of a block.
    pub page_size_bytes: u64,
    /// Whether decode context parallelism spreads it over ranks.
    pub dcp_sharded: bool,
}

/// What is asked for besides.
#[derive(Clone, Copy, Default, Debug)]
pub struct LayoutWishes<'a> {
    /// What was settled before; it stands.
    pub settled: Option<KvCacheLayout>,
    /// The operator's layout: this or an error.
    pub operator: Option<&'a str>,
    /// The KV connector's layout: this where it can be.
    pub connector: Option<&'a str>,
}

/// The layout that is taken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SettledLayout {
    /// The layout.
    pub layout: KvCacheLayout,
    /// What the operator should know.
    pub warning: Option<String>,
}

/// Settles one layout for all workers: of those that they state, in their order, the first that holds
/// layers of these shapes, unless somebody wishes for another one.
///
/// # Errors
/// When workers state nothing, not the same, or a name that is no layout's; when the shapes cannot be
/// held; when the operator's layout is not among those that are left.
pub fn settle(
    workers: &[Vec<String>],
    shapes: &[CacheShape],
    wishes: LayoutWishes<'_>,
) -> Result<SettledLayout, LayoutError> {
    let settled = |layout| Ok(SettledLayout { layout, warning: None });
    if let Some(layout) = wishes.settled {
        return settled(layout);
    }
    let first = workers.first().filter(|_| workers.iter().all(|names| !names.is_empty()));
    let first = first.ok_or(LayoutError::NoWorkers)?;
    if workers.iter().any(|names| names != first) {
        return Err(LayoutError::WorkersDisagree { workers: workers.to_vec() });
    }
    let stated = first.iter().map(|name| KvCacheLayout::parse(name)).collect::<Result<Vec<_>, _>>()?;
    let mut left = stated.clone();
    let shapes: Vec<&CacheShape> = shapes.iter().filter(|shape| shape.has_layer_views).collect();
    let differ = |key: fn(&CacheShape) -> (u32, u32, u64)| shapes.windows(2).any(|two| key(two[0]) != key(two[1]));
    if differ(|shape| (shape.num_heads, shape.num_states, shape.page_size_bytes)) {
        left.retain(|layout| layout.is_block_compact());
        if left.is_empty() {
            return Err(LayoutError::MixedShapes { workers: stated });
        }
    }
    let slotted: Vec<&&CacheShape> = shapes.iter().filter(|shape| shape.uses_slot_mapping).collect();
    let is_mixed = slotted.windows(2).any(|two| two[0].dcp_sharded != two[1].dcp_sharded);
    if is_mixed && differ(|shape| (0, 0, shape.page_size_bytes)) {
        left.retain(|layout| layout.is_block_outermost());
        if left.is_empty() {
            return Err(LayoutError::MixedSharding { workers: stated });
        }
    }
    if let Some(name) = wishes.operator {
        let asked = KvCacheLayout::parse(name)?;
        return if left.contains(&asked) { settled(asked) } else { Err(LayoutError::NotTaken { asked, valid: left }) };
    }
    let layout = left[0];
    let Some(name) = wishes.connector else { return settled(layout) };
    let asked = KvCacheLayout::parse(name)?;
    if left.contains(&asked) {
        return settled(asked);
    }
    let warning =
        format!("the KV connector prefers layout {asked}, which {} do not include: {layout} is taken", names(&left));
    Ok(SettledLayout { layout, warning: Some(warning) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use KvCacheLayout::{Bhlnc, Blhnc, Lbhnc, Lbnhc};

    const SHAPE: CacheShape = CacheShape {
        has_layer_views: true,
        uses_slot_mapping: true,
        num_heads: 8,
        num_states: 16,
        page_size_bytes: 65536,
        dcp_sharded: true,
    };

    fn workers(names: &[&str]) -> Vec<Vec<String>> {
        vec![names.iter().map(|name| (*name).to_owned()).collect()]
    }

    #[test]
    fn the_layout_that_most_name_first_comes_first() {
        let any = None;
        assert_eq!(common(&[None, None]).unwrap(), KvCacheLayout::PREFERRED);
        let stated = [Some(vec![Lbnhc, Lbhnc]), any, Some(vec![Lbhnc, Lbnhc]), Some(vec![Lbnhc, Blhnc, Lbhnc])];
        assert_eq!(common(&stated).unwrap(), [Lbnhc, Lbhnc]);
        assert_eq!(common(&stated[..3]).unwrap(), [Lbhnc, Lbnhc], "one vote each: the order of all layouts");
        let error = common(&[Some(vec![Lbnhc]), Some(vec![Blhnc])]).unwrap_err().to_string();
        assert!(error.ends_with("LBNHC; BLHNC"), "{error}");
        assert!(common(&[Some(Vec::new())]).is_err(), "a backend that takes none");
    }

    #[test]
    fn shapes_narrow_what_is_left() {
        let wide = CacheShape { page_size_bytes: 131_072, ..SHAPE };
        let stated = workers(&["BHLNC", "LBHNC", "BLHNC"]);
        let layout = |shapes: &[CacheShape], wishes| settle(&stated, shapes, wishes).map(|settled| settled.layout);
        assert_eq!(layout(&[SHAPE, SHAPE], LayoutWishes::default()), Ok(Bhlnc));
        assert_eq!(layout(&[SHAPE, wide], LayoutWishes::default()), Ok(Lbhnc));
        let replicated = CacheShape { dcp_sharded: false, ..wide };
        assert_eq!(layout(&[SHAPE, replicated], LayoutWishes::default()), Ok(Blhnc));
        let unseen = CacheShape { has_layer_views: false, ..replicated };
        assert_eq!(layout(&[SHAPE, unseen], LayoutWishes::default()), Ok(Bhlnc));
        let error = settle(&workers(&["BHLNC"]), &[SHAPE, wide], LayoutWishes::default()).unwrap_err();
        assert!(error.to_string().contains("(LBHNC, LBNHC, BLHNC, BLNHC)"), "{error}");
    }

    #[test]
    fn the_operator_is_obeyed_or_told_and_the_connector_heard() {
        let stated = workers(&["LBNHC", "LBHNC"]);
        let ask = |wishes| settle(&stated, &[], wishes);
        let operator = |name| LayoutWishes { operator: Some(name), connector: Some("LBNHC"), settled: None };
        assert_eq!(ask(operator("HND")).unwrap().layout, Lbhnc);
        assert!(matches!(ask(operator("BLHNC")), Err(LayoutError::NotTaken { asked: Blhnc, .. })));
        assert!(matches!(ask(operator("hnd")), Err(LayoutError::Unknown { .. })));
        let connector = ask(LayoutWishes { connector: Some("BHLNC"), ..LayoutWishes::default() }).unwrap();
        assert_eq!(connector.layout, Lbnhc);
        assert!(connector.warning.is_some_and(|text| text.contains("prefers layout BHLNC")));
        let before = LayoutWishes { settled: Some(Bhlnc), operator: Some("NHD"), connector: None };
        assert_eq!(settle(&[], &[], before).unwrap().layout, Bhlnc);
        assert_eq!(settle(&[], &[], LayoutWishes::default()), Err(LayoutError::NoWorkers));
    }
}
