// The softmax of rows whose scores come tile by tile, in base 2.
//
// A row has a base that its weights are relative to, exp2(score - base), and their sum. The base follows the largest score
// only when that has risen by kRise since: until then weights are at most 2^kRise, exact all the same, and the results need
// not be rescaled. What happens to a row depends on the row alone.
#pragma once
#include "scores.cuh"

constexpr float kRise = 8.f;

// Rows g and g + 8 of a 16-row tile, as mma has them: the four lanes of a quad share a row.
struct RowPair {
  float base[2] = {minus_infinity(), minus_infinity()};
  float sum[2] = {0.f, 0.f};  // the lane's own share
};

PKV_DEV float quad_maximum(float value) {
  value = maximum(value, shuffle_xor(value, 1));
  return maximum(value, shuffle_xor(value, 2));
}

PKV_DEV float quad_sum(float value) {
  value += shuffle_xor(value, 1);
  return value + shuffle_xor(value, 2);
}

// Turns scores into weights, and rescales `out` where a base rises.
template <i32 kTiles, i32 kOutTiles>
PKV_DEV void soften(float (&scores)[kTiles][4], RowPair& rows, float (&out)[kOutTiles][4]) {
  float largest[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
  for (i32 n = 0; n < kTiles; n++) {
#pragma unroll
    for (i32 e = 0; e < 4; e++) largest[e / 2] = maximum(largest[e / 2], scores[n][e]);
  }
  if (any_in_warp(largest[0] > rows.base[0] + kRise || largest[1] > rows.base[1] + kRise)) {
    float factor[2];
#pragma unroll
    for (i32 half = 0; half < 2; half++) {
      const float all = quad_maximum(largest[half]);
      const bool rises = all > rows.base[half] + kRise;
      factor[half] = rises ? exp2_approx(rows.base[half] - all) : 1.f;
      if (rises) rows.base[half] = all;
      rows.sum[half] *= factor[half];
    }
#pragma unroll
    for (i32 n = 0; n < kOutTiles; n++) {
#pragma unroll
      for (i32 e = 0; e < 4; e++) out[n][e] *= factor[e / 2];
    }
  }
  // A row that has seen nothing has no base: all its scores are minus infinity, and its weights are to be 0.
  const float base[2] = {rows.base[0] == minus_infinity() ? 0.f : rows.base[0],
                         rows.base[1] == minus_infinity() ? 0.f : rows.base[1]};
#pragma unroll
  for (i32 n = 0; n < kTiles; n++) {
#pragma unroll
    for (i32 e = 0; e < 4; e++) {
      scores[n][e] = exp2_approx(scores[n][e] - base[e / 2]);
      rows.sum[e / 2] += scores[n][e];
    }
  }
}

// The weights of 16 keys as an a-fragment.
template <class Math>
PKV_DEV void weight_fragment(u32 (&a)[4], const float (&first)[4], const float (&second)[4]) {
  a[0] = pack(Math{}, first[0], first[1]);
  a[1] = pack(Math{}, first[2], first[3]);
  a[2] = pack(Math{}, second[0], second[1]);
  a[3] = pack(Math{}, second[2], second[3]);
}
