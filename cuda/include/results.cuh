// A finished row: its normalisation, and where its elements go.
#pragma once
#include "online_softmax.cuh"

// What the weights of a row's keys are relative to, and their sum.
struct RowTotal {
  float base, sum;
};

// Lets the sink, a score without a value, have its share of a row that sees a key.
PKV_DEV RowTotal with_sink(const AttentionParams& p, RowTotal row, i32 q_head) {
  if (!p.sinks || row.sum == 0.f) return row;
  const float sink = number_of(p.sinks, p.sinks_type, q_head) * kLog2E;
  const float base = maximum(row.base, sink);
  return {base, row.sum * exp2_approx(row.base - base) + exp2_approx(sink - base)};
}

// The factor of what was summed up relative to `base`; 0 for a row that saw no key.
PKV_DEV float normaliser(RowTotal row, float base) {
  return row.sum == 0.f ? 0.f : exp2_approx(base - row.base) / row.sum;
}

// The natural logarithm of the sum of exponentials.
PKV_DEV float lse_of(RowTotal row) { return row.sum == 0.f ? minus_infinity() : (row.base + log2_approx(row.sum)) * kLn2; }

// Row `row` of an item in the workspace, where rows of all KV heads lie side by side.
template <class Item>
PKV_DEV i64 partial_index(const AttentionParams& p, const Item& item, i32 kv_head, i32 row) {
  return static_cast<i64>(item.partial_row + row) * p.num_kv_heads + kv_head;
}

template <class Item>
PKV_DEV i64 out_offset(const AttentionParams& p, const Item& item, QueryRow at) {
  return static_cast<i64>(item.first_token + at.query) * p.out_token_stride + at.q_head * p.out_head_stride;
}

template <class Item>
PKV_DEV void store_lse(const AttentionParams& p, const Item& item, QueryRow at, float lse) {
  if (p.lse) store(p.lse + (static_cast<i64>(item.first_token + at.query) * p.lse_token_stride + at.q_head), lse);
}

// Stores elements `dim` and `dim + 1` of a row that has all its keys, its logarithm beside the first ones. `pair` was summed
// up relative to the total's base.
template <class Out, bool kHasSinks, class Item>
PKV_DEV void store_whole(const AttentionParams& p, const Item& item, i32 kv_head, i32 row, i32 dim, RowTotal total,
                         f32x2 pair) {
  const QueryRow at = query_row(p, item, kv_head, row);
  const RowTotal whole = kHasSinks ? with_sink(p, total, at.q_head) : total;
  const float factor = normaliser(whole, total.base);
  store_as(p.out + (out_offset(p, item, at) + dim) * 2, pack(Out{}, pair.x * factor, pair.y * factor));
  if (dim == 0) store_lse(p, item, at, lse_of(whole));
}

// The same of a row whose other keys other items have: normalised, to the workspace.
PKV_DEV void store_partial(const AttentionParams& p, const WorkItem& item, i32 kv_head, i32 row, i32 dim, RowTotal total,
                           f32x2 pair) {
  const i64 index = partial_index(p, item, kv_head, row);
  const float factor = normaliser(total, total.base);
  store_as(p.partial_out + (index * p.head_dim + dim) * 4, f32x2{pair.x * factor, pair.y * factor});
  if (dim == 0) store(p.partial_lse + index, lse_of(total));
}
