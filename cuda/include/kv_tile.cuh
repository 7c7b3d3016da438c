// A tile in shared memory: rows of one head of keys, values or queries, and the fragments that mma takes of it.
#pragma once
#include "elements.cuh"

// Rows of kHeadDim elements of type T, a multiple of 64 bytes each. 16-byte chunks of a row are permuted so that the eight
// rows that load_matrices reads at one chunk lie in eight different banks, and so do the chunks of one row.
template <class T, i32 kHeadDim>
struct Tile {
  static constexpr i32 kRowBytes = kHeadDim * Stored<T>::kBytes;
  static constexpr i32 kRowChunks = kRowBytes / 16;
  static_assert(kRowBytes % 64 == 0, "a row fills half a line of the banks, or whole ones");

  PKV_DEV static smem_t at(smem_t tile, i32 row, i32 chunk) {
    const i32 turn = kRowBytes % 128 == 0 ? row & 7 : row >> 1 & 3;
    return tile + row * kRowBytes + ((chunk ^ turn) << 4);
  }
};

// Begins to copy `bytes` of a 16-byte chunk, or as many as it has; the rest, or all of it, becomes 0. `copy_bytes`, 16 or 8,
// divides address and bytes.
PKV_DEV void copy_chunk(i32 copy_bytes, smem_t to, G<const u8> from, i32 bytes) {
  if (copy_bytes == 16) {
    copy_async<16>(to, from, bytes > 0);
  } else {
    copy_async<8>(to, from, bytes > 0);
    copy_async<8>(to + 8, from + 8, bytes > 8);
  }
}

// scores += queries * keys of the 16 * kKeyTiles rows from first_row on, over the 16-byte chunks 2 * pair and 2 * pair + 1
// of the keys: one k-step of 16-bit elements, two of FP8. `query(a, m, step)` gives the fragment of a 16-row tile at a
// k-step. Of keys of FP8 a lane gets four neighbours where mma wants two and two: queries are staged in that order.
template <class T, i32 kHeadDim, i32 kRowTiles, i32 kKeyTiles, class Query>
PKV_DEV void add_scores(float (&scores)[kRowTiles][kKeyTiles * 2][4], smem_t tile, i32 first_row, i32 pair, i32 lane,
                        Query query) {
  constexpr i32 kSteps = 2 / Stored<T>::kBytes;
  u32 k[kKeyTiles][4];
#pragma unroll
  for (i32 t = 0; t < kKeyTiles; t++) {
    const i32 row = first_row + t * 16 + lane % 8 + lane / 16 * 8;
    load_matrices(k[t], Tile<T, kHeadDim>::at(tile, row, pair * 2 + lane / 8 % 2));
  }
#pragma unroll
  for (i32 step = 0; step < kSteps; step++) {
    u32 b[kKeyTiles][4];
#pragma unroll
    for (i32 t = 0; t < kKeyTiles; t++) {
#pragma unroll
      for (i32 half = 0; half < 2; half++) {
        if constexpr (kSteps == 1) {
          b[t][half * 2] = k[t][half * 2];
          b[t][half * 2 + 1] = k[t][half * 2 + 1];
        } else {
          b[t][half * 2] = two_of_four<0, 1>(T{}, k[t][half * 2 + step]);
          b[t][half * 2 + 1] = two_of_four<2, 3>(T{}, k[t][half * 2 + step]);
        }
      }
    }
#pragma unroll
    for (i32 m = 0; m < kRowTiles; m++) {
      u32 a[4];
      query(a, m, pair * kSteps + step);
#pragma unroll
      for (i32 t = 0; t < kKeyTiles; t++) {
        mma(typename Stored<T>::Math{}, scores[m][t * 2], a, b[t][0], b[t][1]);
        mma(typename Stored<T>::Math{}, scores[m][t * 2 + 1], a, b[t][2], b[t][3]);
      }
    }
  }
}

// out += weights * values of rows first_row to first_row + 16, for the 16-byte chunks 2 * pair and 2 * pair + 1.
template <class T, i32 kHeadDim, i32 kRowTiles, i32 kOutTiles>
PKV_DEV void add_values(float (&out)[kRowTiles][kOutTiles][4], const u32 (&weights)[kRowTiles][4], smem_t tile,
                        i32 first_row, i32 pair, i32 lane) {
  u32 v[4];
  load_matrices_transposed(v, Tile<T, kHeadDim>::at(tile, first_row + lane % 16, pair * 2 + lane / 16));
#pragma unroll
  for (i32 half = 0; half < 2; half++) {
    const u32 low = v[half * 2], high = v[half * 2 + 1];
#pragma unroll
    for (i32 m = 0; m < kRowTiles; m++) {
      if constexpr (Stored<T>::kBytes == 2) {
        mma(T{}, out[m][pair * 2 + half], weights[m], low, high);
      } else {
        const i32 n = pair * 4 + half * 2;
        mma(F16{}, out[m][n], weights[m], two_of_four<0, 2>(T{}, low), two_of_four<0, 2>(T{}, high));
        mma(F16{}, out[m][n + 1], weights[m], two_of_four<1, 3>(T{}, low), two_of_four<1, 3>(T{}, high));
      }
    }
  }
}

// Where results are. Of rows g (half 0) and g + 8 (half 1) of a 16-row tile a lane has, for i from 0 to kHeadDim / 8, the
// pair of elements dim and dim + 1. Values of FP8 come from load_matrices_transposed two by two, which spreads neighbours
// over two accumulators.
template <class T>
PKV_DEV i32 dim_of_pair(i32 i, i32 lane) {
  if constexpr (Stored<T>::kBytes == 2) return i * 8 + lane % 4 * 2;
  return i / 2 * 16 + lane % 4 * 4 + i % 2 * 2;
}

template <class T, i32 kOutTiles>
PKV_DEV f32x2 pair_of(const float (&out)[kOutTiles][4], i32 i, i32 half) {
  if constexpr (Stored<T>::kBytes == 2) return {out[i][half * 2], out[i][half * 2 + 1]};
  return {out[i / 2 * 2][half * 2 + i % 2], out[i / 2 * 2 + 1][half * 2 + i % 2]};
}
