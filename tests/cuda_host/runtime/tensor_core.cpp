// ldmatrix and mma.m16n8k16, as the PTX manual lays their fragments out. Sums are float32 in the order of k: the
// hardware's own rounding is not imitated.
#include <algorithm>

#include "meetings.h"
#include "numbers.h"

namespace pkv_host {
namespace {

constexpr u32 kBankGroups = 8;  // of 16 bytes: the 32 banks of 4 bytes
constexpr u32 kRowBytes = 16;

// A matrix has 8 rows of 16 bytes; lanes 8 i to 8 i + 7 brought the addresses of matrix i.
void load(Warp& warp, bool transposed) {
  state.counts.matrix_loads++;
  for (int i = 0; i < 4; i++) {
    u32 of_group[kBankGroups] = {};
    for (u32 row = 0; row < 8; row++) of_group[warp.in[i * 8 + row][0] / kRowBytes % kBankGroups]++;
    state.counts.bank_conflicts += *std::max_element(of_group, of_group + kBankGroups) - 1;
    for (u32 lane = 0; lane < 32; lane++) {
      u16 pair[2];
      for (u32 half = 0; half < 2; half++) {
        const u32 row = transposed ? lane % 4 * 2 + half : lane / 4;
        const u32 column = transposed ? lane / 4 : lane % 4 * 2 + half;
        memcpy(&pair[half], state.shared + warp.in[i * 8 + row][0] + column * sizeof(u16), sizeof(u16));
      }
      warp.out[lane][i] = pair[0] | static_cast<u32>(pair[1]) << 16;
    }
  }
}

// A is 16 x 16 by rows, B 16 x 8 by columns, two elements in a register, the lower half first.
template <float (*From)(u16)>
void multiply_warp(Warp& warp) {
  state.counts.products++;
  float a[16][16], b[16][8], sum[16][8] = {};
  auto half = [](u32 word, u32 h) { return From(static_cast<u16>(word >> (16 * h))); };
  for (u32 lane = 0; lane < 32; lane++) {
    const u32 group = lane / 4, pair = lane % 4 * 2;
    for (u32 i = 0; i < 4; i++)
      for (u32 h = 0; h < 2; h++) a[group + i % 2 * 8][pair + i / 2 * 8 + h] = half(warp.in[lane][i], h);
    for (u32 i = 0; i < 2; i++)
      for (u32 h = 0; h < 2; h++) b[pair + i * 8 + h][group] = half(warp.in[lane][4 + i], h);
  }
  for (u32 row = 0; row < 16; row++)
    for (u32 k = 0; k < 16; k++)
      for (u32 column = 0; column < 8; column++) sum[row][column] += a[row][k] * b[k][column];
  for (u32 lane = 0; lane < 32; lane++)
    for (u32 i = 0; i < 4; i++) {
      const float before = bits_as<float>(warp.in[lane][6 + i]);
      warp.out[lane][i] = bits_as<u32>(before + sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
}

}  // namespace

Words load_matrices(u32 shared_offset, bool transposed, Site site) {
  Fiber& fiber = this_fiber();
  Warp& warp = warp_of(fiber);
  const u32 lane = fiber.thread % 32;
  shared_at(shared_offset, kRowBytes, Access::kRead, site);
  warp.in[lane][0] = shared_offset;
  meet(Meeting::kLoadMatrices, site, [=](Warp& warp) { load(warp, transposed); });
  Words words;
  memcpy(&words, warp.out[lane], sizeof words);
  return words;
}

Floats multiply(Half type, Floats sum, Words a, u32 b0, u32 b1, Site site) {
  Fiber& fiber = this_fiber();
  Warp& warp = warp_of(fiber);
  const u32 lane = fiber.thread % 32;
  u32* in = warp.in[lane];
  memcpy(in, &a, sizeof a);
  in[4] = b0;
  in[5] = b1;
  memcpy(in + 6, &sum, sizeof sum);
  if (type == Half::kBF16) meet(Meeting::kMultiply, site, multiply_warp<from_bf16>);
  else meet(Meeting::kMultiply, site, multiply_warp<from_f16>);
  memcpy(&sum, warp.out[lane], sizeof sum);
  return sum;
}

}  // namespace pkv_host
