//! A group of layers.

use pagedkv_core::GroupSpec as CoreGroup;
use pyo3::prelude::*;

use super::{NewArguments, new_arguments};
use crate::args::{elements, number};
use crate::errors::{invalid, to_py_err};
use crate::getters::getters;

/// Layers of one shape that share a block table.
///
/// Parameters
/// ----------
/// layers : int or sequence of int
///     The model's layers in the group, ascending; a number stands for that many layers from the first on.
/// num_kv_heads, head_dim : int
///     Shape of the cache of each layer.
/// dtype : str
///     Element type by its torch name.
/// sliding_window : int, optional
///     Tokens that a query sees, itself included; all by default.
/// block_size : int, optional
///     Tokens per block. `CacheConfig` finds it so that blocks of all groups have equal bytes, and refuses another.
#[pyclass(frozen, eq, from_py_object, module = "pagedkv._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct GroupSpec(pub(super) CoreGroup);

enum Layers {
    Count(u32),
    Indices(Vec<u32>),
}

fn layers(object: &Bound<'_, PyAny>) -> PyResult<Layers> {
    match elements("layers", object)? {
        Some(indices) => Ok(Layers::Indices(indices)),
        None => number("layers", object).map(Layers::Count),
    }
}

getters!(GroupSpec.0 {
    /// The model's layers in the group, ascending.
    layers: Vec<u32> = |group| group.layers.clone();
    num_layers: usize = |group| group.layers.len();
    num_kv_heads: u32;
    head_dim: u32;
    dtype: &str = |group| &group.dtype;
    sliding_window: Option<u32>;
    block_size: Option<u32>;
    /// Bytes that a token's key and value take in each layer.
    token_bytes: PyResult<u64> = |group| group.token_bytes().map_err(to_py_err);
});

#[pymethods]
impl GroupSpec {
    #[new]
    #[pyo3(signature = (layers, num_kv_heads, head_dim, dtype="float32", *, sliding_window=None, block_size=None))]
    fn new(
        #[pyo3(from_py_with = layers)] layers: Layers,
        #[pyo3(from_py_with = crate::args::u32s::num_kv_heads)] num_kv_heads: u32,
        #[pyo3(from_py_with = crate::args::u32s::head_dim)] head_dim: u32,
        dtype: &str,
        #[pyo3(from_py_with = crate::args::optional_u32s::sliding_window)] sliding_window: Option<u32>,
        #[pyo3(from_py_with = crate::args::optional_u32s::block_size)] block_size: Option<u32>,
    ) -> PyResult<Self> {
        let layers = match layers {
            Layers::Count(count) if count >= 1 << 30 => {
                return Err(invalid("layers", "less than 2^30 layers", &count.to_string()));
            }
            Layers::Count(count) => (0..count).collect(),
            Layers::Indices(layers) => layers,
        };
        let dtype = dtype.to_owned();
        let group = CoreGroup { layers, num_kv_heads, head_dim, dtype, sliding_window, block_size };
        group.validate().map_err(to_py_err)?;
        Ok(Self(group))
    }

    fn __getnewargs_ex__<'py>(slf: &Bound<'py, Self>) -> PyResult<NewArguments<'py>> {
        let positional = ["layers", "num_kv_heads", "head_dim", "dtype"];
        new_arguments(slf.as_any(), &positional, &["sliding_window", "block_size"])
    }

    pub(super) fn __repr__(&self) -> String {
        let CoreGroup { layers, num_kv_heads, head_dim, dtype, sliding_window, block_size } = &self.0;
        let optional =
            |name: &str, value: &Option<u32>| value.map_or(String::new(), |value| format!(", {name}={value}"));
        format!(
            "GroupSpec({layers:?}, num_kv_heads={num_kv_heads}, head_dim={head_dim}, dtype={dtype:?}{}{})",
            optional("sliding_window", sliding_window),
            optional("block_size", block_size)
        )
    }
}
