//! A plan as an array of words, for callers that can hand on arrays only.
//!
//! Layout: what it is, sizes, three words per sequence (tokens, queries, bytes of its mask), then the blocks of all
//! sequences, then their masks. What follows from these is not stored, so that no words, whatever they hold, can make a
//! plan that reads or writes outside its arrays.

use pagedkv_core::split_kv::SequenceShape;

use super::batch::TreeMask;
use super::plan::{Cut, Plan, Sequence};
use super::planned::{AttentionPlan, AttentionShape, cut};
use crate::error::{Error, Result};
use crate::view::View;

/// The first word: changes with the layout.
const MAGIC: i32 = 0x706b_0001;
/// Words before those of the sequences.
const HEADER: usize = 7;
/// The window of a plan without one.
const NO_WINDOW: i32 = -1;

impl AttentionPlan {
    /// The plan as words.
    ///
    /// # Complexity
    ///
    /// O(sequences + blocks + bytes of masks).
    pub fn to_words(&self) -> Vec<i32> {
        let AttentionShape { num_q_heads, num_kv_heads, head_dim, block_size, sliding_window } = self.shape();
        let sequences = &self.plan.sequences;
        let sizes = [num_q_heads, num_kv_heads, head_dim, block_size].map(|size| size as i32);
        let window = sliding_window.map_or(NO_WINDOW, |window| i32::try_from(window).unwrap_or(i32::MAX));
        let mut words = vec![MAGIC];
        words.extend(sizes);
        words.extend([window, sequences.len() as i32]);
        for Sequence { shape, mask, .. } in sequences {
            words.extend([shape.len, shape.num_queries, mask.len()].map(|count| count as i32));
        }
        words.extend(sequences.iter().flat_map(|sequence| &sequence.blocks).map(|block| *block as i32));
        let masks = sequences.iter().flat_map(|sequence| sequence.mask.as_chunks::<4>().0);
        words.extend(masks.map(|bytes| i32::from_le_bytes(*bytes)));
        words
    }

    /// The plan that [`to_words`](Self::to_words) gave, for such queries, such a layer and so many threads.
    ///
    /// # Errors
    ///
    /// If the words are no plan, or one for another shape or for more query tokens.
    ///
    /// # Complexity
    ///
    /// As [`AttentionPlan::new`].
    pub fn from_words(words: &[i32], q: &View<3>, k_cache: &View<4>, threads: usize) -> Result<Self> {
        let mut reader = Reader { words };
        let header: [i32; HEADER] = reader.take(HEADER)?.try_into().map_err(|_| no_plan("too few words"))?;
        let [magic, num_q_heads, num_kv_heads, head_dim, block_size, window, num_seqs] = header;
        if magic != MAGIC {
            return Err(no_plan(&format!("{magic:#x} at the start")));
        }
        let shape = AttentionShape {
            num_q_heads: size(num_q_heads)?,
            num_kv_heads: size(num_kv_heads)?,
            head_dim: size(head_dim)?,
            block_size: size(block_size)?,
            sliding_window: if window == NO_WINDOW { None } else { Some(size(window)?) },
        };
        check_shape(&shape, q, k_cache)?;
        let cut = Cut { num_tokens: q.shape()[0], ..cut(&shape, threads)? };
        let num_counts = size(num_seqs)?.checked_mul(3).ok_or_else(|| no_plan("too many sequences"))?;
        let counts: Vec<[usize; 3]> =
            reader.take(num_counts)?.as_chunks::<3>().0.iter().map(counts).collect::<Result<_>>()?;
        Self::of(read_sequences(&mut reader, &counts, &cut)?)
    }
}

/// Sizes that no array confirms would let a few wrong words ask for any amount of work.
fn check_shape(shape: &AttentionShape, q: &View<3>, k_cache: &View<4>) -> Result<()> {
    let ([_, num_q_heads, head_dim], [_, num_kv_heads, block_size, _]) = (q.shape(), k_cache.shape());
    let wanted = AttentionShape { num_q_heads, num_kv_heads, head_dim, block_size, ..*shape };
    if wanted == *shape {
        return Ok(());
    }
    let text = |shape: &AttentionShape| {
        let AttentionShape { num_q_heads, num_kv_heads, head_dim, block_size, .. } = shape;
        format!("{num_q_heads} query and {num_kv_heads} KV heads of {head_dim} elements, blocks of {block_size}")
    };
    Err(Error::Value { argument: "plan", expected: format!("one for {}", text(&wanted)), found: text(shape) })
}

fn read_sequences(reader: &mut Reader<'_>, counts: &[[usize; 3]], cut: &Cut) -> Result<Plan> {
    let (mut sequences, mut num_tokens) = (Vec::with_capacity(counts.len()), 0);
    for [len, num_queries, mask_bytes] in counts {
        let shape = SequenceShape { len: *len, num_queries: *num_queries, is_tree: *mask_bytes > 0 };
        let find = |keys: std::ops::Range<usize>| {
            let num_blocks =
                if keys.is_empty() { 0 } else { keys.end.div_ceil(cut.block_size) - keys.start / cut.block_size };
            let blocks = reader.take(num_blocks)?;
            let id = |block: &i32| u32::try_from(*block).map_err(|_| no_plan(&format!("block {block}")));
            blocks.iter().map(id).collect()
        };
        sequences.push(Sequence::new(cut, shape, num_tokens, Vec::new(), find)?);
        num_tokens += num_queries;
        if num_tokens > cut.num_tokens {
            return Err(no_plan(&format!("{num_tokens} queries or more beside q with {}", cut.num_tokens)));
        }
    }
    for (sequence, [_, num_queries, mask_bytes]) in sequences.iter_mut().zip(counts) {
        let expected = num_queries * TreeMask::row_bytes(*num_queries);
        if ![0, expected].contains(mask_bytes) {
            return Err(no_plan(&format!("a mask of {mask_bytes} bytes for {num_queries} queries")));
        }
        sequence.set_mask(reader.take(mask_bytes / 4)?.iter().flat_map(|word| word.to_le_bytes()).collect());
    }
    if !reader.words.is_empty() {
        return Err(no_plan(&format!("{} words too many", reader.words.len())));
    }
    Ok(Plan::of(cut, sequences, num_tokens))
}

/// Takes words from the front.
struct Reader<'a> {
    words: &'a [i32],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [i32]> {
        let (taken, rest) = self.words.split_at_checked(count).ok_or_else(|| no_plan("too few words"))?;
        self.words = rest;
        Ok(taken)
    }
}

fn size(word: i32) -> Result<usize> {
    usize::try_from(word).map_err(|_| no_plan(&format!("a size of {word}")))
}

fn counts([len, num_queries, mask_bytes]: &[i32; 3]) -> Result<[usize; 3]> {
    Ok([size(*len)?, size(*num_queries)?, size(*mask_bytes)?])
}

fn no_plan(found: &str) -> Error {
    Error::Value {
        argument: "plan",
        expected: "what pack() of a PagedAttention returns".to_owned(),
        found: found.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Batch, TreeMask};
    use super::*;
    use crate::view::DType;

    const SHAPE: AttentionShape =
        AttentionShape { num_q_heads: 4, num_kv_heads: 2, head_dim: 16, block_size: 4, sliding_window: Some(9) };

    fn view<const N: usize>(data: *mut std::ffi::c_void, dtype: DType, shape: [usize; N]) -> View<N> {
        let mut strides = [1; N];
        for i in (1..N).rev() {
            strides[i - 1] = strides[i] * shape[i] as i64;
        }
        // SAFETY: tables are live arrays of that shape; of queries and caches the tests ask for the shape alone.
        unsafe { View::new(data, dtype, shape, strides) }
    }

    fn words() -> Vec<i32> {
        let mut table = [7_i32, 2, 5, 1, 0, 3];
        let bits = [[1_u8, 0, 0, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]].concat();
        let batch = Batch {
            block_table: view(table.as_mut_ptr().cast(), DType::I32, [2, 3]),
            rows: None,
            seq_lens: &[12, 5],
            query_start_loc: &[0, 2, 3],
            tree_mask: Some(TreeMask { bits: &bits, start_loc: &[0, 16, 16] }),
        };
        AttentionPlan::new(&batch, &SHAPE, 1).unwrap().to_words()
    }

    fn unpack(words: &[i32]) -> Result<AttentionPlan> {
        let nothing = std::ptr::null_mut();
        let (q, k_cache) = (view(nothing, DType::F32, [3, 4, 16]), view(nothing, DType::F32, [8, 2, 4, 16]));
        AttentionPlan::from_words(words, &q, &k_cache, 1)
    }

    #[test]
    fn a_plan_survives_the_way_to_words_and_back() {
        let plan = unpack(&words()).unwrap();
        assert_eq!((plan.shape(), plan.num_tokens()), (SHAPE, 3));
        assert_eq!(plan.to_words(), words());
    }

    #[test]
    fn a_wrong_word_gives_a_refusal_or_another_sound_plan() {
        for place in 0..words().len() {
            for wrong in [i32::MIN, -1, 0, 1, 3, 64, i32::MAX] {
                let mut words = words();
                words[place] = wrong;
                if let Ok(plan) = unpack(&words) {
                    assert_eq!(plan.to_words(), words, "word {place} is {wrong}");
                }
            }
        }
    }
}
