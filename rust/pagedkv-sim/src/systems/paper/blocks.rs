//! The block manager of the paper, over the pool of `pagedkv-core`.
//!
//! Blocks of a prompt are allocated once per group and shared by its sequences; a sequence appends into its last block
//! and takes a new one when that is full, or a copy when others hold it; a fork only counts references.

use pagedkv_core::{BlockId, BlockPool, CacheConfig};

use super::super::Limits;
use crate::error::{Result, invalid};

/// The block tables of a group's sequences. What a shared prefix holds is in none of them.
#[derive(Debug, Default)]
pub(super) struct Tables {
    tables: Vec<Vec<BlockId>>,
    /// Of a swapped group, how many distinct blocks the tables name; they stand for places then.
    num_swapped: u32,
}

impl Tables {
    pub(super) fn num_distinct(&self) -> u32 {
        if self.num_swapped > 0 { self.num_swapped } else { distinct(&self.tables).len() as u32 }
    }

    pub(super) fn num_logical(&self) -> u64 {
        self.tables.iter().map(|table| table.len() as u64).sum()
    }
}

#[derive(Debug)]
pub(super) struct Blocks {
    pool: BlockPool,
    block_size: u32,
    /// Blocks of a prefix that every prompt begins with, computed beforehand and never given back.
    pub(super) num_prefix: u32,
    pub(super) sharing: bool,
}

impl Blocks {
    pub(super) fn new(limits: &Limits, num_prefix: u32, sharing: bool) -> Result<Self> {
        let config = CacheConfig {
            block_size: limits.block_size,
            enable_prefix_caching: false,
            ..CacheConfig::new(limits.num_blocks + 1)
        };
        let mut pool = BlockPool::new(&config)?;
        let mut prefix = vec![BlockId::default(); num_prefix as usize];
        if num_prefix >= limits.num_blocks || pool.allocate(&mut prefix).is_none() {
            return invalid("shared_prefix_tokens", "a prefix that leaves room for requests", num_prefix);
        }
        Ok(Self { pool, block_size: limits.block_size, num_prefix, sharing })
    }

    pub(super) fn num_free(&self) -> u32 {
        self.pool.num_free()
    }

    pub(super) fn num_held(&self) -> u32 {
        self.pool.num_held()
    }

    pub(super) const fn prefix_tokens(&self) -> u32 {
        self.num_prefix * self.block_size
    }

    /// Blocks of so many sequences of a length, beside the shared prefix.
    pub(super) fn needed(&self, len: u32, sequences: u32) -> u32 {
        len.div_ceil(self.block_size).saturating_sub(self.num_prefix) * sequences
    }

    /// Blocks that an admission takes: a prompt is shared, what was drawn behind it is not.
    pub(super) fn needed_to_admit(&self, prompt: u32, len: u32, sequences: u32) -> u32 {
        if !self.sharing {
            return self.needed(len, sequences);
        }
        let shared = self.shared_blocks(prompt, len);
        shared + (self.needed(len, 1) - shared) * sequences
    }

    fn shared_blocks(&self, prompt: u32, len: u32) -> u32 {
        let whole = if len == prompt { prompt.div_ceil(self.block_size) } else { prompt / self.block_size };
        whole.saturating_sub(self.num_prefix)
    }

    pub(super) fn admit(&mut self, prompt: u32, len: u32, sequences: u32) -> Tables {
        let shared = if self.sharing { self.shared_blocks(prompt, len) as usize } else { 0 };
        let all = self.needed(len, 1) as usize;
        let mut first = vec![BlockId::default(); all];
        self.allocate(&mut first);
        let mut tables = vec![first];
        for _ in 1..sequences {
            let mut table = tables[0][..shared].to_vec();
            self.pool.touch(&table).expect("the first sequence holds them");
            table.resize(all, BlockId::default());
            self.allocate(&mut table[shared..]);
            tables.push(table);
        }
        Tables { tables, num_swapped: 0 }
    }

    /// Gives every sequence the slot of its token number `len`; returns how many tokens had to be copied.
    pub(super) fn append(&mut self, tables: &mut Tables, len: u32) -> u64 {
        let blocks = self.needed(len, 1) as usize;
        let mut copied = 0;
        for table in &mut tables.tables {
            if table.len() < blocks {
                table.push(allocate_one(&mut self.pool));
                continue;
            }
            let last = table.last_mut().expect("a sequence that runs has a block");
            if self.pool.ref_count(*last).expect("a block of a table is one of the pool") > 1 {
                let own = allocate_one(&mut self.pool);
                self.pool.free(&[*last]).expect("the sequence holds it");
                *last = own;
                copied += u64::from((len - 1) % self.block_size);
            }
        }
        copied
    }

    /// Replaces the sequences by continuations of these; returns how many tokens had to be copied.
    pub(super) fn fork(&mut self, tables: &mut Tables, parents: &[u32], len: u32) -> u64 {
        if (0..).zip(parents).all(|(place, parent)| place == *parent) {
            return 0;
        }
        let mut copied = 0;
        let mut next = Vec::with_capacity(parents.len());
        for (place, &parent) in parents.iter().enumerate() {
            let is_first = place == 0 || parents[place - 1] != parent;
            if self.sharing || is_first {
                let table = tables.tables[parent as usize].clone();
                self.pool.touch(&table).expect("the parent holds them");
                next.push(table);
            } else {
                // Without sharing the blocks of a beam that ends are written over.
                copied += u64::from(len);
                next.push(Vec::new());
            }
        }
        let blocks = tables.tables[0].len();
        self.free(tables);
        for table in next.iter_mut().filter(|table| table.len() < blocks) {
            table.resize(blocks, BlockId::default());
            self.allocate(table);
        }
        tables.tables = next;
        copied
    }

    pub(super) fn free(&mut self, tables: &mut Tables) {
        for table in tables.tables.drain(..) {
            self.pool.free(&table).expect("the sequence holds its blocks");
        }
    }

    /// Gives the blocks up; the tables keep which were the same. Returns how many went out.
    pub(super) fn swap_out(&mut self, tables: &mut Tables) -> u32 {
        let held = distinct(&tables.tables);
        for table in &mut tables.tables {
            self.pool.free(table).expect("the sequence holds its blocks");
            for block in table {
                let place = held.binary_search(block).expect("it is one of them");
                *block = BlockId::new(place as u32 + 1);
            }
        }
        tables.num_swapped = held.len() as u32;
        tables.num_swapped
    }

    /// Takes blocks again for what went out; returns how many came in.
    pub(super) fn swap_in(&mut self, tables: &mut Tables) -> u32 {
        let mut held = vec![BlockId::default(); tables.num_swapped as usize];
        self.allocate(&mut held);
        for table in &mut tables.tables {
            table.iter_mut().for_each(|block| *block = held[block.get() as usize - 1]);
            self.pool.touch(table).expect("they were allocated just now");
        }
        self.pool.free(&held).expect("they were allocated just now");
        std::mem::take(&mut tables.num_swapped)
    }

    fn allocate(&mut self, out: &mut [BlockId]) {
        self.pool.allocate(out).expect("the caller counted free blocks");
    }
}

fn allocate_one(pool: &mut BlockPool) -> BlockId {
    let mut block = [BlockId::default()];
    pool.allocate(&mut block).expect("the caller counted free blocks");
    block[0]
}

fn distinct(tables: &[Vec<BlockId>]) -> Vec<BlockId> {
    let mut blocks: Vec<_> = tables.iter().flatten().copied().collect();
    if tables.len() > 1 {
        blocks.sort_unstable();
        blocks.dedup();
    } else {
        blocks.sort_unstable();
    }
    blocks
}
