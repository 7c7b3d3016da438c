// The vocabulary in CUDA and inline PTX, for sm_80 and later. Included by device.cuh, which has the types.
#pragma once

#define PKV_DEV __device__ __forceinline__

// A kernel's only parameter: one struct by value, which lies in constant memory and is never copied.
#define PKV_PARAM const __grid_constant__

extern __shared__ __align__(128) u8 pkv_shared_memory[];

// A pointer to global memory without `*` and `[]`.
template <class T>
struct G {
  T* address;
  PKV_DEV G operator+(i64 elements) const { return {address + elements}; }
  PKV_DEV explicit operator bool() const { return address != nullptr; }
};

// ---- Numbers

PKV_DEV u32 bits_of(float value) { return __float_as_uint(value); }

PKV_DEV float float_of(u32 bits) { return __uint_as_float(bits); }

// fmaxf: of a NaN and a number, the number.
PKV_DEV float maximum(float a, float b) { return fmaxf(a, b); }

PKV_DEV i32 minimum(i32 a, i32 b) { return min(a, b); }

PKV_DEV i32 maximum(i32 a, i32 b) { return max(a, b); }

PKV_DEV float magnitude(float value) { return fabsf(value); }

PKV_DEV float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// To 2 units in the last place; 0 for -inf, and results below 2^-126 are 0.
PKV_DEV float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

PKV_DEV float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// To 1 unit in the last place; 0 for inf.
PKV_DEV float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

PKV_DEV i32 bit_count(u32 bits) { return __popc(bits); }

// Byte i of the result is byte `selector >> 4 * i & 7` of b:a, a the lower half; with the selector's bit 3 set, that
// byte's sign bit eight times.
PKV_DEV u32 permute_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// Two elements in 32 bits, the first one in the lower half; to nearest even, an overflow is inf.
PKV_DEV u32 pack(F16, float first, float second) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}

PKV_DEV u32 pack(BF16, float first, float second) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}

PKV_DEV f32x2 unpack(F16, u32 pair) {
  f32x2 r;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(r.x), "=f"(r.y) : "r"(pair));
  return r;
}

PKV_DEV f32x2 unpack(BF16, u32 pair) { return {float_of(pair << 16), float_of(pair & 0xffff0000u)}; }

// Whether the architecture converts FP8; elsewhere elements.cuh moves bits.
#if __CUDA_ARCH__ >= 890
constexpr bool kConvertsFp8 = true;
#else
constexpr bool kConvertsFp8 = false;
#endif

// The two lower bytes of `pair`, exactly; NaN stays NaN. Only where kConvertsFp8.
PKV_DEV u32 e4m3x2_to_f16x2(u32 pair) {
  u32 r;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a;}" : "=r"(r) : "r"(pair));
  return r;
}

// ---- Global memory. Addresses are multiples of the size of what is moved.

// Reads what nobody writes while the kernel runs.
template <class T>
PKV_DEV T load_as(G<const u8> from) {
  if constexpr (sizeof(T) == 16) {
    union { T value; u32 part[4]; } r;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(r.part[0]), "=r"(r.part[1]), "=r"(r.part[2]), "=r"(r.part[3]) : "l"(from.address));
    return r.value;
  } else if constexpr (sizeof(T) == 8) {
    union { T value; u32 part[2]; } r;
    asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(r.part[0]), "=r"(r.part[1]) : "l"(from.address));
    return r.value;
  } else {
    return __ldg(reinterpret_cast<const T*>(from.address));
  }
}

// The same for 16 bytes, in a place where the registers of an earlier load of them were better used for something else.
template <class T>
PKV_DEV T load_again_as(G<const u8> from) {
  static_assert(sizeof(T) == 16, "a load is of 16 bytes");
  union { T value; u32 part[4]; } r;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.part[0]), "=r"(r.part[1]), "=r"(r.part[2]), "=r"(r.part[3]) : "l"(from.address));
  return r.value;
}

template <class T>
PKV_DEV T load(G<const T> from) {
  return load_as<T>(G<const u8>{reinterpret_cast<const u8*>(from.address)});
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

template <class T, class V>
PKV_DEV void store(G<T> to, V value) {
  *to.address = value;
}

// ---- Shared memory. Addresses are multiples of the size of what is moved, 4, 8 or 16 bytes.

template <class T>
PKV_DEV T load_shared(smem_t from) {
  return *reinterpret_cast<const T*>(pkv_shared_memory + from);
}

template <class T>
PKV_DEV void store_shared(smem_t to, T value) {
  *reinterpret_cast<T*>(pkv_shared_memory + to) = value;
}

PKV_DEV u32 pkv_shared_address(smem_t at) { return static_cast<u32>(__cvta_generic_to_shared(pkv_shared_memory)) + at; }

// Begins to copy N bytes, 8 or 16, from global to shared memory, or to write as many zeros. What arrives is seen by the
// thread that began the copy after its wait, by others after a barrier behind that.
template <int N>
PKV_DEV void copy_async(smem_t to, G<const u8> from, bool is_copied) {
  const i32 bytes = is_copied ? N : 0;
  if constexpr (N == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(pkv_shared_address(to)), "l"(from.address), "r"(bytes) : "memory");
  } else {
    static_assert(N == 8, "a copy is of 8 or 16 bytes");
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;"
                 :: "r"(pkv_shared_address(to)), "l"(from.address), "r"(bytes) : "memory");
  }
}

// Ends a group of copies: all that this thread has begun since the last one.
PKV_DEV void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N groups of this thread are under way.
template <int N>
PKV_DEV void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

// ---- Warps and blocks. All lanes of a warp, all threads of a block take part.

PKV_DEV void sync_warp() { __syncwarp(); }

PKV_DEV void sync_block() { __syncthreads(); }

PKV_DEV float shuffle_xor(float value, i32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

PKV_DEV u32 shuffle(u32 value, i32 lane) { return __shfl_sync(0xffffffffu, value, lane); }

PKV_DEV bool any_in_warp(bool condition) { return __any_sync(0xffffffffu, condition) != 0; }

// Four 8x8 matrices of 16-bit elements. Lane i names the 16 bytes of row i % 8 of matrix i / 8; of each matrix it gets
// row i / 4, elements 2 * (i % 4) and the next one.
PKV_DEV void load_matrices(u32 (&r)[4], smem_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(pkv_shared_address(row)) : "memory");
}

// The same, transposed: of each matrix lane i gets column i / 4, elements 2 * (i % 4) and the next one.
PKV_DEV void load_matrices_transposed(u32 (&r)[4], smem_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(pkv_shared_address(row)) : "memory");
}

// d += a * b, a 16x16, b 16x8, d 16x8. With g = lane / 4 and c = 2 * (lane % 4), a lane has
//   a[0], a[1]: rows g and g + 8, columns c, c + 1;  a[2], a[3]: the same rows, columns c + 8, c + 9
//   b0: rows c, c + 1 of column g;  b1: rows c + 8, c + 9 of it
//   d[0], d[1]: row g, columns c, c + 1;  d[2], d[3]: row g + 8, the same columns
PKV_DEV void mma(F16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

PKV_DEV void mma(BF16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
