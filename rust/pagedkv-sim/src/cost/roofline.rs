//! The least time that a machine needs: its arithmetic or its memory, whichever takes longer, at stated efficiencies.

use super::{CostModel, Work};
use crate::error::{Result, invalid};

/// A device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    /// Bytes a second between the device and its memory.
    pub bandwidth: f64,
    /// Dense operations a second in the type of the weights.
    pub flops: f64,
    /// Share of the bandwidth that kernels reach.
    pub bandwidth_efficiency: f64,
    /// Share of the operations that kernels reach.
    pub flops_efficiency: f64,
    /// Seconds of a step that are neither: launches, sampling, the host.
    pub overhead: f64,
}

impl Gpu {
    /// An A100 with 40 GB, by its data sheet: 1,555 GB/s, 312 TFLOP/s in float16; the rest assumed.
    pub const A100_40GB: Self =
        Self { bandwidth: 1.555e12, flops: 312e12, bandwidth_efficiency: 0.8, flops_efficiency: 0.5, overhead: 2e-3 };
}

/// What a model asks of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// Parameters that a token passes.
    pub active_parameters: f64,
    /// Bytes of all weights.
    pub weight_bytes: f64,
    /// Bytes of a token's keys and values, all layers together.
    pub kv_token_bytes: f64,
    /// Layers x query heads x head dimension: a query and a key that it sees cost four operations for each.
    pub attention_width: f64,
}

impl Model {
    /// OPT-13B in float16: 40 layers of 40 heads of 128.
    pub const OPT_13B: Self = Self {
        active_parameters: 12.85e9,
        weight_bytes: 25.7e9,
        kv_token_bytes: 819_200.0,
        attention_width: 40.0 * 5120.0,
    };
}

/// A model on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    gpu: Gpu,
    model: Model,
}

impl Roofline {
    /// A model on a device.
    ///
    /// # Errors
    /// [`crate::SimError::InvalidArgument`] for a number that is not above 0, an efficiency above 1, or an overhead below 0.
    pub fn new(gpu: Gpu, model: Model) -> Result<Self> {
        for (argument, value) in [
            ("bandwidth", gpu.bandwidth),
            ("flops", gpu.flops),
            ("active_parameters", model.active_parameters),
            ("weight_bytes", model.weight_bytes),
            ("kv_token_bytes", model.kv_token_bytes),
            ("attention_width", model.attention_width),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return invalid(argument, "a finite number above 0", value);
            }
        }
        for (argument, value) in
            [("bandwidth_efficiency", gpu.bandwidth_efficiency), ("flops_efficiency", gpu.flops_efficiency)]
        {
            if !(value > 0.0 && value <= 1.0) {
                return invalid(argument, "a share above 0, at most 1", value);
            }
        }
        if !(gpu.overhead.is_finite() && gpu.overhead >= 0.0) {
            return invalid("overhead", "finite seconds of at least 0", gpu.overhead);
        }
        Ok(Self { gpu, model })
    }
}

impl CostModel for Roofline {
    fn step_seconds(&self, work: &Work) -> f64 {
        let Self { gpu, model } = self;
        let copying = 2.0 * model.kv_token_bytes * work.copied_tokens as f64;
        let moved = copying / (gpu.bandwidth * gpu.bandwidth_efficiency);
        if work.num_seqs == 0 {
            return moved;
        }
        let tokens = work.prompt_tokens as f64 + f64::from(work.num_seqs);
        let seen = (work.context_tokens + work.prompt_pairs) as f64;
        let operations = 2.0 * model.active_parameters * tokens + 4.0 * model.attention_width * seen;
        let bytes = model.weight_bytes + model.kv_token_bytes * (work.context_tokens as f64 + tokens);
        let computing = operations / (gpu.flops * gpu.flops_efficiency);
        let reading = bytes / (gpu.bandwidth * gpu.bandwidth_efficiency);
        gpu.overhead + computing.max(reading) + moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roofline() -> Roofline {
        Roofline::new(Gpu::A100_40GB, Model::OPT_13B).unwrap()
    }

    #[test]
    fn decoding_one_sequence_takes_the_time_to_read_the_weights() {
        let seconds = roofline().step_seconds(&Work { num_seqs: 1, ..Work::default() });
        assert!((seconds - 2e-3 - 25.7e9 / (1.555e12 * 0.8)).abs() < 1e-5, "{seconds}");
    }

    #[test]
    fn a_long_prompt_takes_the_time_of_its_arithmetic() {
        let mut work = Work { num_seqs: 1, ..Work::default() };
        work.add_prompt(2048, 0);
        let least = 2.0 * 12.85e9 * 2048.0 / (312e12 * 0.5);
        assert!(roofline().step_seconds(&work) > least);
    }

    #[test]
    fn an_efficiency_above_one_is_refused() {
        let gpu = Gpu { flops_efficiency: 1.5, ..Gpu::A100_40GB };
        let error = Roofline::new(gpu, Model::OPT_13B).unwrap_err().to_string();
        assert_eq!(error, "flops_efficiency: expected a share above 0, at most 1, found 1.5");
    }
}
