// merge_partials: joins what several work items found for the same query rows over different keys.
//
//   parameters   AttentionParams (include/attention.cuh), as paged_decode and paged_prefill had them: of these partial_out,
//                partial_lse, merges and what says where rows go
//   a block      one merge item under one KV head; grid.x = merge items * num_kv_heads, or more
//
// Variants: PKV_Q F16 or BF16, the type of the output.
// Mapping: a thread has two neighbouring elements of a row and goes through the pieces in the order of their keys, so that a
// result depends on where keys were cut, and on nothing else. Needs no shared memory.
#include "results.cuh"

using Q = PKV_Q;
constexpr i32 kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads) merge_partials(PKV_PARAM AttentionParams p) {
  MergeItem item;
  i32 kv_head;
  if (!find_merge(p, item, kv_head)) return;
  const i32 row_pairs = p.head_dim / 2;
  for (i32 i = threadIdx.x; i < item.num_rows * row_pairs; i += kThreads) {
    const i32 row = i / row_pairs, dim = (i - row * row_pairs) * 2;
    const i64 first = partial_index(p, item, kv_head, row);
    const i64 piece_stride = static_cast<i64>(item.piece_rows) * p.num_kv_heads;
    RowTotal total = {minus_infinity(), 0.f};
    for (i32 piece = 0; piece < item.num_pieces; piece++) {
      total.base = maximum(total.base, load(read_only(p.partial_lse) + (first + piece * piece_stride)) * kLog2E);
    }
    f32x2 sum = {0.f, 0.f};
    for (i32 piece = 0; piece < item.num_pieces; piece++) {
      const i64 index = first + piece * piece_stride;
      const float lse = load(read_only(p.partial_lse) + index) * kLog2E;
      if (lse == minus_infinity()) continue;
      const float weight = exp2_approx(lse - total.base);
      const f32x2 pair = load_as<f32x2>(read_only(p.partial_out) + (index * p.head_dim + dim) * 4);
      total.sum += weight;
      sum.x += weight * pair.x;
      sum.y += weight * pair.y;
    }
    store_whole<Q, true>(p, item, kv_head, row, dim, total, sum);
  }
}
