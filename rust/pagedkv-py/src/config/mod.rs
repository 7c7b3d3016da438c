//! Configuration, as frozen value objects whose defaults are the core's.

mod cache;
mod group;
mod limits;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

pub(crate) use cache::{CacheConfig, choose_layer_slots};
pub(crate) use group::GroupSpec;
pub(crate) use limits::SchedulerConfig;

/// What a pickle calls the class with: its positional arguments, and the rest by name.
type NewArguments<'py> = (Bound<'py, PyTuple>, Bound<'py, PyDict>);

fn new_arguments<'py>(object: &Bound<'py, PyAny>, positional: &[&str], named: &[&str]) -> PyResult<NewArguments<'py>> {
    let values = positional.iter().map(|name| object.getattr(*name)).collect::<PyResult<Vec<_>>>()?;
    let rest = PyDict::new(object.py());
    named.iter().try_for_each(|name| rest.set_item(name, object.getattr(*name)?))?;
    Ok((PyTuple::new(object.py(), values)?, rest))
}
