// append_kv: writes the keys and values of a step's tokens into their slots, and rounds them to the cache's type.
//
//   k_cache, v_cache  (num_blocks, num_kv_heads, block_size, head_dim) of cache_type, strided (KVLayout)
//   key, value        (num_tokens, num_kv_heads, head_dim) of input_type, token and head strided
//   slot_mapping      (num_tokens,) int64; a negative slot is padding and is skipped; no slot twice
//   k_scale, v_scale  (1,) or (num_kv_heads,) float32, or null: what keys and values are divided by; 1 where one type is
//                     copied
//
// Variants: PKV_VECTOR_BYTES 1 to 16 and PKV_ELEMENTS 0, or 0 and 1 or 8: see include/elements_moved.cuh.
// Mapping: one thread block of 128 per token; a thread moves a share of a row of K and the same one of V.
// Needs no shared memory; any architecture from sm_80 on.
#include "elements_moved.cuh"
#include "paged_kv.cuh"

constexpr i32 kThreads = 128;

struct AppendKVParams {
  G<u8> k_cache, v_cache;
  G<const u8> key, value;
  G<const i64> slot_mapping;
  G<const float> k_scale, v_scale;
  i32 num_tokens, num_kv_heads, head_dim, block_size;
  i32 cache_type, input_type, k_scale_stride, v_scale_stride;
  KVLayout k_layout, v_layout;
  i64 key_token_stride, key_head_stride, value_token_stride, value_head_stride;  // elements
};
static_assert(sizeof(AppendKVParams) == 168, "the launcher packs the same bytes");

extern "C" __global__ void __launch_bounds__(kThreads) append_kv(PKV_PARAM AppendKVParams p) {
  const i64 token = blockIdx.x;
  if (token >= p.num_tokens) return;  // an empty batch is launched as one block
  const i64 slot = load(p.slot_mapping + token);
  if (slot < 0) return;
  const Place place = place_of(slot, p.block_size);
  const i64 to_bytes = bytes_of_type(p.cache_type), from_bytes = bytes_of_type(p.input_type);

  for_each_share<kThreads>(p.cache_type, p.num_kv_heads, p.head_dim, [&](i32 head, i32 column) {
    const i64 from_k = token * p.key_token_stride + head * p.key_head_stride + column;
    const i64 from_v = token * p.value_token_stride + head * p.value_head_stride + column;
    const i64 to_k = p.k_layout.row(place, head) + column, to_v = p.v_layout.row(place, head) + column;
    const float k_scale = scale_of(p.k_scale, p.k_scale_stride, head);
    const float v_scale = scale_of(p.v_scale, p.v_scale_stride, head);
    move_elements(p.k_cache + to_k * to_bytes, p.cache_type, p.key + from_k * from_bytes, p.input_type, 1.f, k_scale);
    move_elements(p.v_cache + to_v * to_bytes, p.cache_type, p.value + from_v * from_bytes, p.input_type, 1.f, v_scale);
  });
}
