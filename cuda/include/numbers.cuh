// Elements of types that are known at run time: their bytes, and how they become another type.
#pragma once
#include "elements.cuh"

constexpr i32 kTypeF32 = 0, kTypeF16 = 1, kTypeBF16 = 2, kTypeE4M3 = 3, kTypeE5M2 = 4;

PKV_DEV i32 bytes_of_type(i32 type) { return type == kTypeF32 ? 4 : type <= kTypeBF16 ? 2 : 1; }

// N elements, 8 or 1, which lie in one vector or two.
template <i32 N> struct Numbers { float value[N]; };

template <class T>
PKV_DEV Numbers<8> unpack_8(T, u32x4 pairs) {
  const f32x2 a = unpack(T{}, pairs.x), b = unpack(T{}, pairs.y), c = unpack(T{}, pairs.z), d = unpack(T{}, pairs.w);
  return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
}

template <class T>
PKV_DEV Numbers<8> unpack_fp8(T, u32x2 eight) {
  Numbers<8> r = unpack_8(F16{}, {two_of_four<0, 1>(T{}, eight.x), two_of_four<2, 3>(T{}, eight.x),
                                  two_of_four<0, 1>(T{}, eight.y), two_of_four<2, 3>(T{}, eight.y)});
#pragma unroll
  for (i32 i = 0; i < 8; i++) r.value[i] *= Stored<T>::kFactor;
  return r;
}

template <i32 N>
PKV_DEV Numbers<N> load_numbers(G<const u8> from, i32 type) {
  if constexpr (N == 8) {
    if (type == kTypeF32) {
      const u32x4 a = load_as<u32x4>(from), b = load_as<u32x4>(from + 16);
      return {{float_of(a.x), float_of(a.y), float_of(a.z), float_of(a.w),
               float_of(b.x), float_of(b.y), float_of(b.z), float_of(b.w)}};
    }
    if (type == kTypeF16) return unpack_8(F16{}, load_as<u32x4>(from));
    if (type == kTypeBF16) return unpack_8(BF16{}, load_as<u32x4>(from));
    const u32x2 eight = load_as<u32x2>(from);
    return type == kTypeE4M3 ? unpack_fp8(E4M3{}, eight) : unpack_fp8(E5M2{}, eight);
  } else {
    if (type == kTypeF32) return {{load_as<float>(from)}};
    if (type == kTypeF16) return {{unpack(F16{}, load_as<u16>(from)).x}};
    if (type == kTypeBF16) return {{unpack(BF16{}, load_as<u16>(from)).x}};
    const u32x2 one = {load_as<u8>(from), 0};
    return {{type == kTypeE4M3 ? unpack_fp8(E4M3{}, one).value[0] : unpack_fp8(E5M2{}, one).value[0]}};
  }
}

// The nearest FP8, ties to even; the largest finite one beyond it, and NaN for NaN.
template <i32 kMantissaBits, i32 kBias>
PKV_DEV u32 encode_fp8(float value, float largest) {
  const u32 sign = bits_of(value) >> 24 & 0x80;
  if (value != value) return sign | 0x7f;
  const float size = magnitude(value) < largest ? magnitude(value) : largest;
  const i32 exponent = maximum(static_cast<i32>(bits_of(size) >> 23) - 127, 1 - kBias);
  // In units of the last place, which a subnormal shares with the smallest normal numbers. A sum with 2^23 is rounded to
  // whole units; a carry out of the mantissa is a carry into the exponent, as it should be.
  const float unit = float_of(static_cast<u32>(kMantissaBits - exponent + 127) << 23);
  const u32 units = bits_of(size * unit + 8388608.f) - bits_of(8388608.f);
  return sign | ((static_cast<u32>(exponent + kBias - 1) << kMantissaBits) + units);
}

PKV_DEV u32 encode_fp8(float value, i32 type) {
  return type == kTypeE4M3 ? encode_fp8<3, 7>(value, 448.f) : encode_fp8<2, 15>(value, 57344.f);
}

template <class T>
PKV_DEV u32x4 pack_8(T, const Numbers<8>& n) {
  return {pack(T{}, n.value[0], n.value[1]), pack(T{}, n.value[2], n.value[3]),
          pack(T{}, n.value[4], n.value[5]), pack(T{}, n.value[6], n.value[7])};
}

PKV_DEV u32 pack_fp8(const Numbers<8>& n, i32 first, i32 type) {
  u32 r = 0;
#pragma unroll
  for (i32 i = 0; i < 4; i++) r |= encode_fp8(n.value[first + i], type) << (8 * i);
  return r;
}

template <i32 N>
PKV_DEV void store_numbers(G<u8> to, i32 type, const Numbers<N>& n) {
  if constexpr (N == 8) {
    if (type == kTypeF32) {
      store_as(to, u32x4{bits_of(n.value[0]), bits_of(n.value[1]), bits_of(n.value[2]), bits_of(n.value[3])});
      store_as(to + 16, u32x4{bits_of(n.value[4]), bits_of(n.value[5]), bits_of(n.value[6]), bits_of(n.value[7])});
    } else if (type == kTypeF16) {
      store_as(to, pack_8(F16{}, n));
    } else if (type == kTypeBF16) {
      store_as(to, pack_8(BF16{}, n));
    } else {
      store_as(to, u32x2{pack_fp8(n, 0, type), pack_fp8(n, 4, type)});
    }
  } else {
    if (type == kTypeF32) {
      store_as(to, n.value[0]);
    } else if (type == kTypeF16) {
      store_as(to, static_cast<u16>(pack(F16{}, n.value[0], 0.f)));
    } else if (type == kTypeBF16) {
      store_as(to, static_cast<u16>(pack(BF16{}, n.value[0], 0.f)));
    } else {
      store_as(to, static_cast<u8>(encode_fp8(n.value[0], type)));
    }
  }
}
