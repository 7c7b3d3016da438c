// What each function of the vocabulary, and of the conversions made of it, gives for inputs from outside: one warp, a
// function per launch. A GPU and the host must agree on it, so it is compiled for both.
//
//   in   32 lanes x 16 words, aligned to 16 bytes
//   out  32 lanes x 4 words
//
// Shared memory: 512 bytes.
#include "numbers.cuh"

struct VocabularyParams {
  G<u32> out;
  G<const u32> in;
  i32 function;
};

enum Function {
  kMmaF16, kMmaBF16, kLoadMatrices, kLoadMatricesTransposed, kPackF16, kPackBF16, kUnpackF16, kUnpackBF16,
  kPermuteBytes, kExp2, kLog2, kReciprocal, kMaximum, kMultiplyAdd, kMagnitude, kIntegers, kShuffle, kShuffleXor,
  kAnyInWarp, kBitCount, kE4M3, kE4M3ByBits, kE5M2, kEncodeE4M3, kEncodeE5M2, kLoadWide, kLoadNarrow, kLoadAgain,
  kLoadWritten, kShared, kCopyAsync16, kCopyAsync8, kNumFunctions,
};

constexpr i32 kInWords = 16, kOutWords = 4, kWordBytes = 4, kRowBytes = 16, kHalfShared = 256;

// Registers a to d, words 0 to 3; b0 and b1 follow a, and d follows those.
template <class T>
PKV_DEV void product(const u32 (&in)[kInWords], u32 (&out)[kOutWords]) {
  const u32 a[4] = {in[0], in[1], in[2], in[3]};
  float d[4] = {float_of(in[6]), float_of(in[7]), float_of(in[8]), float_of(in[9])};
  mma(T{}, d, a, in[4], in[5]);
  for (i32 i = 0; i < 4; i++) out[i] = bits_of(d[i]);
}

// Each lane writes a row, and word 4 says which lane's row it names.
template <bool kTransposed>
PKV_DEV void matrices(const u32 (&in)[kInWords], u32 (&out)[kOutWords], i32 lane) {
  store_shared(lane * kRowBytes, u32x4{in[0], in[1], in[2], in[3]});
  sync_warp();
  const smem_t row = (in[4] & 31) * kRowBytes;
  if constexpr (kTransposed) load_matrices_transposed(out, row);
  else load_matrices(out, row);
}

PKV_DEV void put(u32 (&out)[kOutWords], i32 first, u32x2 words) {
  out[first] = words.x;
  out[first + 1] = words.y;
}

PKV_DEV void put(u32 (&out)[kOutWords], u32x4 words) {
  put(out, 0, u32x2{words.x, words.y});
  put(out, 2, u32x2{words.z, words.w});
}

// A lane's own words by loads of 8, 2 and 1 bytes.
PKV_DEV void load_narrow(G<const u8> own, u32 (&out)[kOutWords]) {
  put(out, 0, load_as<u32x2>(own + 8));
  out[2] = load_as<u16>(own + 2);
  out[3] = load_as<u8>(own + 5) | static_cast<u32>(load_as<u8>(own + 7)) << 8;
}

// Words 0 to 3 of the neighbour, or zeros where its word 8 is even.
PKV_DEV void copy_16(G<const u8> own, const u32 (&in)[kInWords], u32 (&out)[kOutWords], i32 lane) {
  copy_async<16>(lane * 16, own, in[8] & 1);
  copy_async_commit();
  copy_async_wait<0>();
  sync_warp();
  put(out, load_shared<u32x4>((lane ^ 1) * 16));
}

// Words 0 and 1 of the neighbour by a first group, 2 and 3 by a second one; words 8 and 9 say whether they are copied.
PKV_DEV void copy_8(G<const u8> own, const u32 (&in)[kInWords], u32 (&out)[kOutWords], i32 lane) {
  copy_async<8>(lane * 8, own, in[8] & 1);
  copy_async_commit();
  copy_async<8>(kHalfShared + lane * 8, own + 8, in[9] & 1);
  copy_async_commit();
  copy_async_wait<1>();
  sync_warp();
  put(out, 0, load_shared<u32x2>((lane ^ 1) * 8));
  copy_async_wait<0>();
  sync_warp();
  put(out, 2, load_shared<u32x2>(kHalfShared + (lane ^ 1) * 8));
}

// What the kernel itself wrote to global memory.
PKV_DEV void load_written(G<u8> own, const u32 (&in)[kInWords], u32 (&out)[kOutWords]) {
  store_as(own, u32x2{in[0], in[1]});
  store_as(own + 8, static_cast<u16>(in[2]));
  store_as(own + 10, static_cast<u8>(in[3]));
  put(out, 0, load_written_as<u32x2>(own));
  out[2] = load_written_as<u16>(own + 8);
  out[3] = load_written_as<u8>(own + 10);
}

// The neighbour's words, by stores of 8 and 4 bytes.
PKV_DEV void shared(const u32 (&in)[kInWords], u32 (&out)[kOutWords], i32 lane) {
  store_shared(lane * 8, u32x2{in[0], in[1]});
  store_shared(kHalfShared + lane * 4, in[2]);
  sync_block();
  put(out, 0, load_shared<u32x2>((lane ^ 1) * 8));
  out[2] = load_shared<u32>(kHalfShared + (lane ^ 1) * 4);
}

PKV_DEV void apply(const VocabularyParams& p, const u32 (&in)[kInWords], u32 (&out)[kOutWords], i32 lane) {
  const G<const u8> own = G<const u8>{reinterpret_cast<const u8*>(p.in.address)} + lane * kInWords * kWordBytes;
  const G<u8> own_out = G<u8>{reinterpret_cast<u8*>(p.out.address)} + lane * kOutWords * kWordBytes;
  const float x = float_of(in[0]), y = float_of(in[1]), z = float_of(in[2]);
  switch (p.function) {
    case kMmaF16: product<F16>(in, out); return;
    case kMmaBF16: product<BF16>(in, out); return;
    case kLoadMatrices: matrices<false>(in, out, lane); return;
    case kLoadMatricesTransposed: matrices<true>(in, out, lane); return;
    case kPackF16: out[0] = pack(F16{}, x, y); return;
    case kPackBF16: out[0] = pack(BF16{}, x, y); return;
    case kUnpackF16: {
      const f32x2 pair = unpack(F16{}, in[0]);
      out[0] = bits_of(pair.x);
      out[1] = bits_of(pair.y);
      return;
    }
    case kUnpackBF16: {
      const f32x2 pair = unpack(BF16{}, in[0]);
      out[0] = bits_of(pair.x);
      out[1] = bits_of(pair.y);
      return;
    }
    case kPermuteBytes: out[0] = permute_bytes(in[0], in[1], in[2]); return;
    case kExp2: out[0] = bits_of(exp2_approx(x)); return;
    case kLog2: out[0] = bits_of(log2_approx(x)); return;
    case kReciprocal: out[0] = bits_of(reciprocal_approx(x)); return;
    case kMaximum: out[0] = bits_of(maximum(x, y)); return;
    case kMultiplyAdd: out[0] = bits_of(multiply_add(x, y, z)); return;
    case kMagnitude: out[0] = bits_of(magnitude(x)); return;
    case kIntegers:
      out[0] = minimum(static_cast<i32>(in[0]), static_cast<i32>(in[1]));
      out[1] = maximum(static_cast<i32>(in[0]), static_cast<i32>(in[1]));
      return;
    case kShuffle: out[0] = shuffle(in[0], in[1] & 31); return;
    case kShuffleXor: out[0] = bits_of(shuffle_xor(x, 5)); return;
    case kAnyInWarp: out[0] = any_in_warp(in[0] & 1); return;
    case kBitCount: out[0] = bit_count(in[0]); return;
    case kE4M3:
      if constexpr (kConvertsFp8) out[0] = e4m3x2_to_f16x2(in[0] & 0xffff);
      return;
    case kE4M3ByBits:
      put(out, 0, u32x2{two_of_four_by_bits<0, 1>(E4M3{}, in[0]), two_of_four_by_bits<2, 3>(E4M3{}, in[0])});
      return;
    case kE5M2: put(out, 0, u32x2{two_of_four<0, 1>(E5M2{}, in[0]), two_of_four<2, 3>(E5M2{}, in[0])}); return;
    case kEncodeE4M3: out[0] = encode_fp8(x, kTypeE4M3); return;
    case kEncodeE5M2: out[0] = encode_fp8(x, kTypeE5M2); return;
    case kLoadWide: put(out, load_as<u32x4>(own)); return;
    case kLoadNarrow: load_narrow(own, out); return;
    case kLoadAgain: put(out, load_again_as<u32x4>(own + 16)); return;
    case kLoadWritten: load_written(own_out, in, out); return;
    case kShared: shared(in, out, lane); return;
    case kCopyAsync16: copy_16(own, in, out, lane); return;
    case kCopyAsync8: copy_8(own, in, out, lane); return;
    default: return;
  }
}

extern "C" __global__ void __launch_bounds__(32) vocabulary(PKV_PARAM VocabularyParams p) {
  const i32 lane = threadIdx.x;
  u32 in[kInWords], out[kOutWords] = {0, 0, 0, 0};
  for (i32 i = 0; i < kInWords; i++) in[i] = load(p.in + (lane * kInWords + i));
  apply(p, in, out, lane);
  for (i32 i = 0; i < kOutWords; i++) store(p.out + (lane * kOutWords + i), out[i]);
}
