// move_kv: moves single tokens over all layers of a pool, as the accepted path of a draft tree asks for.
//
//   cache       (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), strided, the last dimension contiguous
//   slot_moves  (num_moves, 3) int64: cache group, source slot, destination slot. Moves of other groups than `group` are
//               passed over. No destination twice, and none that is the source of a later move: a step plan's are such,
//               so that moves done in order read all that they should before it is written
//
// Variants: PKV_VECTOR_BYTES, 1 to 16, which divides every address and every stride in bytes.
// Mapping: one thread per vector of a token (layer, K or V, head, vector of the row), which does all moves in order, 8
// loads in flight before the first store; grid.x = vectors of a token / 128, rounded up. No two threads touch the same
// bytes. Needs no shared memory; any architecture from sm_80 on.
#include "paged_kv.cuh"

constexpr i32 kThreads = 128;
constexpr i32 kLoads = 8;
using Vec = Vector<PKV_VECTOR_BYTES>::type;

struct MoveKVParams {
  G<u8> cache;
  G<const i64> slot_moves;
  i32 num_moves, group, num_layers, num_kv_heads, block_size, head_dim;
  KVLayout layout;                // of the keys or the values of one layer
  i64 layer_stride, side_stride;  // elements
  i32 element_bytes, unused;
};
static_assert(sizeof(MoveKVParams) == 88, "the launcher packs the same bytes");

extern "C" __global__ void __launch_bounds__(kThreads) move_kv(PKV_PARAM MoveKVParams p) {
  const i32 vector_elements = PKV_VECTOR_BYTES / p.element_bytes, row_vectors = p.head_dim / vector_elements;
  const i64 lane = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (lane >= 2ll * p.num_layers * p.num_kv_heads * row_vectors) return;
  const i64 row = lane / row_vectors;
  const i64 side_of_layer = row / p.num_kv_heads;
  const i32 head = static_cast<i32>(row - side_of_layer * p.num_kv_heads);
  const i64 column = (lane - row * row_vectors) * vector_elements;
  const i64 offset = (side_of_layer >> 1) * p.layer_stride + (side_of_layer & 1) * p.side_stride + column;

  for (i32 first = 0; first < p.num_moves; first += kLoads) {
    Vec vectors[kLoads];
#pragma unroll
    for (i32 i = 0; i < kLoads; i++) {
      const i64 move = first + i;
      if (move >= p.num_moves || load(p.slot_moves + 3 * move) != p.group) continue;
      const Place source = place_of(load(p.slot_moves + (3 * move + 1)), p.block_size);
      vectors[i] = load_written_as<Vec>(p.cache + (offset + p.layout.row(source, head)) * p.element_bytes);
    }
#pragma unroll
    for (i32 i = 0; i < kLoads; i++) {
      const i64 move = first + i;
      if (move >= p.num_moves || load(p.slot_moves + 3 * move) != p.group) continue;
      const Place destination = place_of(load(p.slot_moves + (3 * move + 2)), p.block_size);
      store_as(p.cache + (offset + p.layout.row(destination, head)) * p.element_bytes, vectors[i]);
    }
  }
}
