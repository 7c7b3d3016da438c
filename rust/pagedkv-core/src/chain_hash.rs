//! Chained hashes of blocks: names of prefixes for events, routers and other processes.
//!
//! The prefix cache itself proves every hit by comparing tokens (see the module `prefix_cache`) and needs none of these;
//! they are made only when somebody asks. Processes with the same algorithm, seed and block size name equal prefixes
//! equally, whatever machine they run on.
//!
//! The hash of a block is taken over one canonical encoding, for all algorithms:
//!
//! ```text
//! CBOR (RFC 8949, definite lengths, shortest heads) of [parent, [token, ...], keys]
//! parent   byte string: the hash of the block before; of the first block, the hash of the seed as a CBOR text string
//! keys     null where there are none, else an array of arrays, in this order:
//!          ["lora", name, path]             every block of an adapter that has a name
//!          ["lora_id", id]                  every block of an adapter that has only a number
//!          ["mm", digest, offset]           each image in the block; offset of its start from the start of the block
//!          ["cache_salt", salt]             the first block of a salted prefix
//! digest, salt   text strings where their bytes are UTF-8, else byte strings
//! ```
//!
//! That is the encoding of vLLM (`hash_block_tokens` and `sha256_cbor`, read and run in version 0.32), so
//! [`HashAlgorithm::Sha256Cbor`] gives vLLM's values, and [`HashAlgorithm::Xxh3_128`] those of its `xxhash_cbor`.
//! `tests/data/chain_hashes.json` has values that vLLM computed. `lora_id` is ours: there is no such key in vLLM.
//!
//! What xxh3 makes can be forged by who knows the seed; choose one of the others where prefixes come from strangers.

use minicbor::Encoder;
use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::{Error, Result, invalid};
use crate::identity::Identity;
use crate::kv_cache_manager::check_identity;

/// The seed that vLLM takes where it is given none.
pub const DEFAULT_CHAIN_SEED: &str = "vllm-none-hash";

/// Which function makes the hashes of a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HashAlgorithm {
    /// SHA-256: vLLM's `sha256_cbor`.
    #[default]
    Sha256Cbor,
    /// BLAKE3, 256 bits.
    Blake3,
    /// XXH3, 128 bits, as big-endian bytes: vLLM's `xxhash_cbor`. Not collision resistant.
    Xxh3_128,
}

impl HashAlgorithm {
    const ALL: [Self; 3] = [Self::Sha256Cbor, Self::Blake3, Self::Xxh3_128];

    /// The name by which it is chosen.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256Cbor => "sha256_cbor",
            Self::Blake3 => "blake3",
            Self::Xxh3_128 => "xxh3_128",
        }
    }

    fn hash(self, data: &[u8]) -> BlockHash {
        match self {
            Self::Sha256Cbor => BlockHash::new(&Sha256::digest(data)),
            Self::Blake3 => BlockHash::new(blake3::hash(data).as_bytes()),
            Self::Xxh3_128 => BlockHash::new(&xxh3_128(data).to_be_bytes()),
        }
    }
}

impl std::str::FromStr for HashAlgorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|algorithm| algorithm.name() == name);
        let expected = || format!("one of {:?}", Self::ALL.map(Self::name));
        found.map_or_else(|| invalid("algorithm", expected(), format!("{name:?}")), Ok)
    }
}

/// The hash of a block and of everything before it: 16 or 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash {
    bytes: [u8; 32],
    len: u8,
}

impl BlockHash {
    fn new(from: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes[..from.len()].copy_from_slice(from);
        Self { bytes, len: from.len() as u8 }
    }

    /// The hash as the algorithm makes it.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The last 64 bits as a big-endian number: the form in which vLLM publishes hashes unless told otherwise.
    pub fn to_u64(&self) -> u64 {
        let last = self.as_bytes().last_chunk().expect("a hash has at least 16 bytes");
        u64::from_be_bytes(*last)
    }
}

impl std::fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// An adapter's name and where it was loaded from, as vLLM tells adapters apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LoraName {
    /// Its name.
    pub name: String,
    /// Where it was loaded from.
    pub path: String,
}

/// What besides its tokens makes a block what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// The adapter, where it has a name.
    Lora(LoraName),
    /// The adapter, where it has only a number.
    LoraId(i64),
    /// An image, and where it starts from the start of the block.
    Image {
        /// Digest of the content.
        digest: Box<[u8]>,
        /// Below 0 where it starts in an earlier block.
        offset: i64,
    },
    /// The salt; in the first block only.
    CacheSalt(Box<[u8]>),
}

/// Makes the hashes of chains with one algorithm and one seed.
#[derive(Clone, Debug)]
pub struct ChainHasher {
    algorithm: HashAlgorithm,
    none_hash: BlockHash,
    buffer: Vec<u8>,
}

impl ChainHasher {
    /// A hasher whose chains start from `seed`; vLLM's `PYTHONHASHSEED`, or its [`DEFAULT_CHAIN_SEED`].
    pub fn new(algorithm: HashAlgorithm, seed: &str) -> Self {
        let mut buffer = Vec::new();
        encode(Encoder::new(&mut buffer).str(seed));
        Self { algorithm, none_hash: algorithm.hash(&buffer), buffer }
    }

    /// What stands for the block before the first one: vLLM's `NONE_HASH`.
    pub fn none_hash(&self) -> BlockHash {
        self.none_hash
    }

    /// The hash of a full block after the block `parent`, or of a first block.
    ///
    /// # Complexity
    /// O(bytes of the tokens and keys).
    pub fn hash_block(&mut self, parent: Option<&BlockHash>, tokens: &[i32], keys: &[ExtraKey]) -> BlockHash {
        self.buffer.clear();
        let parent = parent.unwrap_or(&self.none_hash);
        let mut encoder = Encoder::new(&mut self.buffer);
        encode(encoder.array(3).and_then(|encoder| encoder.bytes(parent.as_bytes())));
        encode(encoder.array(tokens.len() as u64));
        tokens.iter().for_each(|&token| encode(encoder.i32(token)));
        if keys.is_empty() {
            encode(encoder.null());
        } else {
            encode(encoder.array(keys.len() as u64));
            keys.iter().for_each(|key| key.encode(&mut encoder));
        }
        self.algorithm.hash(&self.buffer)
    }

    /// The hashes of all full blocks of a sequence. What is left over at the end has none.
    ///
    /// `lora` names the adapter that `identity` numbers; with a name the number does not enter.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a block size of 0, or images that overlap or are out of order.
    ///
    /// # Complexity
    /// O(tokens + blocks x images).
    pub fn chain_hashes(
        &mut self,
        tokens: &[i32],
        block_size: u32,
        identity: &Identity,
        lora: Option<&LoraName>,
    ) -> Result<Vec<BlockHash>> {
        if block_size == 0 {
            return invalid("block_size", "at least 1", 0);
        }
        if tokens.len() > i32::MAX as usize {
            return invalid("token_ids", "fewer than 2^31", tokens.len());
        }
        check_identity(identity)?;
        let mut hashes: Vec<BlockHash> = Vec::with_capacity(tokens.len() / block_size as usize);
        for (block, start) in tokens.chunks_exact(block_size as usize).zip((0..).step_by(block_size as usize)) {
            let keys = identity.extra_keys(start, start + block_size, lora);
            hashes.push(self.hash_block(hashes.last().copied().as_ref(), block, &keys));
        }
        Ok(hashes)
    }
}

impl ExtraKey {
    fn encode(&self, encoder: &mut Encoder<&mut Vec<u8>>) {
        match self {
            Self::Lora(lora) => {
                encode(encoder.array(3).and_then(|encoder| encoder.str("lora")?.str(&lora.name)?.str(&lora.path)));
            }
            Self::LoraId(id) => encode(encoder.array(2).and_then(|encoder| encoder.str("lora_id")?.i64(*id))),
            Self::Image { digest, offset } => {
                encode(encoder.array(3).and_then(|encoder| encoder.str("mm")));
                encode_text(encoder, digest);
                encode(encoder.i64(*offset));
            }
            Self::CacheSalt(salt) => {
                encode(encoder.array(2).and_then(|encoder| encoder.str("cache_salt")));
                encode_text(encoder, salt);
            }
        }
    }
}

fn encode_text(encoder: &mut Encoder<&mut Vec<u8>>, bytes: &[u8]) {
    match std::str::from_utf8(bytes) {
        Ok(text) => encode(encoder.str(text)),
        Err(_) => encode(encoder.bytes(bytes)),
    }
}

fn encode<T, E: std::fmt::Debug>(result: std::result::Result<T, E>) {
    result.expect("a vector takes every byte");
}
