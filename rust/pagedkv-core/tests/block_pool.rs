//! What the block pool does, one behaviour a test.

use pagedkv_core::{BlockId, BlockPool, BlockState, CacheConfig, Error, NULL_BLOCK};

fn pool(num_blocks: u32) -> BlockPool {
    BlockPool::new(&CacheConfig::new(num_blocks)).expect("a valid configuration")
}

fn allocate<const N: usize>(pool: &mut BlockPool) -> [BlockId; N] {
    let mut blocks = [NULL_BLOCK; N];
    pool.allocate(&mut blocks).expect("there are enough blocks");
    blocks
}

#[test]
fn block_pool_hands_out_every_block_but_the_null_block() {
    let mut pool = pool(4);
    let mut blocks = allocate::<3>(&mut pool);
    blocks.sort();
    assert_eq!(blocks, [1, 2, 3].map(BlockId::new));
}

#[test]
fn block_pool_hands_out_the_most_recently_freed_block_first() {
    let mut pool = pool(8);
    let [first, second] = allocate(&mut pool);
    pool.free(&[first]).unwrap();
    pool.free(&[second]).unwrap();
    assert_eq!(allocate(&mut pool), [second, first]);
}

#[test]
fn block_pool_frees_in_the_order_given_when_a_block_is_listed_twice() {
    let mut pool = pool(8);
    let [twice, once] = allocate(&mut pool);
    pool.touch(&[twice]).unwrap();
    pool.free(&[twice, once, twice]).unwrap();
    assert_eq!(allocate(&mut pool), [twice, once]);
}

#[test]
fn block_pool_answers_none_and_changes_nothing_when_there_are_too_few_blocks() {
    let mut pool = pool(4);
    let mut blocks = [NULL_BLOCK; 4];
    assert_eq!((pool.allocate(&mut blocks), blocks, pool.num_free()), (None, [NULL_BLOCK; 4], 3));
}

#[test]
fn block_pool_keeps_a_block_until_its_last_holder_frees_it() {
    let mut pool = pool(4);
    let [block] = allocate(&mut pool);
    pool.touch(&[block]).unwrap();
    pool.free(&[block]).unwrap();
    assert_eq!((pool.state(block), pool.ref_count(block)), (Ok(BlockState::Held), Ok(1)));
}

#[test]
fn block_pool_refuses_a_double_free() {
    let mut pool = pool(4);
    let [block] = allocate(&mut pool);
    pool.free(&[block]).unwrap();
    assert_eq!(pool.free(&[block]), Err(Error::NotHeld(block)));
}

#[test]
fn block_pool_refuses_a_double_free_within_one_call_and_changes_nothing() {
    let mut pool = pool(4);
    let [first, second] = allocate(&mut pool);
    assert_eq!(pool.free(&[second, first, first]), Err(Error::NotHeld(first)));
    assert_eq!((pool.ref_count(first), pool.ref_count(second), pool.num_held()), (Ok(1), Ok(1), 2));
}

#[test]
fn block_pool_takes_one_hold_for_each_time_a_block_is_listed() {
    let mut pool = pool(4);
    let [block] = allocate(&mut pool);
    pool.touch(&[block, block]).unwrap();
    assert_eq!(pool.ref_count(block), Ok(3));
}

#[test]
fn block_pool_refuses_to_touch_a_free_block_and_changes_nothing() {
    let mut pool = pool(4);
    let [held] = allocate(&mut pool);
    let free = BlockId::new(3);
    assert_eq!(pool.touch(&[held, free]), Err(Error::NotHeld(free)));
    assert_eq!(pool.ref_count(held), Ok(1));
}

#[test]
fn block_pool_refuses_the_null_block() {
    let mut pool = pool(4);
    let error = Err(Error::UnknownBlock { block: NULL_BLOCK, last: 3 });
    assert_eq!([pool.free(&[NULL_BLOCK]), pool.touch(&[NULL_BLOCK])], [error.clone(), error]);
}

#[test]
fn block_pool_refuses_a_block_beyond_its_last() {
    let mut pool = pool(4);
    let block = BlockId::new(4);
    assert_eq!(pool.free(&[block]), Err(Error::UnknownBlock { block, last: 3 }));
}

#[test]
fn block_pool_does_not_evict_a_block_that_is_held() {
    let mut pool = pool(4);
    let [block] = allocate(&mut pool);
    assert_eq!((pool.evict(block), pool.num_held()), (Ok(false), 1));
}

#[test]
fn block_pool_refuses_a_configuration_without_a_block_to_hand_out() {
    assert!(matches!(BlockPool::new(&CacheConfig::new(1)), Err(Error::InvalidArgument { argument: "num_blocks", .. })));
}
