// append_kv: writes the keys and values of a step's tokens into their slots. A copy: cache and input have one dtype.
//
//   k_cache, v_cache  (num_blocks, num_kv_heads, block_size, head_dim), strided (KVLayout)
//   key, value        (num_tokens, num_kv_heads, head_dim), token and head strided
//   slot_mapping      (num_tokens,) int64; a negative slot is padding and is skipped; no slot twice
//
// Variants: PKV_ELEMENT_BYTES 1, 2 or 4; PKV_VECTOR_BYTES, which divides every address and every stride in bytes.
// Mapping: one thread block of 128 per token; a thread moves a vector of K and the same one of V.
// Needs no shared memory; any architecture from sm_80 on.
#include "paged_kv.cuh"

constexpr i32 kThreads = 128;
constexpr i32 kElementBytes = PKV_ELEMENT_BYTES;
constexpr i32 kVectorElements = PKV_VECTOR_BYTES / kElementBytes;
static_assert(kVectorElements * kElementBytes == PKV_VECTOR_BYTES, "a vector holds whole elements");
using Vec = Vector<PKV_VECTOR_BYTES>::type;

struct AppendKVParams {
  G<u8> k_cache, v_cache;
  G<const u8> key, value;
  G<const i64> slot_mapping;
  i32 num_tokens, num_kv_heads, head_dim, block_size;
  KVLayout k_layout, v_layout;
  i64 key_token_stride, key_head_stride, value_token_stride, value_head_stride;  // elements
};
static_assert(sizeof(AppendKVParams) == 136, "the launcher packs the same bytes");

extern "C" __global__ void __launch_bounds__(kThreads) append_kv(PKV_PARAM AppendKVParams p) {
  const i64 token = blockIdx.x;
  if (token >= p.num_tokens) return;  // an empty batch is launched as one block
  const i64 slot = load(p.slot_mapping + token);
  if (slot < 0) return;
  const Place place = place_of(slot, p.block_size);

  const i32 row_vectors = p.head_dim / kVectorElements;
  for (i32 i = threadIdx.x; i < p.num_kv_heads * row_vectors; i += kThreads) {
    const i32 head = i / row_vectors;
    const i32 column = (i - head * row_vectors) * kVectorElements;
    const i64 from_k = token * p.key_token_stride + head * p.key_head_stride + column;
    const i64 from_v = token * p.value_token_stride + head * p.value_head_stride + column;
    const Vec k = load_as<Vec>(p.key + from_k * kElementBytes);
    const Vec v = load_as<Vec>(p.value + from_v * kElementBytes);
    store_as(p.k_cache + (p.k_layout.row(place, head) + column) * kElementBytes, k);
    store_as(p.v_cache + (p.v_layout.row(place, head) + column) * kElementBytes, v);
  }
}
