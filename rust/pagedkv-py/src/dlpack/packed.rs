//! The tag that says that keys are packed, which travels from a pool to its layers.

use pyo3::prelude::*;

use super::Tensor;
use crate::errors::{invalid, unsupported};

/// What of a tensor is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// Nothing: strides say where every element lies.
    Nothing,
    /// The keys of `(..., 2, num_kv_heads, block_size, head_dim)`, not the values.
    KeysOfPool,
    /// All of `(..., num_kv_heads, block_size, head_dim)`.
    Keys,
}

/// Dimensions inside a layer, `(num_kv_heads, block_size, head_dim)`.
const INNER: usize = 3;

impl Tensor {
    pub(super) fn is_packed_in_part(&self) -> bool {
        self.packing != Packing::Nothing
    }

    /// The same memory as a pool whose keys are packed.
    pub(super) fn as_packed(&self) -> PyResult<Self> {
        let is_pool = self.shape.len() > INNER && self.shape[self.shape.len() - INNER - 1] == 2;
        if !is_pool || self.is_packed_in_part() {
            let expected = "a pool (..., 2, num_kv_heads, block_size, head_dim) in the natural layout";
            return Err(invalid("tensor", expected, &self.description()));
        }
        Ok(Self { packing: Packing::KeysOfPool, ..self.clone() })
    }

    /// How the part at `index` of dimension `axis` is packed.
    pub(super) fn packing_of_part(&self, axis: usize, index: i64) -> PyResult<Packing> {
        let inner = self.shape.len() - INNER.min(self.shape.len());
        match self.packing {
            Packing::KeysOfPool if axis + 1 == inner => Ok(if index == 0 { Packing::Keys } else { Packing::Nothing }),
            Packing::Nothing => Ok(Packing::Nothing),
            packing if axis < inner => Ok(packing),
            _ => Err(self.refuse_packed("select inside a layer")),
        }
    }

    /// Packed keys go where their layout is known, and nowhere else.
    pub(super) fn refuse_packed(&self, what: &str) -> PyErr {
        unsupported(&format!("{what} of packed keys, whose elements no strides find, in {}", self.description()))
    }
}
