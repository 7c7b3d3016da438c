//! The Python module `pagedkv._core`: convert, lock, call, convert.

use pyo3::prelude::*;

mod cpu_ops;
mod dlpack;

#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::cpu_ops::{append_kv, copy_blocks, default_num_threads, gather_kv, paged_attention, update_block_table};
    #[pymodule_export]
    use crate::dlpack::{Tensor, from_dlpack};
}
