//! A group of layers.

use pagedkv_core::GroupSpec as CoreGroup;
use pyo3::prelude::*;

use super::{NewArguments, new_arguments};
use crate::args::{elements, number};
use crate::errors::{invalid, to_py_err};

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

    /// The model's layers in the group, ascending.
    #[getter]
    fn layers(&self) -> Vec<u32> {
        self.0.layers.clone()
    }

    #[getter]
    fn num_layers(&self) -> usize {
        self.0.layers.len()
    }

    #[getter]
    fn num_kv_heads(&self) -> u32 {
        self.0.num_kv_heads
    }

    #[getter]
    fn head_dim(&self) -> u32 {
        self.0.head_dim
    }

    #[getter]
    fn dtype(&self) -> &str {
        &self.0.dtype
    }

    #[getter]
    fn sliding_window(&self) -> Option<u32> {
        self.0.sliding_window
    }

    #[getter]
    fn block_size(&self) -> Option<u32> {
        self.0.block_size
    }

    /// Bytes that a token's key and value take in each layer.
    #[getter]
    fn token_bytes(&self) -> PyResult<u64> {
        self.0.token_bytes().map_err(to_py_err)
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
