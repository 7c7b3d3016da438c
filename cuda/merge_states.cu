// merge_states: joins the results of two attentions of the same queries over different keys.
//
//   out, out_a, out_b  (num_tokens, num_q_heads, head_dim) of one type, float32, float16 or bfloat16, token and head strided;
//                      head_dim and strides are multiples of 8, addresses of 16 bytes
//   lse, lse_a, lse_b  (num_tokens, num_q_heads) float32, token strided: natural logarithms of sums of exponentials
//
// A state without keys, its lse minus infinity, has no part in the result, whatever its elements are.
// Mapping: a thread has eight elements of a row, a block as many rows of one token as it has threads for;
// grid.x = num_tokens * (num_q_heads * head_dim / 8 / 128, rounded up), so that 32 bits divide. No shared memory.
#include "numbers.cuh"

constexpr i32 kThreads = 128;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct MergeStatesParams {
  G<u8> out;
  G<float> lse;
  G<const u8> out_a, out_b;
  G<const float> lse_a, lse_b;
  i32 num_tokens, num_q_heads, head_dim, type;
  i64 out_token_stride, out_head_stride, a_token_stride, a_head_stride, b_token_stride, b_head_stride;  // elements
  i64 lse_token_stride, lse_a_token_stride, lse_b_token_stride;
};
static_assert(sizeof(MergeStatesParams) == 136, "the launcher packs the same bytes");

extern "C" __global__ void __launch_bounds__(kThreads) merge_states(PKV_PARAM MergeStatesParams p) {
  const i32 row_shares = p.head_dim / 8;
  const i32 token_blocks = (p.num_q_heads * row_shares + kThreads - 1) / kThreads;
  const i32 token_index = static_cast<i32>(blockIdx.x) / token_blocks;
  const i32 share = (static_cast<i32>(blockIdx.x) - token_index * token_blocks) * kThreads + static_cast<i32>(threadIdx.x);
  const i32 head_index = share / row_shares;
  if (token_index >= p.num_tokens || head_index >= p.num_q_heads) return;
  const i64 token = token_index, head = head_index, dim = (share - head_index * row_shares) * 8;

  const float a = load(p.lse_a + (token * p.lse_a_token_stride + head)) * kLog2E;
  const float b = load(p.lse_b + (token * p.lse_b_token_stride + head)) * kLog2E;
  const float base = maximum(a, b), nothing = float_of(0xff800000u);
  const float weight_a = a == nothing ? 0.f : exp2_approx(a - base);
  const float weight_b = b == nothing ? 0.f : exp2_approx(b - base);
  const float sum = weight_a + weight_b;

  const i64 bytes = bytes_of_type(p.type);
  Numbers<8> result = {};
  if (weight_a != 0.f) {
    const i64 at = token * p.a_token_stride + head * p.a_head_stride + dim;
    const Numbers<8> numbers = load_numbers<8>(p.out_a + at * bytes, p.type);
#pragma unroll
    for (i32 i = 0; i < 8; i++) result.value[i] += numbers.value[i] * (weight_a / sum);
  }
  if (weight_b != 0.f) {
    const i64 at = token * p.b_token_stride + head * p.b_head_stride + dim;
    const Numbers<8> numbers = load_numbers<8>(p.out_b + at * bytes, p.type);
#pragma unroll
    for (i32 i = 0; i < 8; i++) result.value[i] += numbers.value[i] * (weight_b / sum);
  }
  store_numbers<8>(p.out + (token * p.out_token_stride + head * p.out_head_stride + dim) * bytes, p.type, result);
  if (dim == 0) {
    store(p.lse + (token * p.lse_token_stride + head), sum == 0.f ? nothing : (base + log2_approx(sum)) * kLn2);
  }
}
