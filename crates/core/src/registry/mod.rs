//! One registry over both sources: plugins of this program, and libraries that are opened when they
//! are needed.
//!
//! Owns what takes part in selection, the cache of answers, and the opened plugins. Whatever
//! changes what can be chosen (a plugin comes or goes, or fails; the policy changes) starts a new
//! generation, and no answer of an earlier one is given again. A plugin that fails is set aside with
//! its reason; all others go on. Must not know: kernels, how a request came about.

mod builder;
mod cache;
mod entry;
mod item;
mod model;
mod options;
mod resolve;
mod selection;
mod slot;

pub use builder::RegistryBuilder;
pub use entry::{Entry, Stage};
pub use model::LoadedPlan;
pub use resolve::{RegistryError, Resolved};
pub use selection::Selection;

use crate::{
    device::Device,
    discovery::{self, Place, Searched},
    kind::Kind,
    loader::LoadOptions,
    policy::{Origin, Policy},
    request::LayerRequest,
    selector::{self, Candidate, Explanation, SelectionError},
};
use cache::{Cache, KeyHash};
use item::{Item, Owner, Standing};
use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

/// The plugins of a process, and the answers given so far.
pub struct Registry {
    state: RwLock<State>,
    /// Held while a change is worked out, so that changes follow each other and answers go on.
    changing: Mutex<()>,
    options: item::Options,
    load: LoadOptions,
}

/// What changes: read for every answer, written when a new one is found or something changes.
struct State {
    snapshot: Arc<Snapshot>,
    selections: Cache<Result<Arc<Selection>, SelectionError>>,
    resolved: Cache<Resolved>,
}

/// Everything that answers depend on. Never changes: a change makes another one.
struct Snapshot {
    generation: u64,
    items: Arc<Vec<Item>>,
    searched: Vec<Searched>,
    standings: Vec<Standing>,
    candidates: Vec<Candidate>,
    owners: Vec<Owner>,
    policy: Arc<Policy>,
    device: Arc<Device>,
}

/// What a change may change.
type Parts = (Arc<Vec<Item>>, Vec<Searched>, Arc<Policy>);

impl Snapshot {
    fn new(
        generation: u64,
        items: Arc<Vec<Item>>,
        searched: Vec<Searched>,
        policy: Arc<Policy>,
        device: Arc<Device>,
        load: &LoadOptions,
    ) -> Arc<Self> {
        let standings = item::standings(&items, &policy);
        for slot in item::to_be_opened(&items, &standings) {
            if let Err(failure) = slot.open(load) {
                tracing::debug!(plugin = %slot.metadata.name, reason = failure.reason, "set aside");
            }
        }
        let (candidates, owners) = item::candidates(&items, &standings);
        Arc::new(Self { generation, items, searched, standings, candidates, owners, policy, device })
    }

    fn select(&self, request: &LayerRequest, kind: Option<Kind>) -> Explanation {
        selector::select(request, kind, &self.device, &self.policy, &self.candidates)
    }
}

impl State {
    fn new(snapshot: Arc<Snapshot>) -> Self {
        Self { snapshot, selections: Cache::default(), resolved: Cache::default() }
    }
}

impl Registry {
    /// Starts a registry.
    pub fn builder() -> RegistryBuilder {
        RegistryBuilder::default()
    }

    fn new(
        items: Vec<Item>,
        searched: Vec<Searched>,
        options: item::Options,
        load: LoadOptions,
        policy: Policy,
        device: Device,
    ) -> Self {
        let snapshot = Snapshot::new(1, Arc::new(items), searched, Arc::new(policy), Arc::new(device), &load);
        tracing::info!(
            candidates = snapshot.candidates.len(),
            entries = snapshot.items.len(),
            device = %snapshot.device,
            "registry ready"
        );
        Self { state: RwLock::new(State::new(snapshot)), changing: Mutex::new(()), options, load }
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.state.read().unwrap_or_else(PoisonError::into_inner).snapshot)
    }

    /// Replaces the snapshot by one of the next generation, and forgets all answers; `None` leaves it.
    /// Gives the generation.
    fn change(&self, change: impl FnOnce(&Snapshot) -> Option<Parts>) -> u64 {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.snapshot();
        let Some((items, searched, policy)) = change(&old) else { return old.generation };
        let generation = old.generation + 1;
        let new = Snapshot::new(generation, items, searched, policy, Arc::clone(&old.device), &self.load);
        *self.state.write().unwrap_or_else(PoisonError::into_inner) = State::new(new);
        tracing::debug!(generation, "a new generation of the registry");
        generation
    }

    /// The number of changes so far, from 1.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.state.read().unwrap_or_else(PoisonError::into_inner).snapshot.generation
    }

    /// What the selector chooses from, in order of precedence.
    #[must_use]
    pub fn candidates(&self) -> Vec<Candidate> {
        self.snapshot().candidates.clone()
    }

    /// The device that is selected for.
    #[must_use]
    pub fn device(&self) -> Arc<Device> {
        Arc::clone(&self.snapshot().device)
    }

    /// What the operator wants.
    #[must_use]
    pub fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.snapshot().policy)
    }

    /// Everything that was looked at: how far it came and why it stopped there.
    #[must_use]
    pub fn report(&self) -> Vec<Entry> {
        let snapshot = self.snapshot();
        snapshot.items.iter().zip(&snapshot.standings).map(|(item, standing)| item::entry(item, standing)).collect()
    }

    /// Every place that was searched, in order.
    #[must_use]
    pub fn searched(&self) -> Vec<Searched> {
        self.snapshot().searched.clone()
    }

    /// Adds a manifest or a library, after those that are there. Gives the new generation.
    pub fn register(&self, path: impl AsRef<Path>, origin: Origin) -> u64 {
        let discovery = discovery::discover(&[Place::file(path.as_ref(), origin)]);
        self.change(|old| {
            let found = discovery.found.into_iter().map(|found| Item::found(found, &self.options));
            let items = old.items.iter().cloned().chain(found).collect();
            let searched = old.searched.iter().cloned().chain(discovery.searched).collect();
            Some((Arc::new(items), searched, Arc::clone(&old.policy)))
        })
    }

    /// Removes every plugin of that name, in any case of letters; what was loaded from it goes on
    /// living where it is used. Gives the number of entries removed.
    pub fn remove(&self, name: &str) -> usize {
        let mut removed = 0;
        self.change(|old| {
            let kept = |item: &&Item| !item.name().is_some_and(|other| other.eq_ignore_ascii_case(name));
            let items: Vec<Item> = old.items.iter().filter(kept).cloned().collect();
            removed = old.items.len() - items.len();
            Some((Arc::new(items), old.searched.clone(), Arc::clone(&old.policy)))
        });
        removed
    }

    /// Changes what the operator wants. Gives the new generation.
    pub fn set_policy(&self, policy: Policy) -> u64 {
        self.change(|old| Some((Arc::clone(&old.items), old.searched.clone(), Arc::new(policy))))
    }

    /// How a request is answered, and why: every candidate with every reason. Opens nothing.
    ///
    /// `kind` is for layers that say themselves of which kind they are; `None` derives it.
    #[must_use]
    pub fn explain(&self, request: &LayerRequest, kind: Option<Kind>) -> Explanation {
        self.snapshot().select(request, kind)
    }

    /// Which backend serves a request. Opens nothing. Asked again, within one generation, it gives
    /// the same answer from a table.
    ///
    /// # Errors
    /// When the request is not valid, the wanted backend cannot serve it, or none can.
    pub fn select(&self, request: &LayerRequest, kind: Option<Kind>) -> Result<Arc<Selection>, SelectionError> {
        let hash = KeyHash::of(request, kind);
        let snapshot = {
            let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(answer) = state.selections.get(hash, request, kind) {
                return answer.clone();
            }
            Arc::clone(&state.snapshot)
        };
        let answer = match Selection::new(snapshot.select(request, kind)) {
            Ok(selection) => Ok(Arc::new(selection)),
            Err(explanation) => Err(resolve::error_of(&explanation)),
        };
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if state.snapshot.generation != snapshot.generation {
            return answer;
        }
        state.selections.keep(hash, request, kind, answer)
    }
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let snapshot = self.snapshot();
        f.debug_struct("Registry")
            .field("generation", &snapshot.generation)
            .field("candidates", &snapshot.candidates.len())
            .finish_non_exhaustive()
    }
}
