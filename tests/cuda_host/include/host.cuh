// The vocabulary of cuda/include/ptx.cuh on a CPU: the same names, each of them checked. device.cuh includes it where
// PKV_HOST names it.
#pragma once
#include <cmath>

#include "interface.h"
#include "numbers.h"

#define PKV_DEV inline
#define PKV_PARAM const
#define __global__
#define __launch_bounds__(...)

template <class T>
struct G {
  T* address;
  G operator+(i64 elements) const { return {address + elements}; }
  explicit operator bool() const { return address != nullptr; }
};

// ---- Numbers

inline u32 bits_of(float value) { return pkv_host::bits_as<u32>(value); }

inline float float_of(u32 bits) { return pkv_host::bits_as<float>(bits); }

inline float maximum(float a, float b) { return std::fmax(a, b); }

inline i32 minimum(i32 a, i32 b) { return a < b ? a : b; }

inline i32 maximum(i32 a, i32 b) { return a > b ? a : b; }

inline float magnitude(float value) { return std::fabs(value); }

inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

// The approximations are exact here, and flush what is subnormal as the hardware does.
inline float exp2_approx(float x) { return pkv_host::flush(std::exp2(pkv_host::flush(x))); }

inline float log2_approx(float x) { return std::log2(pkv_host::flush(x)); }

inline float reciprocal_approx(float x) { return pkv_host::flush(1.f / pkv_host::flush(x)); }

inline i32 bit_count(u32 bits) { return __builtin_popcount(bits); }

inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 both = static_cast<u64>(b) << 32 | a;
  u32 result = 0;
  for (u32 i = 0; i < 4; i++) {
    const u32 pick = selector >> (4 * i);
    const u32 byte = both >> (8 * (pick & 7)) & 0xff;
    result |= (pick & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);
  }
  return result;
}

inline u32 pack(F16, float first, float second) {
  return pkv_host::to_f16(first) | static_cast<u32>(pkv_host::to_f16(second)) << 16;
}

inline u32 pack(BF16, float first, float second) {
  return pkv_host::to_bf16(first) | static_cast<u32>(pkv_host::to_bf16(second)) << 16;
}

inline f32x2 unpack(F16, u32 pair) {
  return {pkv_host::from_f16(static_cast<u16>(pair)), pkv_host::from_f16(static_cast<u16>(pair >> 16))};
}

inline f32x2 unpack(BF16, u32 pair) { return {float_of(pair << 16), float_of(pair & 0xffff0000u)}; }

#ifndef PKV_CONVERTS_FP8
#define PKV_CONVERTS_FP8 1
#endif
constexpr bool kConvertsFp8 = PKV_CONVERTS_FP8;

inline u32 e4m3x2_to_f16x2(u32 pair) {
  const float first = pkv_host::from_e4m3(static_cast<u8>(pair)), second = pkv_host::from_e4m3(static_cast<u8>(pair >> 8));
  return pack(F16{}, first, second);
}

// ---- Global memory

template <class T>
T load_as(G<const u8> from, PKV_SITE) {
  pkv_host::check_global(from.address, sizeof(T), pkv_host::Access::kReadConstant, site);
  return *reinterpret_cast<const T*>(from.address);
}

template <class T>
T load_again_as(G<const u8> from, PKV_SITE) {
  pkv_host::check_global(from.address, sizeof(T), pkv_host::Access::kReadConstant, site);
  return *reinterpret_cast<const T*>(from.address);
}

template <class T>
T load(G<const T> from, PKV_SITE) {
  pkv_host::check_global(from.address, sizeof(T), pkv_host::Access::kReadConstant, site);
  return *from.address;
}

template <class T>
T load_written_as(G<u8> from, PKV_SITE) {
  pkv_host::check_global(from.address, sizeof(T), pkv_host::Access::kRead, site);
  return *reinterpret_cast<const T*>(from.address);
}

template <class T>
void store_as(G<u8> to, T value, PKV_SITE) {
  pkv_host::check_global(to.address, sizeof(T), pkv_host::Access::kWrite, site);
  *reinterpret_cast<T*>(to.address) = value;
}

template <class T, class V>
void store(G<T> to, V value, PKV_SITE) {
  pkv_host::check_global(to.address, sizeof(T), pkv_host::Access::kWrite, site);
  *to.address = value;
}

// ---- Shared memory

template <class T>
T load_shared(smem_t from, PKV_SITE) {
  T value;
  memcpy(&value, pkv_host::shared_at(from, sizeof(T), pkv_host::Access::kRead, site), sizeof(T));
  return value;
}

template <class T>
void store_shared(smem_t to, T value, PKV_SITE) {
  memcpy(pkv_host::shared_at(to, sizeof(T), pkv_host::Access::kWrite, site), &value, sizeof(T));
}

template <int N>
void copy_async(smem_t to, G<const u8> from, bool is_copied, PKV_SITE) {
  static_assert(N == 8 || N == 16, "a copy is of 8 or 16 bytes");
  pkv_host::copy_async(to, from.address, N, is_copied, site);
}

inline void copy_async_commit() { pkv_host::commit_async(); }

template <int N>
void copy_async_wait() {
  pkv_host::wait_async(N);
}

// ---- Warps and blocks

inline void sync_warp(PKV_SITE) { pkv_host::warp_barrier(site); }

inline void sync_block(PKV_SITE) { pkv_host::block_barrier(site); }

inline u32 shuffle(u32 value, i32 lane, PKV_SITE) { return pkv_host::shuffle(value, lane, site); }

inline float shuffle_xor(float value, i32 mask, PKV_SITE) {
  return float_of(pkv_host::shuffle(bits_of(value), pkv_host::lane_id() ^ mask, site));
}

inline bool any_in_warp(bool condition, PKV_SITE) { return pkv_host::vote(condition, site) != 0; }

inline void load_matrices(u32 (&r)[4], smem_t row, PKV_SITE) {
  const pkv_host::Words words = pkv_host::load_matrices(row, false, site);
  for (int i = 0; i < 4; i++) r[i] = words.word[i];
}

inline void load_matrices_transposed(u32 (&r)[4], smem_t row, PKV_SITE) {
  const pkv_host::Words words = pkv_host::load_matrices(row, true, site);
  for (int i = 0; i < 4; i++) r[i] = words.word[i];
}

namespace pkv_host {
inline void multiply_add(Half type, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site) {
  const Floats sum = multiply(type, {{d[0], d[1], d[2], d[3]}}, {{a[0], a[1], a[2], a[3]}}, b0, b1, site);
  for (int i = 0; i < 4; i++) d[i] = sum.value[i];
}
}  // namespace pkv_host

inline void mma(F16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, PKV_SITE) {
  pkv_host::multiply_add(pkv_host::Half::kF16, d, a, b0, b1, site);
}

inline void mma(BF16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, PKV_SITE) {
  pkv_host::multiply_add(pkv_host::Half::kBF16, d, a, b0, b1, site);
}
