// The host's side of cuda/include/device.cuh: the same names, checked. It takes that file's place when tests compile a
// kernel with g++.
#pragma once
#include "interface.h"

#define PKV_DEV inline
#define PKV_PARAM const
#define __global__
#define __launch_bounds__(...)

template <class T>
struct G {
  T* address;
  G operator+(i64 elements) const { return {address + elements}; }
};

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };

template <int N> struct Vector;
template <> struct Vector<1> { using type = u8; };
template <> struct Vector<2> { using type = u16; };
template <> struct Vector<4> { using type = u32; };
template <> struct Vector<8> { using type = uint2; };
template <> struct Vector<16> { using type = uint4; };

template <class T>
T load(G<const T> from, PKV_SITE) {
  pkv_host::check_global(from.address, sizeof(T), pkv_host::Access::kReadConstant, site);
  return *from.address;
}

template <class T>
T load_as(G<const u8> from, PKV_SITE) {
  pkv_host::check_global(from.address, sizeof(T), pkv_host::Access::kReadConstant, site);
  return *reinterpret_cast<const T*>(from.address);
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
