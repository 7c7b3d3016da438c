//! What scheduler and manager say about the prefix cache and the blocks behind it, written once for both.

use numpy::PyArray1;
use pagedkv_core::{BlockId, BlockPool, KVCacheManager as CoreManager, LoraName, PinId, Retention, Scheduler as Core};
use pyo3::prelude::*;

use crate::arrays::{array, ids};
use crate::errors::{invalid, to_py_err};
use crate::events::{KVCacheSnapshot, KVEventBatch};
use crate::identity::{Span, identity};
use crate::manager::KVCacheManager;
use crate::scheduler::Scheduler;

pub(crate) fn retention(cache_priority: Option<u8>, cache_ttl: Option<f64>) -> PyResult<Option<Retention>> {
    match (cache_priority, cache_ttl) {
        (None, Some(ttl)) => Err(invalid("cache_ttl", "a cache_priority with it", &ttl.to_string())),
        (None, None) => Ok(None),
        (Some(priority), ttl) => Ok(Some(Retention { priority, seconds: ttl.unwrap_or(f64::INFINITY) })),
    }
}

/// What has a manager, or is one.
trait Manages {
    fn manages(&self) -> &CoreManager;
}

impl Manages for CoreManager {
    fn manages(&self) -> &CoreManager {
        self
    }
}

impl Manages for Core {
    fn manages(&self) -> &CoreManager {
        self.manager()
    }
}

/// Blocks free, cached, held and fenced.
fn counts(pool: &BlockPool) -> (u32, u32, u32, u32) {
    (pool.num_free(), pool.num_cached(), pool.num_held(), pool.num_fenced())
}

macro_rules! prefix_cache_methods {
    ($class:ident over $core:ident) => {
        #[pymethods]
        impl $class {
            /// Keep what the cache holds of a prefix, whole blocks only, until `unpin`.
            ///
            /// Parameters are those of `Scheduler.add_request`.
            ///
            /// Returns
            /// -------
            /// tuple of int, or None
            ///     The pin, and the tokens that it keeps: 0 for a prefix that is not cached. None, and nothing changed, if
            ///     that takes more blocks than the quota has left; a block counts once however many pins hold it.
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
                let pinned = self.core.with(|core| core.pin(tokens.into(), identity.into()))?.map_err(to_py_err)?;
                Ok(pinned.map(|(pin, num_tokens)| (pin.get(), num_tokens)))
            }

            /// Take a pin away: its blocks are cached like others.
            fn unpin(&self, #[pyo3(from_py_with = crate::args::u64s::pin)] pin: u64) -> PyResult<()> {
                self.core.with(|core| core.unpin(PinId::new(pin)))?.map_err(to_py_err)
            }

            /// Pinned prefixes, and the distinct blocks that they hold.
            #[getter]
            fn num_pinned(&self) -> PyResult<(usize, u32)> {
                self.core.with(|core| core.manages().num_pinned())
            }

            /// Forget every cached prefix of an adapter that was loaded anew; its pins go with it.
            fn invalidate_lora(&self, #[pyo3(from_py_with = crate::args::i64s::lora_id)] lora_id: i64) -> PyResult<()> {
                self.core.with(|core| core.invalidate_lora(lora_id))
            }

            /// Forget every cached prefix, after new weights say.
            fn reset_prefix_cache(&self) -> PyResult<()> {
                self.core.with($core::reset_prefix_cache)
            }

            /// Take the events of the prefix cache since the last call.
            ///
            /// Returns
            /// -------
            /// KVEventBatch
            ///
            /// Raises
            /// ------
            /// UnsupportedError
            ///     Without `CacheConfig(enable_kv_cache_events=True)`.
            fn take_events(&self, py: Python<'_>) -> PyResult<KVEventBatch> {
                let batch = self.core.with($core::take_events)?.map_err(to_py_err)?;
                KVEventBatch::new(py, batch)
            }

            /// Everything that can be hit, as events, for who joins late; O(pool).
            fn event_snapshot(&self, py: Python<'_>) -> PyResult<KVCacheSnapshot> {
                let snapshot = self.core.with($core::event_snapshot)?.map_err(to_py_err)?;
                KVCacheSnapshot::new(py, snapshot)
            }

            /// Say what an adapter is called in events and in their hashes, before it is first used.
            fn name_lora(
                &self,
                #[pyo3(from_py_with = crate::args::i64s::lora_id)] lora_id: i64,
                name: String,
                path: String,
            ) -> PyResult<()> {
                self.core.with(|core| core.name_lora(lora_id, LoraName { name, path }))?.map_err(to_py_err)
            }

            /// Holders of each block, int32, same length as `block_ids`.
            fn ref_counts<'py>(
                &self,
                py: Python<'py>,
                block_ids: &Bound<'_, PyAny>,
            ) -> PyResult<Bound<'py, PyArray1<i32>>> {
                let blocks = ids("block_ids", block_ids)?;
                let counts = self.core.with(|core| {
                    let pool = core.manages().pool();
                    let count = |&block: &i32| pool.ref_count(BlockId::new(block as u32)).map(|count| count as i32);
                    blocks.iter().map(count).collect::<Result<Vec<_>, _>>()
                })?;
                Ok(array(py, counts.map_err(to_py_err)?))
            }

            /// Share of the usable blocks that are not available, from 0 to 1.
            #[getter]
            fn usage(&self) -> PyResult<f64> {
                self.core.with(|core| core.manages().usage())
            }

            /// Blocks free, cached, held and fenced.
            #[getter]
            fn num_blocks_by_state(&self) -> PyResult<(u32, u32, u32, u32)> {
                self.core.with(|core| counts(core.manages().pool()))
            }

            /// Check every law of the bookkeeping; O(pool).
            ///
            /// Raises
            /// ------
            /// InternalError
            ///     Naming the first law that does not hold.
            fn check_integrity(&self) -> PyResult<()> {
                self.core.audit($core::check_integrity)
            }

            /// For tests: makes the bookkeeping wrong, so that an audit finds it.
            fn _break_a_law(&self) -> PyResult<()> {
                self.core.with($core::break_a_law)
            }
        }
    };
}
prefix_cache_methods!(Scheduler over Core);
prefix_cache_methods!(KVCacheManager over CoreManager);
