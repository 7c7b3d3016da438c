//! What is done to single rows beside products and attention, as functions.

use pagedkv_cpu::{HEADS, ROTARY, ROWS, SCORES};
use pyo3::prelude::*;

use crate::arrays::floats;
use crate::cpu_ops::{array, threads, to_py_err};

/// Divides rows by their root mean square; see `pagedkv_cpu::rms_norm`.
#[pyfunction]
#[pyo3(signature = (x, out, *, eps, num_threads=None))]
pub(crate) fn rms_norm(
    py: Python<'_>,
    x: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = crate::args::f32s::eps)] eps: f32,
    #[pyo3(from_py_with = crate::args::optional_usizes::num_threads)] num_threads: Option<usize>,
) -> PyResult<()> {
    let (x, out, threads) = (array("x", x)?, array("out", out)?, threads(py, num_threads)?);
    let (from, to) = (x.view("x", ROWS)?, out.view_mut("out", ROWS)?);
    py.detach(|| pagedkv_cpu::rms_norm(&from, &to, eps, None, threads)).map_err(to_py_err)
}

/// Turns heads by the angles of their positions; see `pagedkv_cpu::rotary_embedding`.
#[pyfunction]
#[pyo3(signature = (x, cos_sin, out, *, num_turned_heads, num_threads=None))]
pub(crate) fn rotary_embedding(
    py: Python<'_>,
    x: &Bound<'_, PyAny>,
    cos_sin: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = crate::args::usizes::num_turned_heads)] num_turned_heads: usize,
    #[pyo3(from_py_with = crate::args::optional_usizes::num_threads)] num_threads: Option<usize>,
) -> PyResult<()> {
    let (x, cos_sin, out) = (array("x", x)?, array("cos_sin", cos_sin)?, array("out", out)?);
    let threads = threads(py, num_threads)?;
    let (from, angles, to) = (x.view("x", HEADS)?, cos_sin.view("cos_sin", ROTARY)?, out.view_mut("out", HEADS)?);
    py.detach(|| pagedkv_cpu::rotary_embedding(&from, &angles, &to, num_turned_heads, None, threads)).map_err(to_py_err)
}

/// Draws a token by each row of scores; see `pagedkv_cpu::draw_tokens`.
#[pyfunction]
#[pyo3(signature = (scores, temperature, uniform, tokens, *, num_threads=None))]
pub(crate) fn draw_tokens(
    py: Python<'_>,
    scores: &Bound<'_, PyAny>,
    temperature: &Bound<'_, PyAny>,
    uniform: &Bound<'_, PyAny>,
    tokens: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = crate::args::optional_usizes::num_threads)] num_threads: Option<usize>,
) -> PyResult<()> {
    let (scores, tokens, threads) = (array("scores", scores)?, array("tokens", tokens)?, threads(py, num_threads)?);
    let temperature: Vec<f32> = floats("temperature", "float32", temperature)?;
    let uniform: Vec<f64> = floats("uniform", "float64", uniform)?;
    let (from, to) = (scores.view("scores", SCORES)?, tokens.view_mut("tokens", [SCORES[0]])?);
    py.detach(|| pagedkv_cpu::draw_tokens(&from, &temperature, &uniform, &to, None, threads)).map_err(to_py_err)
}
