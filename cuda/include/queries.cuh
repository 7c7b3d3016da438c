// The queries of an item in shared memory, in the type and order in which fragments of keys want them.
#pragma once
#include "attention.cuh"
#include "kv_tile.cuh"

// float16 queries of FP8 keys are taken as they are; bfloat16 ones become float16, each row times a power of two of its
// own that brings its largest element to float16's upper end. What is lost that way is 2^-38 of that element.
template <class Q, class Math> struct Rescales { static constexpr bool kValue = true; };
template <class T> struct Rescales<T, T> { static constexpr bool kValue = false; };

constexpr i32 kLargestExponent = 14;

// k for which 2^k times a row with that largest magnitude fits.
PKV_DEV i32 rescaling_exponent(float largest) {
  const i32 exponent = static_cast<i32>(bits_of(largest) >> 23) - 127;
  return minimum(kLargestExponent - exponent, 126);
}

PKV_DEV float power_of_two(i32 exponent) { return float_of(static_cast<u32>(exponent + 127) << 23); }

// Sixteen elements of a row: 16-byte chunks 2 * group and 2 * group + 1.
struct QueryGroup {
  u32 pair[8];
};

PKV_DEV QueryGroup load_query_group(const AttentionParams& p, G<const u8> row, i32 group) {
  QueryGroup r = {{0, 0, 0, 0, 0, 0, 0, 0}};
#pragma unroll
  for (i32 half = 0; half < 2; half++) {
    if (group * 16 + half * 8 >= p.head_dim) continue;
    const u32x4 chunk = load_as<u32x4>(row + (group * 32 + half * 16));
    r.pair[half * 4] = chunk.x;
    r.pair[half * 4 + 1] = chunk.y;
    r.pair[half * 4 + 2] = chunk.z;
    r.pair[half * 4 + 3] = chunk.w;
  }
  return r;
}

// Writes the item's rows to a tile of kRows rows of 16-bit elements, and to `exponents`, one i32 per row, what they were
// rescaled by; rows beyond the item's and elements beyond head_dim are 0. Eight threads share a row. A barrier must follow.
template <class Q, class KV, i32 kHeadDim, i32 kRows, i32 kThreads>
PKV_DEV void stage_queries(const AttentionParams& p, const WorkItem& item, i32 kv_head, smem_t tile, smem_t exponents) {
  using Math = typename Stored<KV>::Math;
  constexpr i32 kGroups = kHeadDim / 16;
  constexpr i32 kGroupsPerThread = (kGroups + 7) / 8;
  const i32 share = threadIdx.x % 8;
  for (i32 row = threadIdx.x / 8; row < kRows; row += kThreads / 8) {
    QueryGroup groups[kGroupsPerThread] = {};
    if (row < item.num_rows) {
      const QueryRow at = query_row(p, item, kv_head, row);
      const i64 offset = static_cast<i64>(item.first_token + at.query) * p.q_token_stride + at.q_head * p.q_head_stride;
#pragma unroll
      for (i32 i = 0; i < kGroupsPerThread; i++) {
        if (share + i * 8 < kGroups) groups[i] = load_query_group(p, p.q + offset * 2, share + i * 8);
      }
    }
    if constexpr (Rescales<Q, Math>::kValue) {
      float largest = 0.f;
#pragma unroll
      for (i32 i = 0; i < kGroupsPerThread * 8; i++) {
        const f32x2 two = unpack(Q{}, groups[i / 8].pair[i % 8]);
        largest = maximum(largest, maximum(magnitude(two.x), magnitude(two.y)));
      }
#pragma unroll
      for (i32 mask = 1; mask < 8; mask *= 2) largest = maximum(largest, shuffle_xor(largest, mask));
      const i32 exponent = rescaling_exponent(largest);
      if (share == 0) store_shared(exponents + row * 4, exponent);
#pragma unroll
      for (i32 i = 0; i < kGroupsPerThread * 8; i++) {
        u32& pair = groups[i / 8].pair[i % 8];
        const f32x2 two = unpack(Q{}, pair);
        pair = pack(F16{}, two.x * power_of_two(exponent), two.y * power_of_two(exponent));
      }
    }
#pragma unroll
    for (i32 i = 0; i < kGroupsPerThread; i++) {
      const i32 group = share + i * 8;
      if (group >= kGroups) continue;
      const u32(&pair)[8] = groups[i].pair;
      u32x4 first = {pair[0], pair[1], pair[2], pair[3]}, second = {pair[4], pair[5], pair[6], pair[7]};
      if constexpr (Stored<KV>::kBytes == 1) {
        first = {pair[0], pair[2], pair[4], pair[6]};
        second = {pair[1], pair[3], pair[5], pair[7]};
      }
      store_shared(Tile<Math, kHeadDim>::at(tile, row, group * 2), first);
      store_shared(Tile<Math, kHeadDim>::at(tile, row, group * 2 + 1), second);
    }
  }
}

// What undoes the rescaling of a staged row.
template <class Q, class KV>
PKV_DEV float rescaled_by(smem_t exponents, i32 row) {
  if constexpr (!Rescales<Q, typename Stored<KV>::Math>::kValue) return 1.f;
  return power_of_two(-load_shared<i32>(exponents + row * 4));
}

// The a-fragment of 16 staged rows at a k-step.
template <class Math, i32 kHeadDim>
PKV_DEV void load_query_fragment(u32 (&a)[4], smem_t tile, i32 first_row, i32 step, i32 lane) {
  load_matrices(a, Tile<Math, kHeadDim>::at(tile, first_row + lane % 16, step * 2 + lane / 16));
}
