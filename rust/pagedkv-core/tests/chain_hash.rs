//! Chained hashes against values that vLLM computed; `tests/data/make_chain_hashes.py` says how.

use pagedkv_core::{BlockHash, ChainHasher, Error, HashAlgorithm, Identity, ImageSpan, LoraName, RootKey};
use serde_json::Value;

fn vectors() -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/chain_hashes.json");
    let text = std::fs::read_to_string(path).expect("the vectors are in the repository");
    let found: Value = serde_json::from_str(&text).expect("valid JSON");
    found["cases"].as_array().expect("a list of cases").clone()
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a string")
}

fn number(value: &Value) -> i64 {
    value.as_i64().expect("an integer")
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().expect("a list").iter()
}

fn hasher(case: &Value) -> ChainHasher {
    ChainHasher::new(text(&case["algorithm"]).parse().expect("a known algorithm"), text(&case["seed"]))
}

fn hashes(case: &Value) -> Vec<BlockHash> {
    let tokens: Vec<_> = list(&case["token_ids"]).map(|token| number(token) as i32).collect();
    let image = |span: &Value| ImageSpan {
        start: number(&span[0]) as u32,
        len: number(&span[1]) as u32,
        digest: text(&span[2]).as_bytes().into(),
    };
    let cache_salt = case["cache_salt"].as_str().map(|salt| salt.as_bytes().into());
    let identity = Identity {
        root: RootKey { cache_salt, ..RootKey::default() },
        images: list(&case["image_spans"]).map(image).collect(),
    };
    let lora = case["lora_name"].as_str();
    let lora = lora.map(|name| LoraName { name: name.into(), path: text(&case["lora_path"]).into() });
    let block_size = number(&case["block_size"]) as u32;
    hasher(case).chain_hashes(&tokens, block_size, &identity, lora.as_ref()).expect("valid arguments")
}

#[test]
fn chained_hashes_are_those_of_vllm() {
    let cases = vectors();
    assert!(cases.len() > 20, "{} cases", cases.len());
    for case in &cases {
        let expected: Vec<_> = list(&case["block_hashes"]).map(text).collect();
        let found: Vec<_> = hashes(case).iter().map(|hash| format!("{hash:?}")).collect();
        assert_eq!(found, expected, "{} by {}", case["name"], case["algorithm"]);
    }
}

#[test]
fn the_seed_gives_the_none_hash_of_vllm() {
    for case in &vectors() {
        assert_eq!(format!("{:?}", hasher(case).none_hash()), text(&case["none_hash"]), "{}", case["name"]);
    }
}

#[test]
fn the_short_form_of_a_hash_is_the_one_that_vllm_publishes() {
    for case in &vectors() {
        let expected: Vec<_> = list(&case["external"]).map(|hash| hash.as_u64().expect("64 bits")).collect();
        let found: Vec<_> = hashes(case).iter().map(BlockHash::to_u64).collect();
        assert_eq!(found, expected, "{} by {}", case["name"], case["algorithm"]);
    }
}

fn chain(identity: &Identity) -> Vec<BlockHash> {
    let mut hasher = ChainHasher::new(HashAlgorithm::default(), "seed");
    hasher.chain_hashes(&[1, 2, 3, 4, 5, 6, 7, 8], 4, identity, None).expect("valid arguments")
}

fn with_root(lora_id: Option<i64>, salt: Option<&[u8]>) -> Identity {
    let root = RootKey { lora_id, cache_salt: salt.map(Into::into) };
    Identity { root, images: Vec::new() }
}

#[test]
fn adapters_salts_and_images_give_chains_that_share_nothing() {
    let image = |digest: &[u8]| Identity {
        images: vec![ImageSpan { start: 1, len: 2, digest: digest.into() }],
        ..Identity::default()
    };
    let identities = [
        with_root(None, None),
        with_root(Some(1), None),
        with_root(Some(2), None),
        with_root(None, Some(b"1")),
        with_root(None, Some(&[0xff])),
        with_root(None, Some("\u{ff}".as_bytes())),
        with_root(Some(1), Some(b"1")),
        image(b"1"),
        image(&[0xff]),
    ];
    let mut all: Vec<_> = identities.iter().flat_map(chain).collect();
    let len = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), len, "two chains share a hash");
}

#[test]
fn a_block_size_of_zero_is_refused_by_name() {
    let mut hasher = ChainHasher::new(HashAlgorithm::Blake3, "");
    let refused = hasher.chain_hashes(&[1], 0, &Identity::default(), None);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "block_size", .. })), "{refused:?}");
}

#[test]
fn an_unknown_algorithm_is_refused_with_the_known_names() {
    let refused = "md5".parse::<HashAlgorithm>().expect_err("no such algorithm").to_string();
    assert_eq!(refused, r#"algorithm: expected one of ["sha256_cbor", "blake3", "xxh3_128"], found "md5""#);
}
