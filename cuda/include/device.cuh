// The vocabulary of all kernels. A kernel file includes headers of this folder and nothing else, it has no `#if`, and it
// reaches global and shared memory, other threads and the tensor cores by these names only. So the same source runs on a
// GPU, where the names are inline PTX (ptx.cuh), and on a CPU, where the header that PKV_HOST names, with its quotes, has a
// test's implementation of them that checks and counts. The one switch between the two is at the end of this file.
//
// Beside these names a kernel uses of CUDA: threadIdx.x, blockIdx.x, gridDim.x, __global__ and __launch_bounds__.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct alignas(8) u32x2 {
  u32 x, y;
};
struct alignas(16) u32x4 {
  u32 x, y, z, w;
};
struct alignas(8) f32x2 {
  float x, y;
};
struct alignas(16) i64x2 {
  i64 x, y;
};

// Element types, as tags.
struct F32 {};
struct F16 {};
struct BF16 {};
struct E4M3 {};
struct E5M2 {};

// Bytes from the start of the block's shared memory, all of which is dynamic.
using smem_t = u32;

constexpr i32 kWarpSize = 32;

// The type that moves N bytes in one instruction; their address is a multiple of N.
template <int N> struct Vector;
template <> struct Vector<1> { using type = u8; };
template <> struct Vector<2> { using type = u16; };
template <> struct Vector<4> { using type = u32; };
template <> struct Vector<8> { using type = u32x2; };
template <> struct Vector<16> { using type = u32x4; };

#ifdef PKV_HOST
#include PKV_HOST
#else
#include "ptx.cuh"
#endif

template <class T>
PKV_DEV G<const T> read_only(G<T> pointer) {
  return {pointer.address};
}
