//! Cost models.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use pagedkv_sim::cost as sim;
use pagedkv_sim::cost::{Fitted, Gpu, Model, Profile, Roofline, Work};
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::sim_err;
use crate::args::{u32s, u64s};
use crate::errors::invalid;

/// How long a step takes: a machine and a model on it.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct CostModel {
    pub(crate) model: Arc<dyn sim::CostModel>,
    shown: String,
}

impl CostModel {
    fn new(model: impl sim::CostModel + std::fmt::Debug + 'static) -> Self {
        let shown = format!("{model:?}");
        Self { model: Arc::new(model), shown }
    }
}

impl Default for CostModel {
    fn default() -> Self {
        Self::new(Fitted::OPT_13B_A100)
    }
}

#[pymethods]
impl CostModel {
    /// Seconds as a linear function of what a step does; by default OPT-13B on an A100 with 40 GB.
    ///
    /// The defaults are not from the paper: they were fitted to its batches (Figure 13) and to the rates at which its
    /// baselines give way.
    ///
    /// Parameters
    /// ----------
    /// base : float
    ///     Seconds of every step.
    /// per_seq : float
    ///     Of every sequence.
    /// per_context_token : float
    ///     Of every token that is read.
    /// per_prompt_token : float
    ///     Of every token of a prompt.
    /// per_copied_token : float
    ///     Of every token whose keys and values are copied.
    #[classmethod]
    #[pyo3(signature = (*, base=23e-3, per_seq=0.33e-3, per_context_token=0.63e-6, per_prompt_token=0.15e-3, per_copied_token=1.26e-6))]
    fn fitted(
        _class: &Bound<'_, PyType>,
        base: f64,
        per_seq: f64,
        per_context_token: f64,
        per_prompt_token: f64,
        per_copied_token: f64,
    ) -> PyResult<Self> {
        for (name, value) in [
            ("base", base),
            ("per_seq", per_seq),
            ("per_context_token", per_context_token),
            ("per_prompt_token", per_prompt_token),
            ("per_copied_token", per_copied_token),
        ] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(invalid(name, "finite seconds of at least 0", &value.to_string()));
            }
        }
        Ok(Self::new(Fitted { base, per_seq, per_context_token, per_prompt_token, per_copied_token }))
    }

    /// The least time that a machine needs, at stated efficiencies; by default OPT-13B on an A100 with 40 GB.
    ///
    /// Parameters
    /// ----------
    /// bandwidth : float
    ///     Bytes a second between the device and its memory.
    /// flops : float
    ///     Dense operations a second in the type of the weights.
    /// active_parameters : float
    ///     Parameters that a token passes.
    /// weight_bytes : float
    ///     Bytes of all weights.
    /// kv_token_bytes : float
    ///     Bytes of a token's keys and values, all layers together.
    /// attention_width : float
    ///     Layers x query heads x head dimension.
    /// bandwidth_efficiency, flops_efficiency : float
    ///     Shares that kernels reach.
    /// overhead : float
    ///     Seconds of a step that are neither.
    #[classmethod]
    #[pyo3(signature = (
        *, bandwidth=1.555e12, flops=312e12, active_parameters=12.85e9, weight_bytes=25.7e9, kv_token_bytes=819_200.0,
        attention_width=204_800.0, bandwidth_efficiency=0.8, flops_efficiency=0.5, overhead=2e-3
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are the sizes of a machine and a model")]
    fn roofline(
        _class: &Bound<'_, PyType>,
        bandwidth: f64,
        flops: f64,
        active_parameters: f64,
        weight_bytes: f64,
        kv_token_bytes: f64,
        attention_width: f64,
        bandwidth_efficiency: f64,
        flops_efficiency: f64,
        overhead: f64,
    ) -> PyResult<Self> {
        let gpu = Gpu { bandwidth, flops, bandwidth_efficiency, flops_efficiency, overhead };
        let model = Model { active_parameters, weight_bytes, kv_token_bytes, attention_width };
        Ok(Self::new(Roofline::new(gpu, model).map_err(sim_err)?))
    }

    /// The line through measured steps: CSV with the columns `num_seqs`, `context_tokens`, `prompt_tokens`, `seconds`.
    ///
    /// Raises
    /// ------
    /// InvalidArgumentError
    ///     Naming line and field, or what the steps leave open.
    #[classmethod]
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python come by value")]
    fn profile(_class: &Bound<'_, PyType>, path: PathBuf) -> PyResult<Self> {
        let found = Profile::read(File::open(&path)?);
        let named = |error| invalid("path", "a profile of steps", &format!("{}: {error}", path.display()));
        Ok(Self::new(found.map_err(named)?))
    }

    /// Seconds of a step.
    #[pyo3(signature = (num_seqs, context_tokens, prompt_tokens=0))]
    fn step_seconds(
        &self,
        #[pyo3(from_py_with = u32s::num_seqs)] num_seqs: u32,
        #[pyo3(from_py_with = u64s::context_tokens)] context_tokens: u64,
        #[pyo3(from_py_with = u64s::prompt_tokens)] prompt_tokens: u64,
    ) -> f64 {
        self.model.step_seconds(&Work { num_seqs, context_tokens, prompt_tokens, ..Work::default() })
    }

    fn __repr__(&self) -> String {
        format!("CostModel({})", self.shown)
    }
}
