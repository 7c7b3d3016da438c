//! What besides its tokens tells one prefix from another: typed, length-prefixed, never mixed up.

use std::sync::Arc;

use crate::chain_hash::{ExtraKey, LoraName};

/// Keys that hold for every block of a sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RootKey {
    /// The adapter, by an id that is never used for another one.
    pub lora_id: Option<i64>,
    /// Isolates whoever brings it: only equal salts share blocks.
    pub cache_salt: Option<Box<[u8]>>,
}

/// Prompt positions that stand for an image (or any other input that is not in the token ids).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpan {
    /// First position.
    pub start: u32,
    /// Number of positions.
    pub len: u32,
    /// Digest of the content.
    pub digest: Box<[u8]>,
}

/// All extra keys of a sequence; shared by its forks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Keys of the whole sequence.
    pub root: RootKey,
    /// Images, by ascending start, not overlapping.
    pub images: Vec<ImageSpan>,
}

impl Identity {
    /// Appends to `key` an encoding of what positions `start..end` hold besides tokens; nothing for plain text.
    ///
    /// The offset of the block within its image is part of it: the same placeholder tokens may stand for different
    /// parts of one image.
    pub(crate) fn encode_block(&self, start: u32, end: u32, key: &mut Vec<u8>) {
        let overlapping = self.images.iter().filter(|image| image.start < end && start < image.start + image.len);
        for image in overlapping {
            key.extend_from_slice(&(i64::from(image.start) - i64::from(start)).to_le_bytes());
            key.extend_from_slice(&image.len.to_le_bytes());
            key.extend_from_slice(&(image.digest.len() as u64).to_le_bytes());
            key.extend_from_slice(&image.digest);
        }
    }
}

impl Identity {
    /// What a chained hash of positions `start..end` takes in besides tokens: see [`crate::chain_hash`].
    pub(crate) fn extra_keys(&self, start: u32, end: u32, lora: Option<&LoraName>) -> Vec<ExtraKey> {
        let overlapping = self.images.iter().filter(|image| image.start < end && start < image.start + image.len);
        let images = overlapping.map(|image| ExtraKey::Image {
            digest: image.digest.clone(),
            offset: i64::from(image.start) - i64::from(start),
        });
        self.root.lora_key(lora).into_iter().chain(images).chain(self.root.salt_key(start)).collect()
    }
}

/// The images that [`Identity::encode_block`] encoded, for a block in which they are `start` positions further on.
pub(crate) fn decode_block(mut key: &[u8], start: i64) -> impl Iterator<Item = ExtraKey> {
    std::iter::from_fn(move || {
        let (offset, rest) = key.split_first_chunk()?;
        let (_len, rest) = rest.split_first_chunk::<4>()?;
        let (digest_len, rest) = rest.split_first_chunk()?;
        let (digest, rest) = rest.split_at(u64::from_le_bytes(*digest_len) as usize);
        key = rest;
        Some(ExtraKey::Image { digest: digest.into(), offset: i64::from_le_bytes(*offset) + start })
    })
}

impl RootKey {
    pub(crate) fn lora_key(&self, lora: Option<&LoraName>) -> Option<ExtraKey> {
        lora.cloned().map(ExtraKey::Lora).or(self.lora_id.map(ExtraKey::LoraId))
    }

    /// The salt, for a block that starts at `start`.
    pub(crate) fn salt_key(&self, start: u32) -> Option<ExtraKey> {
        self.cache_salt.clone().filter(|_| start == 0).map(ExtraKey::CacheSalt)
    }
}

/// The token ids of a sequence: a part that forks share and a tail of its own.
#[derive(Clone, Debug)]
pub(crate) struct Tokens {
    shared: Arc<Vec<i32>>,
    tail: Vec<i32>,
    /// Length of the whole, and its last token: what a step asks for, without a look at the memory of the parts.
    len: u32,
    last: i32,
}

impl Tokens {
    pub(crate) fn new(shared: Arc<Vec<i32>>) -> Self {
        let (len, last) = (shared.len() as u32, shared.last().copied().unwrap_or_default());
        Self { shared, tail: Vec::new(), len, last }
    }

    pub(crate) const fn len(&self) -> u32 {
        self.len
    }

    /// The token at a position, if it is the last one.
    pub(crate) fn last_at(&self, position: u32) -> Option<i32> {
        (position + 1 == self.len).then_some(self.last)
    }

    /// Makes room for tokens to come.
    pub(crate) fn reserve(&mut self, num_tokens: usize) {
        self.tail.reserve(num_tokens);
    }

    pub(crate) fn push(&mut self, token: i32) {
        self.tail.push(token);
        self.len += 1;
        self.last = token;
    }

    pub(crate) fn truncate(&mut self, len: u32) {
        let len = len as usize;
        if len < self.shared.len() {
            self.shared = Arc::new(self.shared[..len].to_vec());
        }
        self.tail.truncate(len.saturating_sub(self.shared.len()));
        self.len = (self.shared.len() + self.tail.len()) as u32;
        self.last = self.tail.last().or(self.shared.last()).copied().unwrap_or_default();
    }

    /// Copies the tokens from `start` on, as many as `out` takes.
    pub(crate) fn copy_to(&self, start: u32, out: &mut [i32]) {
        let (start, border) = (start as usize, self.shared.len());
        let from_shared = border.saturating_sub(start).min(out.len());
        let (head, rest) = out.split_at_mut(from_shared);
        if from_shared > 0 {
            head.copy_from_slice(&self.shared[start..start + from_shared]);
        }
        if !rest.is_empty() {
            let start = (start + from_shared) - border;
            rest.copy_from_slice(&self.tail[start..start + rest.len()]);
        }
    }

    /// Calls `with` on the tokens `start..end`, copied to `scratch` only where they straddle the border of the shared part.
    pub(crate) fn with_range<R>(
        &self,
        start: u32,
        end: u32,
        scratch: &mut Vec<i32>,
        with: impl FnOnce(&[i32]) -> R,
    ) -> R {
        let (start, end, border) = (start as usize, end as usize, self.shared.len());
        if end <= border {
            return with(&self.shared[start..end]);
        }
        if start >= border {
            return with(&self.tail[start - border..end - border]);
        }
        scratch.clear();
        scratch.extend_from_slice(&self.shared[start..]);
        scratch.extend_from_slice(&self.tail[..end - border]);
        with(scratch)
    }
}
