// Stored element types: their bytes, and how four bytes of FP8 become float16.
//
// FP8 is multiplied as float16, which holds every e4m3 and e5m2. Without a conversion instruction an e4m3's bits are moved
// to their places in a float16, which then is 2^-8 times the number: kFactor makes up for it, outside of the loop. e5m2
// is the upper byte of a float16. Infinities and NaN stay what they are.
#pragma once
#include "device.cuh"

template <class T> struct Stored;
template <> struct Stored<F32> { static constexpr i32 kBytes = 4; };
template <> struct Stored<F16> {
  static constexpr i32 kBytes = 2;
  static constexpr float kFactor = 1.f;
  using Math = F16;
};
template <> struct Stored<BF16> {
  static constexpr i32 kBytes = 2;
  static constexpr float kFactor = 1.f;
  using Math = BF16;
};
template <> struct Stored<E4M3> {
  static constexpr i32 kBytes = 1;
  static constexpr float kFactor = kConvertsFp8 ? 1.f : 256.f;
  using Math = F16;
};
template <> struct Stored<E5M2> {
  static constexpr i32 kBytes = 1;
  static constexpr float kFactor = 1.f;
  using Math = F16;
};

// Two float16 from two of four bytes; kFirst and kSecond say which.
template <i32 kFirst, i32 kSecond>
PKV_DEV u32 two_of_four(E5M2, u32 four) {
  return permute_bytes(four, 0, kSecond << 12 | 4 << 8 | kFirst << 4 | 4);
}

// Without the instruction: the bits in their places, 2^-8 times the numbers.
template <i32 kFirst, i32 kSecond>
PKV_DEV u32 two_of_four_by_bits(E4M3, u32 four) {
  const u32 high = permute_bytes(four, 0, kSecond << 12 | 4 << 8 | kFirst << 4 | 4);
  const u32 numbers = (high & 0x80008000u) | ((high >> 1) & 0x3f803f80u);
  // The one NaN, 0x7f, would be 480: a byte's sign bit is set here where it is that, and is spread over 16 bits.
  const u32 is_nan = (four & 0x7f7f7f7fu) + 0x01010101u;
  return numbers | permute_bytes(is_nan, 0, 0x8888 | kSecond << 12 | kSecond << 8 | kFirst << 4 | kFirst);
}

template <i32 kFirst, i32 kSecond>
PKV_DEV u32 two_of_four(E4M3, u32 four) {
  if constexpr (kConvertsFp8) {
    return e4m3x2_to_f16x2(permute_bytes(four, 0, 0x4400 | kSecond << 4 | kFirst));
  } else {
    return two_of_four_by_bits<kFirst, kSecond>(E4M3{}, four);
  }
}
