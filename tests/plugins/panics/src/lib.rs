//! `PANICS`: panics in the function that its option `at` names.

use attache_sdk::{core::descriptor::OptionSpec, prelude::*};

/// Panics where it is told to.
pub struct Panics {
    at: String,
}

struct PanicsInDrop(String);

impl Panics {
    fn reach(&self, place: &str) {
        assert_ne!(self.at, place, "asked to panic in {place}");
    }
}

impl Backend for Panics {
    fn descriptor() -> BackendDescriptor {
        let at = OptionSpec { description: "where to panic".to_owned(), ..OptionSpec::default() };
        BackendDescriptor {
            name: "PANICS".to_owned(),
            options: [("at".to_owned(), at)].into(),
            ..attache_fixture_null::descriptor("PANICS")
        }
    }
    fn create(_host: HostServices, options: &Options) -> Result<Self> {
        let made = Self { at: options.get("at").unwrap_or("nowhere").to_owned() };
        made.reach("create");
        Ok(made)
    }
    fn probe(&self) -> Result<Vec<Device>> {
        self.reach("probe");
        Ok(vec![Device::host_cpu()])
    }
    fn validate(&self, _request: &LayerRequest, _device: &Device) -> Result<Vec<String>> {
        self.reach("validate");
        Ok(Vec::new())
    }
    fn kv_cache_spec(&self, config: &LayerConfig<'_>) -> Result<KvCacheSpec> {
        attache_fixture_null::kv_cache_spec(config)
    }
    fn create_layer(&self, _config: &LayerConfig<'_>) -> Result<Box<dyn Layer>> {
        Ok(Box::new(PanicsInDrop(self.at.clone())))
    }
}

impl Drop for PanicsInDrop {
    fn drop(&mut self) {
        assert_ne!(self.0, "drop", "asked to panic in drop");
    }
}

impl Layer for PanicsInDrop {
    fn workspace_size(&self, _limits: &BatchLimits) -> Result<usize> {
        Ok(0)
    }
    fn plan(&self, batch: &BatchView<'_>) -> Result<Box<dyn Plan>> {
        attache_fixture_null::NullLayer.plan(batch)
    }
    fn write_kv(
        &self,
        _context: &ExecContext<'_>,
        _k: &TensorView<'_>,
        _v: Option<&TensorView<'_>>,
        _slot_mapping: &TensorView<'_>,
        _cache: &CacheViewMut<'_>,
    ) -> Result<()> {
        Ok(())
    }
    fn forward(&self, context: &ExecContext<'_>, args: ForwardArgs<'_>) -> Result<()> {
        assert_ne!(self.0, "forward", "asked to panic in forward");
        context.parallel_for(2, |task, _worker| {
            assert!(self.0 != "task" || task != 1, "asked to panic in a task");
            Ok(())
        })?;
        attache_fixture_null::NullLayer.forward(context, args)
    }
    fn copy_blocks(&self, _: &ExecContext<'_>, _: &CacheViewMut<'_>, _: &TensorView<'_>) -> Result<()> {
        Ok(())
    }
    fn swap_blocks(
        &self,
        _: &ExecContext<'_>,
        _: &CacheView<'_>,
        _: &CacheViewMut<'_>,
        _: &TensorView<'_>,
    ) -> Result<()> {
        Ok(())
    }
}

attache_sdk::export_backends! { name: "panics", vendor: "Attaché tests", backends: [Panics] }
