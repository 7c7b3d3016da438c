// gather_kv: collects the keys and values of whole sequences, one sequence after another, in another type if asked to.
//
//   k_out, v_out      (num_tokens, num_kv_heads, head_dim) of out_type, token and head strided
//   k_cache, v_cache  (num_blocks, num_kv_heads, block_size, head_dim) of cache_type, strided (KVLayout)
//   block_table       (num_rows, max_blocks_per_seq) int32
//   token_starts      (num_seqs + 1,) int32, where each sequence's tokens start in the output; the last is num_tokens
//   rows              (num_seqs,) int32, the row of the table of each sequence, or null: row s of sequence s
//   k_scale, v_scale  (1,) or (num_kv_heads,) float32, or null: factors; 1 where one type is copied
//
// Variants: PKV_VECTOR_BYTES 1 to 16 and PKV_ELEMENTS 0, or 0 and 1 or 8: see include/elements_moved.cuh.
// Mapping: one thread block of 128 per token; a thread moves a share of a row of K and the same one of V.
// Needs no shared memory; any architecture from sm_80 on.
#include "elements_moved.cuh"
#include "paged_kv.cuh"

constexpr i32 kThreads = 128;

struct GatherKVParams {
  G<u8> k_out, v_out;
  G<const u8> k_cache, v_cache;
  G<const i32> block_table, token_starts, rows;
  G<const float> k_scale, v_scale;
  i32 num_tokens, num_seqs, num_kv_heads, head_dim, block_size;
  i32 out_type, cache_type, k_scale_stride, v_scale_stride, unused;
  KVLayout k_layout, v_layout;
  i64 k_token_stride, k_head_stride, v_token_stride, v_head_stride, table_row_stride;  // elements
};
static_assert(sizeof(GatherKVParams) == 200, "the launcher packs the same bytes");

// The last sequence that starts at or before a token: sequences without tokens start where the next one does.
PKV_DEV i32 sequence_of(const GatherKVParams& p, i32 token) {
  i32 low = 0, high = p.num_seqs - 1;
  while (low < high) {
    const i32 middle = (low + high + 1) / 2;
    if (load(p.token_starts + middle) <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

extern "C" __global__ void __launch_bounds__(kThreads) gather_kv(PKV_PARAM GatherKVParams p) {
  const i32 token = blockIdx.x;
  if (token >= p.num_tokens) return;  // an empty batch is launched as one block
  const i32 sequence = sequence_of(p, token);
  const i32 position = token - load(p.token_starts + sequence);
  const i64 table_row = p.rows ? load(p.rows + sequence) : sequence;
  const i32 block = load(p.block_table + (table_row * p.table_row_stride + position / p.block_size));
  const Place place = {block, position % p.block_size};
  const i64 to_bytes = bytes_of_type(p.out_type), from_bytes = bytes_of_type(p.cache_type);

  for_each_share<kThreads>(p.cache_type, p.num_kv_heads, p.head_dim, [&](i32 head, i32 column) {
    const i64 to_k = token * p.k_token_stride + head * p.k_head_stride + column;
    const i64 to_v = token * p.v_token_stride + head * p.v_head_stride + column;
    const i64 from_k = p.k_layout.row(place, head) + column, from_v = p.v_layout.row(place, head) + column;
    const float k_scale = scale_of(p.k_scale, p.k_scale_stride, head);
    const float v_scale = scale_of(p.v_scale, p.v_scale_stride, head);
    move_elements(p.k_out + to_k * to_bytes, p.out_type, p.k_cache + from_k * from_bytes, p.cache_type, k_scale, 1.f);
    move_elements(p.v_out + to_v * to_bytes, p.out_type, p.v_cache + from_v * from_bytes, p.cache_type, v_scale, 1.f);
  });
}
