// What paged_decode and paged_prefill have in common: their parameters, the work item of a thread block, its query rows.
#pragma once
#include "numbers.cuh"
#include "paged_kv.cuh"

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// A work list of kWorkHeaderWords words, the first one the number of items, and the items. It is in device memory whole,
// so that a captured graph can be replayed with another plan: blocks beyond the last item find out by themselves.
constexpr i32 kWorkHeaderWords = 4;
constexpr i32 kWorkItemWords = 12;

// Some query rows of one sequence and the keys to fold into them. Row r of a sequence is query r / group under query
// head r % group of the KV head; there is one thread block per item and KV head.
struct WorkItem {
  i32 table_row;       // of the block table
  i32 first_token;     // where the sequence's queries start in q
  i32 first_row, num_rows;
  i32 first_key, end_key;
  i32 context_len;     // keys before the sequence's first query; below 0 where it has more queries than keys
  i32 partial_row;     // where unfinished rows go, or -1: then the item finishes its rows
  i32 mask_start;      // the sequence's first word in tree_mask, or -1: causal
  i32 mask_row_words;  // 32-bit words per query of the mask
  i32 depth_start;     // the sequence's first entry in tree_depths
  i32 num_queries;     // of the sequence
};
static_assert(sizeof(WorkItem) == kWorkItemWords * 4, "the planner packs the same words");

// Rows whose keys were cut: those of piece i are num_rows rows of the workspace from partial_row + i * piece_rows on. A
// list of merges has a header like that of a work list.
constexpr i32 kMergeItemWords = 8;
struct MergeItem {
  i32 first_token, first_row, num_rows;  // as of a WorkItem
  i32 partial_row, num_pieces, piece_rows;
  i32 unused[2];
};
static_assert(sizeof(MergeItem) == kMergeItemWords * 4, "the planner packs the same words");

struct AttentionParams {
  G<u8> out;                                     // (num_tokens, num_q_heads, head_dim), of q's type
  G<float> lse;                                  // (num_tokens, num_q_heads), or null
  G<u8> partial_out;                             // float32 (num_partial_rows, num_kv_heads, head_dim)
  G<float> partial_lse;                          // (num_partial_rows, num_kv_heads)
  G<const u8> q;                                 // (num_tokens, num_q_heads, head_dim)
  G<const u8> k_cache, v_cache;                  // (num_blocks, num_kv_heads, block_size, head_dim)
  G<const i32> block_table;                      // (num_rows, max_blocks_per_seq)
  G<const u8> work, merges;                      // the lists
  G<const float> k_scale, v_scale;               // (1,) or (num_kv_heads,), or null
  G<const u8> alibi_slopes, sinks;               // (num_q_heads,), or null
  G<const u32> tree_mask;                        // bit k of a query's row: it sees the key of query k
  G<const i32> tree_depths;                      // of each query of a tree: how many keys of the tree it sees, less one
  KVLayout k_layout, v_layout;
  i64 q_token_stride, q_head_stride, out_token_stride, out_head_stride, lse_token_stride, table_row_stride;  // elements
  i32 num_kv_heads, group, head_dim, block_size;
  i32 k_scale_stride, v_scale_stride;            // 0 where one scale serves all heads
  i32 slopes_type, sinks_type;                   // kTypeF32, kTypeF16 or kTypeBF16
  i32 sliding_window;                            // keys that a query sees, or 0: all
  i32 copy_bytes;                                // 16 or 8: divides addresses and strides of the caches, in bytes
  float softmax_scale;
  float soft_cap;                                // or 0
};
static_assert(sizeof(AttentionParams) == 272, "the launcher packs the same bytes");

PKV_DEV WorkItem item_of(u32x4 a, u32x4 b, u32x4 c) {
  return {static_cast<i32>(a.x), static_cast<i32>(a.y), static_cast<i32>(a.z), static_cast<i32>(a.w),
          static_cast<i32>(b.x), static_cast<i32>(b.y), static_cast<i32>(b.z), static_cast<i32>(b.w),
          static_cast<i32>(c.x), static_cast<i32>(c.y), static_cast<i32>(c.z), static_cast<i32>(c.w)};
}

PKV_DEV G<const u8> words_of_item(const AttentionParams& p, i32 index) {
  return p.work + (kWorkHeaderWords + static_cast<i64>(index) * kWorkItemWords) * 4;
}

// The item of this thread block once more, for what is seldom used: in a loop it would take registers all the time.
PKV_DEV WorkItem item_again(const AttentionParams& p) {
  const G<const u8> words = words_of_item(p, blockIdx.x / p.num_kv_heads);
  return item_of(load_again_as<u32x4>(words), load_again_as<u32x4>(words + 16), load_again_as<u32x4>(words + 32));
}

// The item and KV head of this thread block; false where there is none.
PKV_DEV bool find_work(const AttentionParams& p, WorkItem& item, i32& kv_head) {
  const i32 index = blockIdx.x / p.num_kv_heads;
  kv_head = static_cast<i32>(blockIdx.x) - index * p.num_kv_heads;
  if (index >= load_as<i32>(p.work)) return false;
  const G<const u8> words = words_of_item(p, index);
  item = item_of(load_as<u32x4>(words), load_as<u32x4>(words + 16), load_as<u32x4>(words + 32));
  return true;
}

PKV_DEV bool find_merge(const AttentionParams& p, MergeItem& item, i32& kv_head) {
  const i32 index = blockIdx.x / p.num_kv_heads;
  kv_head = static_cast<i32>(blockIdx.x) - index * p.num_kv_heads;
  if (index >= load_as<i32>(p.merges)) return false;
  const G<const u8> words = p.merges + (kWorkHeaderWords + static_cast<i64>(index) * kMergeItemWords) * 4;
  const u32x4 a = load_as<u32x4>(words);
  item = {static_cast<i32>(a.x), static_cast<i32>(a.y), static_cast<i32>(a.z), static_cast<i32>(a.w),
          load_as<i32>(words + 16), load_as<i32>(words + 20), {}};
  return true;
}

// A row of an item.
struct QueryRow {
  i32 query;   // of the sequence
  i32 q_head;  // of all heads
};

template <class Item>
PKV_DEV QueryRow query_row(const AttentionParams& p, const Item& item, i32 kv_head, i32 row) {
  const i32 of_sequence = item.first_row + row;
  const i32 query = of_sequence / p.group;
  return {query, kv_head * p.group + of_sequence - query * p.group};
}

PKV_DEV float number_of(G<const u8> numbers, i32 type, i32 index) {
  return load_numbers<1>(numbers + static_cast<i64>(index) * bytes_of_type(type), type).value[0];
}
