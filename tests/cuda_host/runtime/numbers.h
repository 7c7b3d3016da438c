// Element types in plain arithmetic, rounded to nearest, ties to even.
#pragma once
#include <algorithm>
#include <cmath>

#include "interface.h"

namespace pkv_host {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

inline float flush(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.f, value) : value; }

inline float from_bf16(u16 bits) { return bits_as<float>(static_cast<u32>(bits) << 16); }
inline u16 to_bf16(float value) {
  const u32 bits = bits_as<u32>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // the NaN that the hardware gives
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_f16(u16 bits) { return static_cast<float>(bits_as<_Float16>(bits)); }
inline u16 to_f16(float value) {
  return std::isnan(value) ? 0x7fff : bits_as<u16>(static_cast<_Float16>(value));
}

// FP8. e4m3 has no infinity, and NaN only where all seven bits are set; e5m2 is the upper half of a float16.
inline float from_e4m3(u8 bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  float value = exponent ? std::ldexp(8.f + fraction, exponent - 10) : std::ldexp(static_cast<float>(fraction), -9);
  if ((bits & 0x7f) == 0x7f) value = NAN;
  return bits & 0x80 ? -value : value;
}
inline float from_e5m2(u8 bits) { return from_f16(static_cast<u16>(bits << 8)); }

// Saturating, as cvt.rn.satfinite does: what is too large becomes the largest number, infinity too.
inline u8 to_fp8(float value, int fraction_bits, int bias, float largest, u8 nan) {
  const u8 sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return nan;
  const float magnitude = std::fmin(std::fabs(value), largest);
  if (magnitude == 0) return sign;
  int exponent;
  std::frexp(magnitude, &exponent);                       // magnitude < 2^exponent
  const int lowest = std::max(exponent - 1, 1 - bias);     // exponent of the number's own binade, or the subnormals'
  const float steps = std::nearbyint(std::ldexp(magnitude, fraction_bits - lowest));
  const int code = static_cast<int>(steps) + ((lowest + bias - 1) << fraction_bits);
  return sign | static_cast<u8>(code);
}
inline u8 to_e4m3(float value) { return to_fp8(value, 3, 7, 448.f, 0x7f); }
inline u8 to_e5m2(float value) { return to_fp8(value, 2, 15, 57344.f, 0x7f); }

}  // namespace pkv_host
