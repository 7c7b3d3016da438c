//! The Python module `pagedkv._core`: convert, lock, call, convert.

use pyo3::prelude::*;

#[pymodule]
mod _core {}
