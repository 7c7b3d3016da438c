//! Dimensions bound by name across the arguments of one call, so that a mismatch can name both sides.

use crate::attention::HEAD_DIM_STEP;
use crate::error::{Error, Result};
use crate::packed_keys::GROUP_TOKENS;
use crate::view::{DType, View};

/// Dimensions of `q` and `out`.
pub const QUERIES: [&str; 3] = ["num_tokens", "num_q_heads", "head_dim"];
/// Dimensions of `lse`.
pub const LSE: [&str; 2] = ["num_tokens", "num_q_heads"];
/// Dimensions of `sinks`.
pub const SINKS: [&str; 1] = ["num_q_heads"];
/// Dimensions of `k` and `v`.
pub const KEYS: [&str; 3] = ["num_tokens", "num_kv_heads", "head_dim"];
/// Dimensions of one layer of the cache.
pub const CACHE: [&str; 4] = ["num_blocks", "num_kv_heads", "block_size", "head_dim"];
/// Dimensions of a whole pool.
pub const POOL: [&str; 6] = ["num_blocks", "num_layers", "2", "num_kv_heads", "block_size", "head_dim"];
/// Dimensions of a block table.
pub const BLOCK_TABLE: [&str; 2] = ["num_rows", "max_blocks_per_seq"];
/// Dimensions of a block table with its axis of cache groups.
pub const GROUPED_BLOCK_TABLE: [&str; 3] = ["num_groups", "num_rows", "max_blocks_per_seq"];
/// Dimensions of gathered keys and values.
pub const VALUES_OUT: [&str; 3] = ["sum(seq_lens)", "num_kv_heads", "head_dim"];

/// Dimensions of rows that are normalised.
pub const ROWS: [&str; 2] = ["num_rows", "size"];
/// Dimensions of scores that tokens are drawn by.
pub const SCORES: [&str; 2] = ["num_rows", "vocab_size"];
/// Dimensions of heads that are turned and of those that are not, beside one another.
pub const HEADS: [&str; 3] = ["num_tokens", "num_heads", "head_dim"];
/// Dimensions of cosines and sines.
pub const ROTARY: [&str; 2] = ["num_tokens", "head_dim"];

const COMPUTED: &str = "float32, float16 or bfloat16";
const CACHED: &str = "float32, float16, bfloat16, float8_e4m3fn or float8_e5m2";

/// A shape as Python prints it.
pub fn shape_text<T: std::fmt::Display>(shape: &[T]) -> String {
    let sizes: Vec<String> = shape.iter().map(ToString::to_string).collect();
    match sizes.as_slice() {
        [one] => format!("({one},)"),
        many => format!("({})", many.join(", ")),
    }
}

/// The sizes seen so far in one call.
#[derive(Debug, Default)]
pub(crate) struct Dims {
    bound: Vec<(&'static str, usize)>,
}

impl Dims {
    /// Fixes the size of a dimension that no array argument carries.
    pub(crate) fn fix(&mut self, name: &'static str, size: usize) {
        self.bound.push((name, size));
    }

    /// The size of a dimension that was bound.
    pub(crate) fn size(&self, name: &str) -> Option<usize> {
        self.bound.iter().find(|(n, _)| *n == name).map(|(_, s)| *s)
    }

    /// Binds the sizes of `view`, or names the one that disagrees with an earlier argument.
    pub(crate) fn bind<const N: usize>(
        &mut self,
        argument: &'static str,
        view: &View<N>,
        names: [&'static str; N],
    ) -> Result<()> {
        let shape = view.shape();
        let agrees = names.iter().zip(shape).all(|(name, size)| self.size(name).is_none_or(|bound| bound == size));
        if !agrees {
            return Err(Error::Shape { argument, expected: self.expected(&names), found: shape_text(&shape) });
        }
        for (name, size) in names.into_iter().zip(shape) {
            if self.size(name).is_none() {
                self.fix(name, size);
            }
        }
        Ok(())
    }

    fn expected(&self, names: &[&'static str]) -> String {
        let parts: Vec<String> = names
            .iter()
            .map(|name| match self.size(name) {
                Some(size) if *name == size.to_string() => (*name).to_owned(),
                Some(size) => format!("{name}={size}"),
                None => (*name).to_owned(),
            })
            .collect();
        shape_text(&parts)
    }
}

/// Refuses element types that the operations do not compute with.
pub(crate) fn check_computed<const N: usize>(argument: &'static str, view: &View<N>) -> Result<()> {
    if view.dtype().is_computed() {
        return Ok(());
    }
    Err(Error::DType { argument, expected: COMPUTED, found: view.dtype().name() })
}

/// Refuses element types that a cache cannot have.
pub(crate) fn check_cached<const N: usize>(argument: &'static str, view: &View<N>) -> Result<()> {
    if view.dtype().is_fp8() || view.dtype().is_computed() {
        return Ok(());
    }
    Err(Error::DType { argument, expected: CACHED, found: view.dtype().name() })
}

/// Refuses scales that do not fit a cache: one for all KV heads or one each, and only where it is FP8.
pub(crate) fn check_scale(argument: &'static str, scale: &View<1>, cache: &View<4>) -> Result<()> {
    check_dtype(argument, scale, DType::F32)?;
    if !cache.dtype().is_fp8() {
        let expected = "none beside a cache that is not FP8".to_owned();
        return Err(Error::Value { argument, expected, found: format!("a cache of {}", cache.dtype().name()) });
    }
    let num_kv_heads = cache.shape()[1];
    if scale.shape() == [1] || scale.shape() == [num_kv_heads] {
        return Ok(());
    }
    let expected = format!("(1,) or (num_kv_heads={num_kv_heads},)");
    Err(Error::Shape { argument, expected, found: shape_text(&scale.shape()) })
}

/// Refuses every element type but one.
pub(crate) fn check_dtype<const N: usize>(argument: &'static str, view: &View<N>, dtype: DType) -> Result<()> {
    if view.dtype() == dtype {
        return Ok(());
    }
    Err(Error::DType { argument, expected: dtype.name(), found: view.dtype().name() })
}

/// Refuses keys that are neither contiguous rows nor packed as packed keys are.
pub(crate) fn check_keys<const N: usize>(argument: &'static str, view: &View<N>) -> Result<()> {
    if !view.is_packed() {
        return check_rows(argument, view);
    }
    let ([.., block_size, head_dim], [.., token_stride, stride]) = (&view.shape()[..], &view.strides()[..]) else {
        panic!("broken law: packed keys of {N} dimensions");
    };
    if !block_size.is_multiple_of(GROUP_TOKENS) || !head_dim.is_multiple_of(HEAD_DIM_STEP) || *head_dim == 0 {
        return Err(Error::Shape {
            argument,
            expected: format!(
                "(..., a multiple of {GROUP_TOKENS}, a multiple of {HEAD_DIM_STEP}), because keys are packed"
            ),
            found: shape_text(&view.shape()),
        });
    }
    if view.is_empty() || (*stride == 1 && *token_stride == *head_dim as i64) {
        return Ok(());
    }
    let expected = "the keys of a head in one span, because they are packed";
    Err(Error::Strides { argument, expected, found: shape_text(&view.strides()) })
}

/// Refuses rows of `head_dim` that are not contiguous, packed ones among them.
pub(crate) fn check_rows<const N: usize>(argument: &'static str, view: &View<N>) -> Result<()> {
    if view.is_packed() {
        let expected = "an array in the natural layout".to_owned();
        return Err(Error::Value { argument, expected, found: "packed keys".to_owned() });
    }
    if view.has_contiguous_rows() {
        return Ok(());
    }
    Err(Error::Strides { argument, expected: "stride 1 in the last dimension", found: shape_text(&view.strides()) })
}

/// Refuses an output in which two elements may share an address.
pub(crate) fn check_distinct<const N: usize>(argument: &'static str, view: &View<N>) -> Result<()> {
    if view.is_distinct() {
        return Ok(());
    }
    Err(Error::Strides {
        argument,
        expected: "an output whose elements do not overlap",
        found: shape_text(&view.strides()),
    })
}

/// Refuses an output that reaches into the memory of another argument.
pub(crate) fn check_apart<const N: usize, const M: usize>(
    output: (&'static str, &View<N>),
    other: (&'static str, &View<M>),
) -> Result<()> {
    let (a, b) = (output.1.extent(), other.1.extent());
    if a.is_empty() || b.is_empty() || a.end <= b.start || b.end <= a.start {
        return Ok(());
    }
    Err(Error::Overlap { output: output.0, other: other.0 })
}
