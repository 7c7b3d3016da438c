//! Chained hashes of blocks.

use pagedkv_core::{BlockHash, ChainHasher, HashAlgorithm, LoraName};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::arrays::ids;
use crate::errors::{invalid, to_py_err};
use crate::identity::{Span, identity};

/// Hashes as bytes, or as the unsigned 64-bit numbers that vLLM publishes.
pub(crate) fn hash_list<'py>(py: Python<'py>, hashes: &[BlockHash], external: bool) -> PyResult<Bound<'py, PyList>> {
    if external {
        PyList::new(py, hashes.iter().map(BlockHash::to_u64))
    } else {
        PyList::new(py, hashes.iter().map(|hash| PyBytes::new(py, hash.as_bytes())))
    }
}

/// Hashes of the full blocks of a sequence, each over everything before it: names of prefixes for other processes.
///
/// Parameters
/// ----------
/// token_ids : array of int32 or int64, shape (num_tokens,), or sequence of int
///     The sequence. What is left over after the last full block has no hash.
/// block_size : int
///     Tokens per block.
/// algorithm : {"sha256_cbor", "blake3", "xxh3_128"}
///     Function over one canonical encoding: 32, 32 and 16 bytes. "xxh3_128" can be forged by who knows the seed.
/// seed : str
///     Chains with other seeds share no hash. The default is vLLM's; vLLM takes its own from PYTHONHASHSEED if set.
/// lora_id : int, optional
///     The adapter by number, as `Scheduler.add_request` takes it; without a meaning to vLLM.
/// lora_name, lora_path : str, optional
///     The adapter as vLLM tells adapters apart. With a name the number does not enter.
/// cache_salt : str or bytes, optional
///     As in `Scheduler.add_request`.
/// image_spans : sequence of (start, length, digest bytes)
///     As in `Scheduler.add_request`; the digest is vLLM's identifier of the image, encoded as UTF-8.
/// external : bool
///     Return the last 64 bits of each hash as an int, as vLLM's events do unless told otherwise.
///
/// Returns
/// -------
/// list of bytes, or of int
///     One per full block.
///
/// Raises
/// ------
/// InvalidArgumentError
///     For an unknown algorithm, a block size of 0, images that overlap, or a path without a name.
///
/// Notes
/// -----
/// "sha256_cbor" equals vLLM's algorithm of that name, "xxh3_128" its "xxhash_cbor". The encoding is written down in
/// `docs/events.md`.
///
/// Examples
/// --------
/// >>> import pagedkv
/// >>> [first, second] = pagedkv.chain_hashes(range(8), 4, seed="0")
/// >>> pagedkv.chain_hashes(range(4), 4, seed="0") == [first]
/// True
#[pyfunction]
#[pyo3(signature = (
    token_ids, block_size, *, algorithm="sha256_cbor", seed=pagedkv_core::chain_hash::DEFAULT_CHAIN_SEED, lora_id=None,
    lora_name=None, lora_path=None, cache_salt=None, image_spans=Vec::new(), external=false,
))]
#[expect(clippy::too_many_arguments, reason = "everything that a prefix depends on")]
pub(crate) fn chain_hashes<'py>(
    py: Python<'py>,
    token_ids: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = crate::args::u32s::block_size)] block_size: u32,
    algorithm: &str,
    seed: &str,
    #[pyo3(from_py_with = crate::args::optional_i64s::lora_id)] lora_id: Option<i64>,
    lora_name: Option<String>,
    lora_path: Option<String>,
    cache_salt: Option<&Bound<'_, PyAny>>,
    #[pyo3(from_py_with = crate::args::image_spans)] image_spans: Vec<Span>,
    external: bool,
) -> PyResult<Bound<'py, PyList>> {
    let tokens = ids("token_ids", token_ids)?;
    let lora = lora(lora_name, lora_path)?;
    let identity = identity(lora_id, cache_salt, image_spans)?;
    let mut hasher = ChainHasher::new(algorithm.parse::<HashAlgorithm>().map_err(to_py_err)?, seed);
    let chain = py.detach(|| hasher.chain_hashes(&tokens, block_size, &identity, lora.as_ref()));
    hash_list(py, &chain.map_err(to_py_err)?, external)
}

fn lora(name: Option<String>, path: Option<String>) -> PyResult<Option<LoraName>> {
    match (name, path) {
        (Some(name), path) => Ok(Some(LoraName { name, path: path.unwrap_or_default() })),
        (None, Some(path)) => Err(invalid("lora_path", "a lora_name beside it", &format!("{path:?} alone"))),
        (None, None) => Ok(None),
    }
}
