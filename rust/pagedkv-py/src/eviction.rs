//! Pins, priorities of cached blocks and adapters that are loaded anew, for scheduler and manager.

use std::sync::Arc;

use pagedkv_core::{PinId, Retention, SequenceId};
use pyo3::prelude::*;

use crate::arrays::ids;
use crate::errors::{invalid, to_py_err};
use crate::manager::KVCacheManager;
use crate::scheduler::{Scheduler, Span, identity};

pub(crate) fn retention(cache_priority: Option<u8>, cache_ttl: Option<f64>) -> PyResult<Option<Retention>> {
    match (cache_priority, cache_ttl) {
        (None, Some(ttl)) => Err(invalid("cache_ttl", "a cache_priority with it", &ttl.to_string())),
        (None, None) => Ok(None),
        (Some(priority), ttl) => Ok(Some(Retention { priority, seconds: ttl.unwrap_or(f64::INFINITY) })),
    }
}

#[pymethods]
impl Scheduler {
    /// Keep what the cache holds of a prefix, whole blocks only, until `unpin`.
    ///
    /// Parameters are those of `add_request`.
    ///
    /// Returns
    /// -------
    /// tuple of int, or None
    ///     The pin, and the tokens that it keeps: 0 for a prefix that is not cached. None, and nothing changed, if that
    ///     takes more blocks than the quota has left; a block counts once however many pins hold it.
    ///
    /// Raises
    /// ------
    /// InvalidArgumentError
    ///     If the configuration has no `pin_quota_bytes` or `pin_quota_blocks`.
    #[pyo3(signature = (prompt_token_ids, *, cache_salt=None, lora_id=None, image_spans=Vec::new()))]
    fn pin(
        &self,
        prompt_token_ids: &Bound<'_, PyAny>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::args::optional_i64s::lora_id)] lora_id: Option<i64>,
        #[pyo3(from_py_with = crate::args::image_spans)] image_spans: Vec<Span>,
    ) -> PyResult<Option<(u64, u32)>> {
        let tokens = ids("prompt_token_ids", prompt_token_ids)?;
        let identity = identity(lora_id, cache_salt, image_spans)?;
        let pinned = self.core.with(|core| core.pin(tokens.into(), identity))?.map_err(to_py_err)?;
        Ok(pinned.map(|(pin, num_tokens)| (pin.get(), num_tokens)))
    }

    /// Take a pin away: its blocks are cached like others.
    fn unpin(&self, #[pyo3(from_py_with = crate::args::u64s::pin)] pin: u64) -> PyResult<()> {
        self.core.with(|core| core.unpin(PinId::new(pin)))?.map_err(to_py_err)
    }

    /// Pinned prefixes, and the distinct blocks that they hold.
    #[getter]
    fn num_pinned(&self) -> PyResult<(usize, u32)> {
        self.core.with(|core| core.manager().num_pinned())
    }

    /// Forget every cached prefix of an adapter that was loaded anew; its pins go with it.
    fn invalidate_lora(&self, #[pyo3(from_py_with = crate::args::i64s::lora_id)] lora_id: i64) -> PyResult<()> {
        self.core.with(|core| core.invalidate_lora(lora_id))
    }
}

#[pymethods]
impl KVCacheManager {
    /// Keep what the cache holds of a prefix until `unpin`; see `Scheduler.pin`.
    #[pyo3(signature = (prompt_token_ids, *, cache_salt=None, lora_id=None, image_spans=Vec::new()))]
    fn pin(
        &self,
        prompt_token_ids: &Bound<'_, PyAny>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::args::optional_i64s::lora_id)] lora_id: Option<i64>,
        #[pyo3(from_py_with = crate::args::image_spans)] image_spans: Vec<Span>,
    ) -> PyResult<Option<(u64, u32)>> {
        let tokens = ids("prompt_token_ids", prompt_token_ids)?;
        let identity = Arc::new(identity(lora_id, cache_salt, image_spans)?);
        let pinned = self.call(|core| core.pin(tokens.into(), identity))?;
        Ok(pinned.map(|(pin, num_tokens)| (pin.get(), num_tokens)))
    }

    /// Take a pin away: its blocks are cached like others.
    fn unpin(&self, #[pyo3(from_py_with = crate::args::u64s::pin)] pin: u64) -> PyResult<()> {
        self.call(|core| core.unpin(PinId::new(pin)))
    }

    /// Pinned prefixes, and the distinct blocks that they hold.
    #[getter]
    fn num_pinned(&self) -> PyResult<(usize, u32)> {
        self.call(|core| Ok(core.num_pinned()))
    }

    /// Keep the blocks that a sequence fills or hits from now on as `cache_priority` and `cache_ttl` of
    /// `Scheduler.add_request` say.
    #[pyo3(signature = (sequence, cache_priority, cache_ttl=None))]
    fn retain(
        &self,
        #[pyo3(from_py_with = crate::args::u64s::sequence)] sequence: u64,
        #[pyo3(from_py_with = crate::args::u8s::cache_priority)] cache_priority: u8,
        #[pyo3(from_py_with = crate::args::optional_f64s::cache_ttl)] cache_ttl: Option<f64>,
    ) -> PyResult<()> {
        let retention = Retention { priority: cache_priority, seconds: cache_ttl.unwrap_or(f64::INFINITY) };
        self.call(|core| core.retain(SequenceId::from_bits(sequence), retention))
    }

    /// Let time pass, in seconds, for cached blocks whose priority holds for a time.
    fn advance(&self, #[pyo3(from_py_with = crate::args::f64s::now)] now: f64) -> PyResult<()> {
        self.call(|core| {
            core.advance(now);
            Ok(())
        })
    }

    /// Forget every cached prefix of an adapter that was loaded anew; its pins go with it.
    fn invalidate_lora(&self, #[pyo3(from_py_with = crate::args::i64s::lora_id)] lora_id: i64) -> PyResult<()> {
        self.call(|core| {
            core.invalidate_lora(lora_id);
            Ok(())
        })
    }
}
