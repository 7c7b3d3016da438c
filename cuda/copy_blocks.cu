// copy_blocks: copies whole blocks within a pool, as a plan's copy-on-write asks for.
//
//   cache   the pool; a block is num_spans contiguous spans of span_size elements: one span over all its layers, or
//           one per layer where the layer is the outermost dimension
//   copies  (num_copies, 2) int32, source and destination block; no destination twice, and none that is a source
//
// Variants: PKV_VECTOR_BYTES, 1 to 16, which divides every address and every stride in bytes.
// Mapping: a thread block of 256 copies a chunk of a span; grid.x = num_copies * num_spans * chunks per span. Each
// thread has 8 loads in flight before its first store. Needs no shared memory; any architecture from sm_80 on.
#include "paged_kv.cuh"

constexpr i32 kThreads = 256;
constexpr i32 kLoads = 8;
constexpr i64 kChunkVectors = kThreads * kLoads;
constexpr i64 kVectorBytes = PKV_VECTOR_BYTES;
using Vec = Vector<PKV_VECTOR_BYTES>::type;

struct CopyBlocksParams {
  G<u8> cache;
  G<const i32> copies;
  i64 span_size;  // elements
  i32 num_copies, num_spans;
  i64 block_stride, span_stride;  // elements
  i32 element_bytes, unused;
};
static_assert(sizeof(CopyBlocksParams) == 56, "the launcher packs the same bytes");

extern "C" __global__ void __launch_bounds__(kThreads) copy_blocks(PKV_PARAM CopyBlocksParams p) {
  const i64 span_vectors = p.span_size * p.element_bytes / kVectorBytes;
  const i64 span_chunks = (span_vectors + kChunkVectors - 1) / kChunkVectors;
  const i64 copy_chunks = span_chunks * p.num_spans;
  const i64 copy = blockIdx.x / copy_chunks;
  if (copy >= p.num_copies) return;  // an empty list is launched as one block
  const i64 span = (blockIdx.x - copy * copy_chunks) / span_chunks;
  const i64 chunk = blockIdx.x - copy * copy_chunks - span * span_chunks;

  const i64 source = load(p.copies + 2 * copy);
  const i64 destination = load(p.copies + 2 * copy + 1);
  const i64 span_offset = span * p.span_stride;
  const G<const u8> from = {p.cache.address + (source * p.block_stride + span_offset) * p.element_bytes};
  const G<u8> to = p.cache + (destination * p.block_stride + span_offset) * p.element_bytes;

  const i64 first = chunk * kChunkVectors + threadIdx.x;
  Vec vectors[kLoads];
#pragma unroll
  for (i32 i = 0; i < kLoads; i++) {
    const i64 at = first + i * kThreads;
    if (at < span_vectors) vectors[i] = load_as<Vec>(from + at * kVectorBytes);
  }
#pragma unroll
  for (i32 i = 0; i < kLoads; i++) {
    const i64 at = first + i * kThreads;
    if (at < span_vectors) store_as(to + at * kVectorBytes, vectors[i]);
  }
}
