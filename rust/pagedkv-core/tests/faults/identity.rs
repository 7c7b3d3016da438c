//! What makes a block the same as another.

use pagedkv_core::{CacheConfig, ChainHasher, HashAlgorithm, Identity, ImageSpan, KVCacheManager, RootKey};

use crate::scene::{compute, create, create_as, manager, num_hit_tokens, salted};

/// Caches these tokens under one identity and looks for them under another; answers how many are found.
fn num_shared(cached: Identity, looked_for: Identity, tokens: &[i32]) -> u32 {
    let mut manager = manager(2, 32);
    let sequence = create_as(&mut manager, tokens, cached);
    compute(&mut manager, sequence, tokens.len() as u32);
    manager.free(sequence).unwrap();
    let other = create_as(&mut manager, tokens, looked_for);
    num_hit_tokens(&manager, other)
}

fn adapter(lora_id: i64) -> Identity {
    Identity { root: RootKey { lora_id: Some(lora_id), cache_salt: None }, images: Vec::new() }
}

fn image(start: u32, len: u32, digest: &[u8]) -> Identity {
    Identity { images: vec![ImageSpan { start, len, digest: digest.into() }], ..Identity::default() }
}

fn images(spans: [(u32, u32, &[u8]); 2]) -> Identity {
    let span = |(start, len, digest): (u32, u32, &[u8])| ImageSpan { start, len, digest: digest.into() };
    Identity { images: spans.map(span).to_vec(), ..Identity::default() }
}

const TOKENS: [i32; 9] = [0; 9];

#[test]
fn fault_17_another_adapter_shares_nothing() {
    assert_eq!(num_shared(adapter(1), adapter(1), &TOKENS), 8);
    assert_eq!(num_shared(adapter(1), adapter(2), &TOKENS), 0);
    assert_eq!(num_shared(adapter(0), Identity::default(), &TOKENS), 0, "no adapter is not adapter 0");
}

#[test]
fn fault_18_another_image_behind_the_same_placeholders_shares_nothing() {
    assert_eq!(num_shared(image(2, 4, b"cat"), image(2, 4, b"cat"), &TOKENS), 8);
    assert_eq!(num_shared(image(2, 4, b"cat"), image(2, 4, b"dog"), &TOKENS), 2, "only what lies before it");
}

#[test]
fn fault_18_another_part_of_the_same_image_shares_nothing() {
    assert_eq!(num_shared(image(0, 4, b"cat"), image(1, 4, b"cat"), &TOKENS), 0);
    let twice = |second: u32| images([(0, 2, b"cat"), (second, 2, b"cat")]);
    assert_eq!(num_shared(twice(2), twice(3), &TOKENS), 2);
}

#[test]
fn fault_18_a_block_in_which_two_images_meet_knows_both() {
    let met = |first: &'static [u8], second: &'static [u8]| images([(0, 3, first), (3, 3, second)]);
    assert_eq!(num_shared(met(b"cat", b"dog"), met(b"cat", b"cow"), &TOKENS), 2);
}

#[test]
fn fault_18_two_images_are_not_one_whose_digest_spells_them() {
    let two = images([(2, 1, b"cat"), (3, 1, b"dog")]);
    // What stands between the digests in the key of the block: the offset and the length of the second image.
    let spelled = [b"cat".as_slice(), &1_i64.to_le_bytes(), &1_u32.to_le_bytes(), b"dog"].concat();
    let length_too =
        [b"cat".as_slice(), &1_i64.to_le_bytes(), &1_u32.to_le_bytes(), &3_u64.to_le_bytes(), b"dog"].concat();
    assert_eq!(num_shared(two.clone(), image(2, 1, &spelled), &TOKENS), 2);
    assert_eq!(num_shared(two, image(2, 1, &length_too), &TOKENS), 2);
}

#[test]
fn fault_19_a_salt_of_the_same_bytes_as_an_adapter_is_another_key() {
    let salt = |bytes: &[u8]| salted(bytes);
    assert_eq!(num_shared(adapter(1), salt(&1_i64.to_le_bytes()), &TOKENS), 0);
    assert_eq!(num_shared(adapter(49), salt(b"1"), &TOKENS), 0);
    assert_eq!(num_shared(salt(b""), Identity::default(), &TOKENS), 0, "an empty salt is a salt");
}

#[test]
fn fault_19_a_salt_of_the_same_bytes_as_an_image_is_another_key() {
    assert_eq!(num_shared(salted(b"cat"), image(0, 2, b"cat"), &TOKENS), 0);
}

#[test]
fn fault_21_a_salt_isolates_every_block_behind_it() {
    let tokens = [0; 33];
    assert_eq!(num_shared(salted(b"a"), salted(b"a"), &tokens), 32);
    assert_eq!(num_shared(salted(b"a"), salted(b"b"), &tokens), 0);
    assert_eq!(num_shared(salted(b"a"), Identity::default(), &tokens), 0);
    assert_eq!(num_shared(Identity::default(), salted(b"a"), &tokens), 0);
}

#[test]
fn fault_21_tenants_of_different_salts_share_no_physical_block() {
    let mut manager = manager(2, 32);
    let mut tables = Vec::new();
    for salt in [b"a", b"b"] {
        let sequence = create_as(&mut manager, &TOKENS, salted(salt));
        compute(&mut manager, sequence, 9);
        tables.push(crate::scene::table(&manager, sequence));
    }
    assert!(tables[0].iter().all(|block| !tables[1].contains(block)));
}

/// vLLM 0.33's hashes of the tokens 0, 1, 23 and 24 in blocks of one, without a seed; more in `tests/data`.
const PUBLISHED: [(HashAlgorithm, &str); 3] = [
    (HashAlgorithm::Sha256Cbor, "03403c7270953b38c89a98b9bb5f1f805c25a103938faaa53379ed84020c5ccd"),
    (HashAlgorithm::Xxh3_128, "1fdadf954e5b8148bcdbd16f4857da04"),
    (HashAlgorithm::Blake3, "3e9f752cb9596f43757f0000f30694bc42bc2bb80a2f4141596425625949f9bf"),
];

#[test]
fn fault_22_hashes_that_travel_are_the_same_in_every_process() {
    for (algorithm, expected) in PUBLISHED {
        let chain = |seed| {
            let hashes = ChainHasher::new(algorithm, seed).chain_hashes(&[0, 1, 23, 24], 1, &Identity::default(), None);
            format!("{:?}", hashes.expect("valid arguments").last().expect("four blocks"))
        };
        assert_eq!(chain(""), expected);
        assert_ne!(chain("1"), expected, "the seed is part of every hash");
    }
}

#[test]
fn fault_17_an_adapter_that_is_loaded_anew_finds_nothing_of_its_old_weights() {
    let mut manager = manager(2, 32);
    for lora_id in [1, 2] {
        let sequence = create_as(&mut manager, &TOKENS, adapter(lora_id));
        compute(&mut manager, sequence, 9);
        manager.free(sequence).unwrap();
    }
    let running = create_as(&mut manager, &TOKENS, adapter(1));
    compute(&mut manager, running, 1);
    manager.invalidate_lora(1);
    let found = [1, 2].map(|lora_id| {
        let sequence = create_as(&mut manager, &TOKENS, adapter(lora_id));
        num_hit_tokens(&manager, sequence)
    });
    assert_eq!(found, [0, 8]);
    manager.free(running).unwrap();
    let again = create_as(&mut manager, &TOKENS, adapter(1));
    assert_eq!(num_hit_tokens(&manager, again), 0, "nor does what ran through the reload come back");
}

#[test]
fn fault_23_the_configured_block_size_is_the_one_that_prefixes_are_told_apart_by() {
    for block_size in 1..6 {
        let mut manager = manager(block_size, 64);
        let tokens: Vec<i32> = (0..24).collect();
        let sequence = create(&mut manager, &tokens);
        compute(&mut manager, sequence, 24);
        assert_eq!(crate::scene::table(&manager, sequence).len(), 24_usize.div_ceil(block_size as usize));
        let again = create(&mut manager, &tokens);
        assert_eq!(num_hit_tokens(&manager, again), 23 / block_size * block_size);
    }
}

#[test]
fn fault_23_a_block_size_of_nothing_is_refused_by_name() {
    let refused = KVCacheManager::new(&CacheConfig { block_size: 0, ..CacheConfig::new(8) });
    let error = refused.expect_err("no block holds nothing");
    assert!(matches!(error, pagedkv_core::Error::InvalidArgument { argument: "block_size", .. }), "{error}");
}

#[test]
fn fault_24_a_hit_ends_before_the_first_token_that_differs() {
    let tokens: Vec<i32> = (0..17).collect();
    for differs_at in 0..16 {
        for other in [100 - tokens[differs_at], tokens[differs_at] + 1, i32::MAX] {
            let mut manager = manager(2, 32);
            crate::scene::cache(&mut manager, &tokens);
            let mut changed = tokens.clone();
            changed[differs_at] = other;
            let looked_for = create(&mut manager, &changed);
            assert_eq!(num_hit_tokens(&manager, looked_for), differs_at as u32 / 2 * 2, "token {differs_at}");
        }
    }
}
