//! Limits of a step.

use std::collections::BTreeMap;

use pagedkv_core::SchedulerConfig as CoreLimits;
use pagedkv_core::config as core;
use pyo3::prelude::*;

use super::{NewArguments, new_arguments};
use crate::errors::to_py_err;
use crate::getters::getters;

/// Limits of a step.
///
/// Parameters
/// ----------
/// max_num_seqs : int
///     Seats: sequences that may be resident at once.
/// max_num_batched_tokens : int
///     Tokens per step.
/// max_model_len : int
///     Longest sequence, prompt and output together.
/// watermark : float
///     Share of the usable blocks that an admission leaves free while other requests run.
/// lookahead : int
///     Most draft tokens per sequence.
/// max_plans_in_flight : int
///     Plans that may be made before the oldest is ended.
/// preemption_mode : {"recompute", "swap"}
///     What becomes of the blocks of a request that is preempted: they are dropped, but for what the prefix cache keeps,
///     and computed again; or they go to the host tier and come back. A request that has not filled a block, or for which
///     the host tier has no room, is computed again.
/// policy : {"fcfs", "priority", "lpm", "fair", "external"}
///     First come, first served; lower `priority` first, taking seats and blocks from higher ones; longest cached prefix
///     first; weighted fair share per `tenant`; by the keys that `Scheduler(policy=...)` returns.
/// ageing : int or None
///     Overtakings after which a request comes first whatever the policy says; None is strict and may starve.
/// tenant_weights : dict of str to float, optional
///     Weights of tenants under "fair"; 1 for those not named.
/// long_prefill_token_threshold : int
///     Most prompt tokens of one request per step; 0 for no limit but the budget.
/// max_num_partial_prefills : int, optional
///     Most requests that may be in the middle of their prompt.
/// prefill_chunk_multiple : int
///     A chunk that does not end a prefill ends on a multiple of this many tokens.
#[pyclass(frozen, eq, from_py_object, module = "pagedkv._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct SchedulerConfig(pub(crate) CoreLimits);

getters!(SchedulerConfig.0 {
    max_num_seqs: u32;
    max_num_batched_tokens: u32;
    max_model_len: u32;
    watermark: f64;
    lookahead: u32;
    preemption_mode: &'static str = |limits| limits.preemption_mode.name();
    max_plans_in_flight: u32;
    ageing: Option<u32>;
    tenant_weights: BTreeMap<String, f64> = |limits| limits.tenant_weights.iter().cloned().collect();
    long_prefill_token_threshold: u32;
    max_num_partial_prefills: u32;
    prefill_chunk_multiple: u32;
    policy: &'static str = |limits| limits.policy.name();
});

#[pymethods]
impl SchedulerConfig {
    #[new]
    #[pyo3(signature = (
        max_num_seqs=core::DEFAULT_MAX_NUM_SEQS,
        max_num_batched_tokens=core::DEFAULT_MAX_NUM_BATCHED_TOKENS,
        max_model_len=core::DEFAULT_MAX_MODEL_LEN,
        *,
        watermark=0.0,
        lookahead=0,
        max_plans_in_flight=core::DEFAULT_MAX_PLANS_IN_FLIGHT,
        preemption_mode="recompute",
        policy="fcfs",
        ageing=Some(core::DEFAULT_AGEING),
        tenant_weights=None,
        long_prefill_token_threshold=0,
        max_num_partial_prefills=None,
        prefill_chunk_multiple=1,
    ))]
    #[expect(clippy::too_many_arguments, reason = "the fields of the configuration")]
    fn new(
        #[pyo3(from_py_with = crate::args::u32s::max_num_seqs)] max_num_seqs: u32,
        #[pyo3(from_py_with = crate::args::u32s::max_num_batched_tokens)] max_num_batched_tokens: u32,
        #[pyo3(from_py_with = crate::args::u32s::max_model_len)] max_model_len: u32,
        #[pyo3(from_py_with = crate::args::f64s::watermark)] watermark: f64,
        #[pyo3(from_py_with = crate::args::u32s::lookahead)] lookahead: u32,
        #[pyo3(from_py_with = crate::args::u32s::max_plans_in_flight)] max_plans_in_flight: u32,
        preemption_mode: &str,
        policy: &str,
        #[pyo3(from_py_with = crate::args::optional_u32s::ageing)] ageing: Option<u32>,
        tenant_weights: Option<BTreeMap<String, f64>>,
        #[pyo3(from_py_with = crate::args::u32s::long_prefill_token_threshold)] long_prefill_token_threshold: u32,
        #[pyo3(from_py_with = crate::args::optional_u32s::max_num_partial_prefills)] max_num_partial_prefills: Option<
            u32,
        >,
        #[pyo3(from_py_with = crate::args::u32s::prefill_chunk_multiple)] prefill_chunk_multiple: u32,
    ) -> PyResult<Self> {
        let policy = policy.parse().map_err(to_py_err)?;
        let defaults = CoreLimits::default();
        let limits = CoreLimits {
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            watermark,
            lookahead,
            max_plans_in_flight,
            preemption_mode: preemption_mode.parse().map_err(to_py_err)?,
            policy,
            ageing,
            tenant_weights: tenant_weights.unwrap_or_default().into_iter().collect(),
            long_prefill_token_threshold,
            max_num_partial_prefills: max_num_partial_prefills.unwrap_or(defaults.max_num_partial_prefills),
            prefill_chunk_multiple,
        };
        limits.validate().map_err(to_py_err)?;
        Ok(Self(limits))
    }

    fn __getnewargs_ex__<'py>(slf: &Bound<'py, Self>) -> PyResult<NewArguments<'py>> {
        let positional = ["max_num_seqs", "max_num_batched_tokens", "max_model_len"];
        let names = [
            "watermark",
            "lookahead",
            "max_plans_in_flight",
            "preemption_mode",
            "policy",
            "ageing",
            "tenant_weights",
            "long_prefill_token_threshold",
            "max_num_partial_prefills",
            "prefill_chunk_multiple",
        ];
        new_arguments(slf.as_any(), &positional, &names)
    }

    fn __repr__(&self) -> String {
        let CoreLimits { max_num_seqs, max_num_batched_tokens, max_model_len, max_plans_in_flight, .. } = self.0;
        format!(
            "SchedulerConfig(max_num_seqs={max_num_seqs}, max_num_batched_tokens={max_num_batched_tokens}, \
             max_model_len={max_model_len}, max_plans_in_flight={max_plans_in_flight})"
        )
    }
}
