// What a query row sees, and how its products with keys become scores: in base 2, so that weights are exp2.
#pragma once
#include "attention.cuh"

PKV_DEV float minus_infinity() { return float_of(0xff800000u); }

// In place of "no window" and "no first key": below every position.
constexpr i32 kAnywhere = -(1 << 30);

// Of one row. In a draft tree keys of the step are seen by bits, and count as successive positions.
struct RowRule {
  i32 first_key, end_key;  // the keys among which it sees some; of a tree, all from first_key on that the bits say
  float scale;             // of the product; with log2(e) in it where there are no features
  // Read only where kAllFeatures is set:
  i32 position;
  i32 window_start;        // the first position in the window
  i32 mask_row;            // the row's first word in tree_mask, or -1
  float slope;             // times log2(e)
};

// The rule of a row; of one beyond the item's rows, that it sees nothing. `scale` makes a product natural units.
template <bool kAllFeatures>
PKV_DEV RowRule row_rule(const AttentionParams& p, const WorkItem& item, i32 kv_head, i32 row, float scale) {
  if (row >= item.num_rows) return {0, 0, 0.f, 0, 0, -1, 0.f};
  const QueryRow at = query_row(p, item, kv_head, row);
  if constexpr (!kAllFeatures) {
    return {0, minimum(item.end_key, item.context_len + at.query + 1), scale * kLog2E, 0, 0, -1, 0.f};
  }
  const bool is_tree = item.mask_start >= 0;
  const i32 position = item.context_len + (is_tree ? load(p.tree_depths + (item.depth_start + at.query)) : at.query);
  const i32 window_start = p.sliding_window > 0 ? position + 1 - p.sliding_window : kAnywhere;
  const i32 mask_row = is_tree ? item.mask_start + at.query * item.mask_row_words : -1;
  const float slope = p.alibi_slopes ? number_of(p.alibi_slopes, p.slopes_type, at.q_head) * kLog2E : 0.f;
  const i32 first_key = is_tree ? minimum(window_start, item.context_len) : window_start;
  const i32 end_key = is_tree ? item.end_key : minimum(item.end_key, position + 1);
  return {first_key, end_key, scale, position, window_start, mask_row, slope};
}

PKV_DEV bool sees_tree_key(const AttentionParams& p, const RowRule& rule, i32 query_of_key, i32 context_len) {
  const G<const u32> row = p.tree_mask + rule.mask_row;
  const i32 word = query_of_key / 32;
  const u32 bits = load(row + word);
  const u32 bit = 1u << query_of_key % 32;
  if ((bits & bit) == 0) return false;
  if (p.sliding_window == 0) return true;
  i32 before = bit_count(bits & (bit - 1));
  for (i32 i = 0; i < word; i++) before += bit_count(load(row + i));
  return context_len + before >= rule.window_start;
}

// cap * tanh(x / cap) by the exponential: as exact as float32 lets a score be, which tanh.approx is not.
PKV_DEV float capped(float x, float cap) {
  return cap * (1.f - 2.f * reciprocal_approx(exp2_approx(x * (2.f * kLog2E / cap)) + 1.f));
}

// The score of a product of a query and a key; minus infinity where the row does not see the key.
template <bool kAllFeatures>
PKV_DEV float score_of(const AttentionParams& p, const WorkItem& item, const RowRule& rule, float product, i32 key) {
  if constexpr (!kAllFeatures) return key < rule.end_key ? product * rule.scale : minus_infinity();
  if (key < rule.first_key || key >= rule.end_key) return minus_infinity();
  i32 position = key;
  if (rule.mask_row >= 0 && key >= item.context_len) {
    const i32 query_of_key = key - item.context_len;
    if (!sees_tree_key(p, rule, query_of_key, item.context_len)) return minus_infinity();
    if (p.alibi_slopes) position = item.context_len + load(p.tree_depths + (item.depth_start + query_of_key));
  }
  float score = product * rule.scale;
  if (p.soft_cap > 0.f) score = capped(score, p.soft_cap);
  return multiply_add(rule.slope, static_cast<float>(position - rule.position), score * kLog2E);
}
