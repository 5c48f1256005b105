//! Answers that are given again: by request and kind, within one generation of the registry.

use crate::{kind::Kind, request::LayerRequest};
use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hash, Hasher},
};

/// Entries beyond which the table starts anew: a model has tens of distinct layers, and a stream of
/// made-up requests must not grow it for ever.
const CAPACITY: usize = 4096;

/// A key's hash, computed once per look-up.
#[derive(Clone, Copy)]
pub(super) struct KeyHash(u64);

impl KeyHash {
    pub fn of(request: &LayerRequest, kind: Option<Kind>) -> Self {
        let mut hasher = FastHasher::default();
        request.hash(&mut hasher);
        kind.hash(&mut hasher);
        Self(hasher.finish())
    }
}

type Answer<V> = (LayerRequest, Option<Kind>, V);

/// Answers by key. The whole key is compared: no field of a request can be forgotten.
pub(super) struct Cache<V> {
    answers: HashMap<u64, Vec<Answer<V>>, BuildHasherDefault<IdentityHasher>>,
}

impl<V> Default for Cache<V> {
    fn default() -> Self {
        Self { answers: HashMap::default() }
    }
}

impl<V: Clone> Cache<V> {
    pub fn get(&self, hash: KeyHash, request: &LayerRequest, kind: Option<Kind>) -> Option<&V> {
        let same = |(known, of, _): &&Answer<V>| *of == kind && known == request;
        self.answers.get(&hash.0)?.iter().find(same).map(|(_, _, answer)| answer)
    }

    /// Keeps an answer, and gives the one that is kept: the first of two for one key.
    pub fn keep(&mut self, hash: KeyHash, request: &LayerRequest, kind: Option<Kind>, answer: V) -> V {
        if let Some(kept) = self.get(hash, request, kind) {
            return kept.clone();
        }
        self.replace(hash, request, kind, answer.clone());
        answer
    }

    /// Keeps an answer instead of the one that was kept.
    pub fn replace(&mut self, hash: KeyHash, request: &LayerRequest, kind: Option<Kind>, answer: V) {
        if self.answers.len() >= CAPACITY {
            self.answers.clear();
        }
        let answers = self.answers.entry(hash.0).or_default();
        answers.retain(|(known, of, _)| *of != kind || known != request);
        answers.push((request.clone(), kind, answer));
    }
}

/// A multiplicative hash: keys are small, come from the engine itself, and are compared in full.
#[derive(Default)]
struct FastHasher(u64);

impl FastHasher {
    fn add(&mut self, word: u64) {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(ODD);
    }
}

impl Hasher for FastHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| self.add(u64::from_le_bytes(*word)));
        rest.iter().for_each(|byte| self.add(u64::from(*byte)));
    }
    fn write_u8(&mut self, value: u8) {
        self.add(u64::from(value));
    }
    fn write_u32(&mut self, value: u32) {
        self.add(u64::from(value));
    }
    fn write_u64(&mut self, value: u64) {
        self.add(value);
    }
    fn write_usize(&mut self, value: usize) {
        self.add(value as u64);
    }
    fn write_isize(&mut self, value: isize) {
        self.add(value as u64);
    }
    fn finish(&self) -> u64 {
        // The table takes its bucket from the low bits and its tag from the high ones.
        self.0 ^ (self.0 >> 32)
    }
}

/// For keys that are hashes already.
#[derive(Default)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvCacheDtype, request::AttentionType};

    /// One request per field that differs from the default in this field alone.
    fn variants() -> Vec<LayerRequest> {
        let base = LayerRequest::default();
        let mut variants = vec![base.clone()];
        let serde_json::Value::Object(template) = serde_json::to_value(&base).expect("JSON") else { return variants };
        for (key, value) in &template {
            if let Some(flag) = value.as_bool() {
                let mut changed = template.clone();
                changed.insert(key.clone(), (!flag).into());
                variants.push(serde_json::from_value(changed.into()).expect("a request"));
            }
        }
        variants.extend([
            LayerRequest { head_size: 64, ..base.clone() },
            LayerRequest { dtype: crate::Dtype::F16, ..base.clone() },
            LayerRequest { kv_cache_dtype: Some(KvCacheDtype::AUTO), ..base.clone() },
            LayerRequest { block_size: Some(16), ..base.clone() },
            LayerRequest { num_heads: Some(16), ..base.clone() },
            LayerRequest { num_kv_heads: Some(16), ..base.clone() },
            LayerRequest { head_size_v: Some(16), ..base.clone() },
            LayerRequest { attn_type: AttentionType::Encoder, ..base.clone() },
            LayerRequest { attn_type: AttentionType::Other("x".into()), ..base },
        ]);
        variants
    }

    #[test]
    fn every_field_and_the_kind_take_part() {
        let mut cache = Cache::default();
        let kinds = || [None].into_iter().chain(Kind::ALL.map(Some));
        let keys: Vec<_> =
            variants().into_iter().flat_map(|request| kinds().map(move |kind| (request.clone(), kind))).collect();
        assert!(keys.len() >= 26 * 10, "{}", keys.len());
        for (index, (request, kind)) in keys.iter().enumerate() {
            let hash = KeyHash::of(request, *kind);
            assert_eq!(cache.get(hash, request, *kind), None, "a stale hit for {request:?}");
            assert_eq!(cache.keep(hash, request, *kind, index), index);
        }
        for (index, (request, kind)) in keys.iter().enumerate() {
            let hash = KeyHash::of(request, *kind);
            assert_eq!(cache.get(hash, request, *kind), Some(&index));
            assert_eq!(cache.keep(hash, request, *kind, 0), index, "the first answer stays");
        }
    }

    #[test]
    fn one_hash_for_two_keys_is_no_hit() {
        let mut cache = Cache::default();
        let (one, two) = (LayerRequest::default(), LayerRequest { head_size: 7, ..LayerRequest::default() });
        cache.keep(KeyHash(1), &one, None, 1);
        assert_eq!(cache.get(KeyHash(1), &two, None), None);
        assert_eq!(cache.keep(KeyHash(1), &two, None, 2), 2);
        assert_eq!(cache.get(KeyHash(1), &one, None), Some(&1));
    }

    #[test]
    fn it_does_not_grow_for_ever() {
        let mut cache = Cache::default();
        for head_size in 0..10_000 {
            let request = LayerRequest { head_size, ..LayerRequest::default() };
            cache.keep(KeyHash::of(&request, None), &request, None, ());
        }
        assert!(cache.answers.len() <= CAPACITY);
    }
}
