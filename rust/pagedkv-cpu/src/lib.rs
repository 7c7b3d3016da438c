//! Attention and cache operations on the CPU, over raw strided views.

mod view;

pub use view::{DType, View};
