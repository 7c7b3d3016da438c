// The vocabulary of all kernels. A kernel file includes headers of this folder and nothing else, and it reaches
// global memory by the functions below only, so that checks and counters can stand behind these names.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using i64 = long long;

#define PKV_DEV __device__ __forceinline__

// A kernel's only parameter: one struct by value, which lies in constant memory and is never copied.
#define PKV_PARAM const __grid_constant__

// A pointer to global memory without `*` and `[]`.
template <class T>
struct G {
  T* address;
  PKV_DEV G operator+(i64 elements) const { return {address + elements}; }
};

// The type that moves N bytes in one instruction; their address is a multiple of N.
template <int N> struct Vector;
template <> struct Vector<1> { using type = u8; };
template <> struct Vector<2> { using type = u16; };
template <> struct Vector<4> { using type = u32; };
template <> struct Vector<8> { using type = uint2; };
template <> struct Vector<16> { using type = uint4; };

// Reads what nobody writes while the kernel runs.
template <class T>
PKV_DEV T load(G<const T> from) {
  return __ldg(from.address);
}

template <class T>
PKV_DEV T load_as(G<const u8> from) {
  return __ldg(reinterpret_cast<const T*>(from.address));
}

// Reads what the kernel itself writes elsewhere or later.
template <class T>
PKV_DEV T load_written_as(G<u8> from) {
  return *reinterpret_cast<const T*>(from.address);
}

template <class T>
PKV_DEV void store_as(G<u8> to, T value) {
  *reinterpret_cast<T*>(to.address) = value;
}
