//! Arguments that are refused by their name: numbers out of range, elements of the wrong kind, and objects that stay here.
//!
//! A number that does not fit is an `OverflowError` to the binding library, which knows nothing of arguments there. So
//! each number has a reader of its name, for `from_py_with`; [`numbers!`] makes them.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::errors::{invalid, wrong_element};
use crate::identity::Span;

/// A number that Python may give.
pub(crate) trait Number: Sized {
    /// What is expected, for messages.
    fn expected() -> String;
    /// The number, or why it is none.
    fn take(object: &Bound<'_, PyAny>) -> PyResult<Self>;
}

macro_rules! integers {
    ($($kind:ty)*) => {$(
        impl Number for $kind {
            fn expected() -> String {
                format!("an integer from {} to {}", <$kind>::MIN, <$kind>::MAX)
            }

            fn take(object: &Bound<'_, PyAny>) -> PyResult<Self> {
                object.extract()
            }
        }
    )*};
}
integers!(u8 u32 u64 usize i32 i64);

macro_rules! floats {
    ($($kind:ty)*) => {$(
        impl Number for $kind {
            fn expected() -> String {
                "a float".to_owned()
            }

            fn take(object: &Bound<'_, PyAny>) -> PyResult<Self> {
                object.extract()
            }
        }
    )*};
}
floats!(f32 f64);

impl<T: Number> Number for Option<T> {
    fn expected() -> String {
        format!("{} or None", T::expected())
    }

    fn take(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if object.is_none() { Ok(None) } else { T::take(object).map(Some) }
    }
}

/// Reads the number that an argument is.
pub(crate) fn number<T: Number>(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<T> {
    T::take(object).map_err(|error| refusal::<T>(argument, object, &error))
}

fn refusal<T: Number>(argument: &str, object: &Bound<'_, PyAny>, error: &PyErr) -> PyErr {
    let py = object.py();
    if error.is_instance_of::<PyOverflowError>(py) {
        return invalid(argument, &T::expected(), &shown(object));
    }
    if error.is_instance_of::<PyTypeError>(py) {
        return wrong_element(argument, &T::expected(), &kind(object));
    }
    error.clone_ref(py)
}

/// The elements of a list of numbers; the first that is none is named with its place.
pub(crate) fn elements<T: Number>(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<T>>> {
    if object.is_instance_of::<PyString>() || !is_sequence(object) {
        return Ok(None);
    }
    let read = |(i, item): (usize, PyResult<Bound<'_, PyAny>>)| {
        let item = item?;
        T::take(&item).map_err(|error| refusal::<T>(&format!("{argument}[{i}]"), &item, &error))
    };
    object.try_iter()?.enumerate().map(read).collect::<PyResult<_>>().map(Some)
}

/// The elements of a list of objects; the first that is none is named with its place.
pub(crate) fn objects<T: for<'a, 'py> FromPyObject<'a, 'py>>(
    argument: &str,
    expected: &str,
    object: &Bound<'_, PyAny>,
) -> PyResult<Vec<T>> {
    if object.is_instance_of::<PyString>() || !is_sequence(object) {
        return Err(wrong_element(argument, &format!("a sequence, each element {expected}"), &kind(object)));
    }
    let read = |(i, item): (usize, PyResult<Bound<'_, PyAny>>)| {
        let item = item?;
        item.extract().map_err(|_| wrong_element(&format!("{argument}[{i}]"), expected, &shown(&item)))
    };
    object.try_iter()?.enumerate().map(read).collect()
}

/// Whether an object has elements in an order of their own: sets and dicts have not.
fn is_sequence(object: &Bound<'_, PyAny>) -> bool {
    object.len().is_ok()
        && object.try_iter().is_ok()
        && object.hasattr("__getitem__").is_ok_and(|has| has)
        && !object.is_instance_of::<PyDict>()
}

/// The name of an object's type.
pub(crate) fn kind(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string())
}

fn shown(object: &Bound<'_, PyAny>) -> String {
    object.repr().map_or_else(|_| kind(object), |text| text.to_string())
}

/// Spans of a prompt that stand for images.
pub(crate) fn image_spans(object: &Bound<'_, PyAny>) -> PyResult<Vec<Span>> {
    type Loose = (Py<PyAny>, Py<PyAny>, Vec<u8>);
    let spans: Vec<Loose> = objects("image_spans", "a tuple of start, length and digest bytes", object)?;
    let read = |(i, (start, len, digest)): (usize, Loose)| {
        let number = |bound: Py<PyAny>| number(&format!("image_spans[{i}]"), bound.bind(object.py()));
        Ok((number(start)?, number(len)?, digest))
    };
    spans.into_iter().enumerate().map(read).collect()
}

macro_rules! numbers {
    ($($group:ident: $kind:ty { $($name:ident)* })*) => {$(
        pub(crate) mod $group {
            use super::*;
            $(
                pub(crate) fn $name(object: &Bound<'_, PyAny>) -> PyResult<$kind> {
                    number(stringify!($name), object)
                }
            )*
        }
    )*};
}

numbers! {
    f32s: f32 { eps }
    f64s: f64 { kv_cache_metrics_sample now warm_up watermark }
    i32s: i32 { priority }
    i64s: i64 { group handle index lora_id }
    optional_f32s: Option<f32> { soft_cap softmax_scale }
    optional_f64s: Option<f64> { cache_ttl now watermark }
    optional_i64s: Option<i64> { lora_id }
    optional_u32s: Option<u32> { ageing block_size long_prefill_token_threshold lookahead max_num_batched_tokens max_num_partial_prefills max_num_seqs max_tokens num_layer_slots sequence sliding_window }
    optional_u8s: Option<u8> { cache_priority }
    optional_usizes: Option<usize> { fixed_keys num_threads sliding_window }
    u32s: u32 { batch_size block_size head_dim index layer long_prefill_token_threshold lookahead max_model_len max_num_batched_tokens max_num_seqs max_pending_events max_plans_in_flight max_tokens min_tokens most_answer_tokens most_prompt_tokens most_turns n num_accepted num_blocks num_draft_tokens num_external_tokens num_host_blocks num_kv_heads num_new_tokens num_requests num_seqs num_tokens pin_quota_blocks prefill_chunk_multiple samples sequence sequences swap_copies_per_block tokens }
    u64s: u64 { beam_seed context_tokens hash_seed pin pin_quota_bytes plan prompt_tokens seed sequence }
    u8s: u8 { cache_priority }
    usizes: usize { axis block_size few_rows group head_dim many_rows min_keys num_blocks num_kv_heads num_q_heads num_tokens num_turned_heads num_workers }
}
