// What a query row sees, and how its products with keys become scores. Scores are in base 2, so that weights are exp2.
#pragma once
#include "attention.cuh"

PKV_DEV float minus_infinity() { return float_of(0xff800000u); }

// The position of a row that sees nothing, because the item does not have so many.
constexpr i32 kNowhere = -(1 << 30);

// Of one row. The position of a token of a draft tree is as far behind the context as it sees other tokens of the tree.
struct RowRule {
  i32 position;
  float scale;  // of a product, to natural units
  float slope;  // of ALiBi, times log2(e); only where kAllFeatures is set
};

template <bool kAllFeatures>
PKV_DEV RowRule row_rule(const AttentionParams& p, const WorkItem& item, i32 kv_head, i32 row, float scale) {
  RowRule rule = {kNowhere, scale, 0.f};  // one scale for all rows, as a rule: then it is in one register
  if (row >= item.num_rows) return rule;
  const QueryRow at = query_row(p, item, kv_head, row);
  rule.position = item.context_len + at.query;
  if constexpr (kAllFeatures) {
    if (item.mask_start >= 0) rule.position = item.context_len + load(p.tree_depths + (item.depth_start + at.query));
    if (p.alibi_slopes) rule.slope = number_of(p.alibi_slopes, p.slopes_type, at.q_head) * kLog2E;
  }
  return rule;
}

// The keys among which a row sees some: all of them, unless they are of a tree, which then says it by bits.
struct KeyRange {
  i32 first, end;
};

template <bool kAllFeatures>
PKV_DEV KeyRange keys_of(const AttentionParams& p, const WorkItem& item, const RowRule& rule) {
  KeyRange keys = {0, minimum(item.end_key, rule.position + 1)};
  if constexpr (kAllFeatures) {
    const bool is_tree = item.mask_start >= 0 && rule.position != kNowhere;
    if (p.sliding_window > 0) keys.first = rule.position + 1 - p.sliding_window;
    if (is_tree) keys = {minimum(keys.first, item.context_len), item.end_key};
  }
  return keys;
}

// Whether a token of a tree sees another one, or itself. In a window seen tokens count as successive positions.
PKV_DEV bool sees_tree_key(const AttentionParams& p, const WorkItem& item, i32 position, G<const u32> mask_row, i32 query) {
  const i32 word = query / 32;
  const u32 bits = load(mask_row + word);
  const u32 bit = 1u << query % 32;
  if ((bits & bit) == 0) return false;
  if (p.sliding_window == 0) return true;
  i32 before = bit_count(bits & (bit - 1));
  for (i32 i = 0; i < word; i++) before += bit_count(load(mask_row + i));
  return item.context_len + before > position - p.sliding_window;
}

// cap * tanh(x / cap) by the exponential: as exact as float32 lets a score be, which tanh.approx is not.
PKV_DEV float capped(float x, float cap) {
  return cap * (1.f - 2.f * reciprocal_approx(exp2_approx(x * (2.f * kLog2E / cap)) + 1.f));
}

// Which of a lane's keys a row of a tree sees, a bit per key of kTiles tiles of 8, at lane_key and lane_key + 1 of each.
template <i32 kTiles>
PKV_DEV u32 seen_bits(const AttentionParams& p, const WorkItem& item, const RowRule& rule, i32 row, i32 lane_key) {
  static_assert(kTiles * 2 <= 32, "a bit for each key");
  u32 bits = 0;
  if (row >= item.num_rows) return bits;
  const i64 query = query_row(p, item, 0, row).query;
  const G<const u32> mask_row = p.tree_mask + (item.mask_start + query * item.mask_row_words);
#pragma unroll 1
  for (i32 i = 0; i < kTiles * 2; i++) {
    const i32 key = lane_key + i / 2 * 8 + i % 2;
    bool sees = key < item.context_len;
    if (!sees && key < item.end_key) sees = sees_tree_key(p, item, rule.position, mask_row, key - item.context_len);
    bits |= static_cast<u32>(sees) << i;
  }
  return bits;
}

// Adds slope * (position of the key - position of the query), and goes over to base 2.
template <i32 kTiles>
PKV_DEV void add_slopes(const AttentionParams& p, const WorkItem& item, const RowRule (&rules)[2], float (&scores)[kTiles][4],
                        i32 lane_key, bool has_tree_keys) {
#pragma unroll
  for (i32 n = 0; n < kTiles; n++) {
#pragma unroll
    for (i32 e = 0; e < 2; e++) {
      const i32 key = lane_key + n * 8 + e, query_of_key = key - item.context_len;
      i32 position = key;
      if (has_tree_keys && query_of_key >= 0 && key < item.end_key) {
        position = item.context_len + load(p.tree_depths + (item_again(p).depth_start + query_of_key));
      }
#pragma unroll
      for (i32 half = 0; half < 2; half++) {
        const float distance = static_cast<float>(position - rules[half].position);
        float& score = scores[n][half * 2 + e];
        score = multiply_add(rules[half].slope, distance, score * kLog2E);
      }
    }
  }
}

// Turns the products of rows first_row + g and first_row + g + 8 with kTiles * 8 keys from first_key on into scores, minus infinity where a row does
// not see a key. Where is_masked is false, it is known that all rows see all these keys, and that none is of a tree.
template <bool kAllFeatures, i32 kTiles>
PKV_DEV void make_scores(const AttentionParams& p, const WorkItem& item, const RowRule (&rules)[2],
                         float (&scores)[kTiles][4], i32 first_key, i32 first_row, i32 lane, bool is_masked) {
  const i32 lane_key = first_key + lane % 4 * 2;
#pragma unroll
  for (i32 n = 0; n < kTiles; n++) {
#pragma unroll
    for (i32 e = 0; e < 4; e++) scores[n][e] *= kAllFeatures ? rules[e / 2].scale : rules[e / 2].scale * kLog2E;
  }
  u32 seen[2] = {~0u, ~0u};
  if constexpr (kAllFeatures) {
    const bool has_tree_keys = item.mask_start >= 0 && is_masked && first_key + kTiles * 8 > item.context_len;
    if (p.soft_cap > 0.f) {
#pragma unroll
      for (i32 n = 0; n < kTiles; n++) {
#pragma unroll
        for (i32 e = 0; e < 4; e++) scores[n][e] = capped(scores[n][e], p.soft_cap);
      }
    }
    add_slopes(p, item, rules, scores, lane_key, has_tree_keys && p.alibi_slopes);
    if (has_tree_keys) {
      const WorkItem whole = item_again(p);
#pragma unroll
      for (i32 half = 0; half < 2; half++) {
        seen[half] = seen_bits<kTiles>(p, whole, rules[half], first_row + half * 8 + lane / 4, lane_key);
      }
    }
  }
  if (!is_masked) return;
#pragma unroll
  for (i32 half = 0; half < 2; half++) {
    const KeyRange keys = keys_of<kAllFeatures>(p, item, rules[half]);
#pragma unroll
    for (i32 i = 0; i < kTiles * 2; i++) {
      const i32 key = lane_key + i / 2 * 8 + i % 2;
      bool sees = key < keys.end;
      if constexpr (kAllFeatures) sees = sees && key >= keys.first && (seen[half] >> i & 1) != 0;
      if (!sees) scores[i / 2][half * 2 + i % 2] = minus_infinity();
    }
  }
}
