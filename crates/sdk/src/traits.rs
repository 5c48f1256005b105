//! What a plugin implements.

use crate::context::{ExecContext, HostServices};
use attache_core::{
    BackendError, BatchLimits, BatchView, Device, KvCacheSpec, LayerConfig, LayerRequest, TensorView, TensorViewMut,
    abi::{CacheTensor, TensorRole},
    descriptor::BackendDescriptor,
    error::Result,
};
use std::{any::Any, cell::Cell};

/// Options of a plugin, by name, as the operator set them.
#[derive(Clone, Debug, Default)]
pub struct Options(pub(crate) Vec<(String, String)>);

impl Options {
    /// The value of an option.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// All options.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

/// A backend: says what it can do and makes layers. Used from several threads at once.
pub trait Backend: Send + Sync + 'static {
    /// What it can do, as data. Must be the same every time: the manifest repeats it.
    fn descriptor() -> BackendDescriptor
    where
        Self: Sized;

    /// Makes the backend.
    ///
    /// # Errors
    /// When an option is wrong or a library that it needs is missing.
    fn create(host: HostServices, options: &Options) -> Result<Self>
    where
        Self: Sized;

    /// The devices that it can use here; none = it cannot be used.
    ///
    /// # Errors
    /// When a driver fails.
    fn probe(&self) -> Result<Vec<Device>>;

    /// Why it cannot serve the request on the device, beyond what the descriptor says; empty = it can.
    ///
    /// # Errors
    /// When a driver fails.
    fn validate(&self, request: &LayerRequest, device: &Device) -> Result<Vec<String>>;

    /// The tensors of a layer's cache.
    ///
    /// # Errors
    /// When the layer is not supported.
    fn kv_cache_spec(&self, config: &LayerConfig<'_>) -> Result<KvCacheSpec>;

    /// Makes a layer. The configuration was checked by [`LayerConfig::check`]. What is not
    /// supported must be refused here even if the selector would never ask.
    ///
    /// # Errors
    /// When the layer is not supported.
    fn create_layer(&self, config: &LayerConfig<'_>) -> Result<Box<dyn Layer>>;
}

/// An attention layer. Used from several threads at once.
pub trait Layer: Send + Sync {
    /// Bytes of workspace that a call within `limits` can need.
    ///
    /// # Errors
    /// When the limits make no sense.
    fn workspace_size(&self, limits: &BatchLimits) -> Result<usize>;

    /// Lays out a batch. The plan must serve every layer of the same shape.
    ///
    /// # Errors
    /// When the batch breaks the contract: see [`BatchView::on_host`], which checks all of it.
    fn plan(&self, batch: &BatchView<'_>) -> Result<Box<dyn Plan>>;

    /// Writes new tokens into the cache: `k` `[tokens, num_kv_heads, head_size]`, `v`
    /// `[tokens, num_kv_heads, head_size_v]`; MLA: rows `[tokens, head_size]` and no `v`.
    /// `slot_mapping` is `[tokens]` i64: block · block_size + offset, −1 = not written.
    ///
    /// # Errors
    /// When shapes differ or a slot is out of range; then nothing was written.
    fn write_kv(
        &self,
        context: &ExecContext<'_>,
        k: &TensorView<'_>,
        v: Option<&TensorView<'_>>,
        slot_mapping: &TensorView<'_>,
        cache: &CacheViewMut<'_>,
    ) -> Result<()>;

    /// Attention of a batch. MLA: not absorbed q and out; the backend chooses the way.
    ///
    /// # Errors
    /// When shapes differ from the layer's or the plan's, or the kernel fails.
    fn forward(&self, context: &ExecContext<'_>, args: ForwardArgs<'_>) -> Result<()>;

    /// MLA, not absorbed: q `[tokens, num_heads, qk_nope + qk_rope]`, out `[tokens, num_heads, v_head_dim]`.
    ///
    /// # Errors
    /// As [`Layer::forward`]; layers that are not MLA refuse.
    fn forward_prefill(&self, _context: &ExecContext<'_>, _args: ForwardArgs<'_>) -> Result<()> {
        Err(BackendError::unsupported("forward_prefill is for MLA layers; this layer is none"))
    }

    /// MLA, absorbed: q `[tokens, num_heads, head_size]`, out `[tokens, num_heads, kv_lora_rank]`.
    ///
    /// # Errors
    /// As [`Layer::forward`]; layers that are not MLA refuse.
    fn forward_decode(&self, _context: &ExecContext<'_>, _args: ForwardArgs<'_>) -> Result<()> {
        Err(BackendError::unsupported("forward_decode is for MLA layers; this layer is none"))
    }

    /// Copies blocks within a cache: `pairs` is `[n, 2]` i64, source and destination.
    ///
    /// # Errors
    /// When a block is out of range; then nothing was copied.
    fn copy_blocks(&self, context: &ExecContext<'_>, cache: &CacheViewMut<'_>, pairs: &TensorView<'_>) -> Result<()>;

    /// Copies blocks from one cache to another: `pairs` is `[n, 2]` i64, source and destination.
    ///
    /// # Errors
    /// When a block is out of range; then nothing was copied.
    fn swap_blocks(
        &self,
        context: &ExecContext<'_>,
        source: &CacheView<'_>,
        destination: &CacheViewMut<'_>,
        pairs: &TensorView<'_>,
    ) -> Result<()>;
}

/// A batch as a backend laid it out. Owns its metadata.
pub trait Plan: Any + Send + Sync {
    /// Replaces the batch in place.
    ///
    /// # Errors
    /// When the batch breaks the contract; then the plan is unchanged.
    fn update(&mut self, batch: &BatchView<'_>) -> Result<()>;
}

/// A cache to read.
#[derive(Clone, Copy)]
pub struct CacheView<'a> {
    pub(crate) tensors: &'a [CacheTensor],
}

impl<'a> CacheView<'a> {
    /// Whether there is no cache.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The tensor of a role.
    ///
    /// # Errors
    /// When the cache has none, or it breaks the contract.
    pub fn get(&self, role: TensorRole) -> Result<TensorView<'a>> {
        let tensor = find(self.tensors, role)?;
        // SAFETY: the engine lends the cache for the call; `'a` is the call.
        unsafe { TensorView::from_abi(&raw const tensor.tensor, "a cache tensor") }
    }
}

/// A cache to write. Each tensor can be taken once.
pub struct CacheViewMut<'a> {
    pub(crate) tensors: &'a [CacheTensor],
    pub(crate) taken: Cell<u64>,
}

impl<'a> CacheViewMut<'a> {
    /// Takes the tensor of a role.
    ///
    /// # Errors
    /// When the cache has none, it breaks the contract, or it was taken before.
    pub fn take(&self, role: TensorRole) -> Result<TensorViewMut<'a>> {
        let tensor = find(self.tensors, role)?;
        let bit = 1_u64.checked_shl(role.0).unwrap_or(0);
        if bit == 0 || self.taken.get() & bit != 0 {
            return Err(BackendError::invalid(format!("the cache tensor of {role:?} cannot be taken (twice)")));
        }
        self.taken.set(self.taken.get() | bit);
        // SAFETY: the engine lends the cache for writing for the call; each tensor is given once.
        unsafe { TensorViewMut::from_abi(&raw const tensor.tensor, "a cache tensor") }
    }

    /// The roles that the cache has.
    pub fn roles(&self) -> impl Iterator<Item = TensorRole> {
        self.tensors.iter().map(|tensor| tensor.role)
    }
}

fn find(tensors: &[CacheTensor], role: TensorRole) -> Result<&CacheTensor> {
    tensors
        .iter()
        .find(|tensor| tensor.role == role)
        .ok_or_else(|| BackendError::invalid(format!("the cache has no tensor of {role:?}")))
}

/// The tensors of a forward call.
pub struct ForwardArgs<'a> {
    /// `[tokens, num_heads, head_size]`.
    pub q: TensorView<'a>,
    /// `[tokens, num_kv_heads, head_size]`: only for layers without a cache.
    pub k: Option<TensorView<'a>>,
    /// `[tokens, num_kv_heads, head_size_v]`: only for layers without a cache.
    pub v: Option<TensorView<'a>>,
    /// The cache; may be empty.
    pub cache: CacheView<'a>,
    /// The plan, of this backend; [`ForwardArgs::plan`] gives it with its type.
    pub any_plan: &'a dyn Plan,
    /// `[tokens, num_heads, head_size_v]`.
    pub out: TensorViewMut<'a>,
    /// `[num_heads, tokens]` f32, natural logarithm.
    pub lse: Option<TensorViewMut<'a>>,
    /// `[tokens, k]` i32 row indices of sparse attention, −1 padded.
    pub topk_indices: Option<TensorView<'a>>,
}

impl<'a> ForwardArgs<'a> {
    /// The plan with its own type.
    ///
    /// # Errors
    /// When another backend of the plugin made it.
    pub fn plan<P: Plan>(&self) -> Result<&'a P> {
        (self.any_plan as &dyn Any)
            .downcast_ref()
            .ok_or_else(|| BackendError::invalid("the plan was made by another backend of this plugin"))
    }
}
