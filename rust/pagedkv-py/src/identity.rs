//! What tells prefixes of equal tokens apart.

use pagedkv_core::{Identity, ImageSpan, RootKey};
use pyo3::prelude::*;

use crate::arrays::wrong_type;

/// A span of prompt positions that stand for an image: start, length, digest.
pub(crate) type Span = (u32, u32, Vec<u8>);

/// Extra keys of a prefix.
pub(crate) fn identity(
    lora_id: Option<i64>,
    cache_salt: Option<&Bound<'_, PyAny>>,
    images: Vec<Span>,
) -> PyResult<Identity> {
    let cache_salt = cache_salt.map(salt).transpose()?;
    let images = images.into_iter().map(|(start, len, digest)| ImageSpan { start, len, digest: digest.into() });
    Ok(Identity { root: RootKey { lora_id, cache_salt }, images: images.collect() })
}

fn salt(object: &Bound<'_, PyAny>) -> PyResult<Box<[u8]>> {
    if let Ok(text) = object.extract::<&str>() {
        return Ok(text.as_bytes().into());
    }
    let bytes = object.extract::<&[u8]>();
    bytes.map(Into::into).map_err(|_| wrong_type("cache_salt", "str or bytes", object))
}
