// What each function of the vocabulary that computes gives for inputs from outside: one warp, a function per launch. A
// GPU and the host must agree on it, so it is compiled for both.
//
//   in   32 lanes x 16 words
//   out  32 lanes x 4 words
#include "device.cuh"

struct VocabularyParams {
  G<u8> out;
  G<const u8> in;
  i32 function;
};

enum Function {
  kMmaF16, kMmaBF16, kLoadMatrices, kLoadMatricesTransposed, kPackF16, kPackBF16, kUnpackF16, kUnpackBF16,
  kPermuteBytes, kExp2, kLog2, kReciprocal, kMaximum, kMultiplyAdd, kShuffle, kShuffleXor, kAnyInWarp, kBitCount,
  kE4M3, kNumFunctions,
};

constexpr i32 kInWords = 16, kOutWords = 4, kWordBytes = 4, kRowBytes = 16;

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

PKV_DEV void apply(i32 function, const u32 (&in)[kInWords], u32 (&out)[kOutWords], i32 lane) {
  const float x = float_of(in[0]), y = float_of(in[1]), z = float_of(in[2]);
  switch (function) {
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
    case kShuffle: out[0] = shuffle(in[0], in[1] & 31); return;
    case kShuffleXor: out[0] = bits_of(shuffle_xor(x, 5)); return;
    case kAnyInWarp: out[0] = any_in_warp(in[0] & 1); return;
    case kBitCount: out[0] = bit_count(in[0]); return;
    case kE4M3:
      if constexpr (kConvertsFp8) out[0] = e4m3x2_to_f16x2(in[0] & 0xffff);
      return;
    default: return;
  }
}

extern "C" __global__ void __launch_bounds__(32) vocabulary(PKV_PARAM VocabularyParams p) {
  const i32 lane = threadIdx.x;
  u32 in[kInWords], out[kOutWords] = {0, 0, 0, 0};
  for (i32 i = 0; i < kInWords; i++) in[i] = load_as<u32>(p.in + (lane * kInWords + i) * kWordBytes);
  apply(p.function, in, out, lane);
  for (i32 i = 0; i < kOutWords; i++) store_as(p.out + (lane * kOutWords + i) * kWordBytes, out[i]);
}
