// paged_prefill: attention of many query rows per sequence over a paged cache; a work list may mix sequences of any kind.
//
//   parameters   AttentionParams (include/attention.cuh): arrays, shapes, strides
//   a block      one work item (at most kRows query rows of a sequence, a range of keys) under one KV head;
//                grid.x = items * num_kv_heads, or more
//   rows         queries times query heads of the KV head: all of them share each key and value that is read
//
// Variants: PKV_HEAD_DIM, PKV_Q, PKV_KV and PKV_FEATURES as for paged_decode; PKV_ROW_TILES, 16-row tiles of a warp;
// PKV_KEYS, keys of a tile, and PKV_STEP_KEYS, those that are computed at a time: as many as registers have room for.
//
// As in FlashAttention-2 a warp has rows of its own and goes through all keys: the products of queries and keys, their
// softmax and the results stay in registers, and a tile of weights is an operand as it stands. With two row tiles a
// fragment of keys or values is used twice, which halves the reads of shared memory per product. Keys and values of the
// next tile arrive by cp.async while this one is computed; one barrier per tile. Tiles that a warp's rows do not see are
// skipped, and those that they see whole are not masked. Shared memory: Shared::kBytes.
#include "queries.cuh"
#include "results.cuh"

using Q = PKV_Q;
using KV = PKV_KV;
using Math = Stored<KV>::Math;
constexpr i32 kHeadDim = PKV_HEAD_DIM;
constexpr bool kAllFeatures = PKV_FEATURES != 0;
constexpr i32 kWarps = 4;
constexpr i32 kThreads = kWarps * kWarpSize;
constexpr i32 kRowTiles = PKV_ROW_TILES;
constexpr i32 kWarpRows = kRowTiles * 16;
constexpr i32 kRows = kWarps * kWarpRows;
constexpr i32 kKeys = PKV_KEYS;
constexpr i32 kStepKeys = PKV_STEP_KEYS;  // whose scores are in registers at a time
constexpr i32 kKeyTiles = kStepKeys / 16;
constexpr i32 kOutTiles = kHeadDim / 8;

using KeyTile = Tile<KV, kHeadDim>;
using QueryTile = Tile<Math, kHeadDim>;
static_assert(kKeys <= kThreads && kKeys * KeyTile::kRowChunks % kThreads == 0, "threads share the loads of a tile evenly");

struct Shared {
  static constexpr u32 kTile = kKeys * KeyTile::kRowBytes;
  static constexpr u32 kStage = 2 * kTile;
  static constexpr u32 kQueries = 2 * kStage;                              // and then the results
  static constexpr u32 kPlaces = kQueries + kRows * QueryTile::kRowBytes;  // where the rows of two tiles lie
  static constexpr u32 kExponents = kPlaces + 2 * kKeys * 16;
  static constexpr u32 kBytes = kExponents + kRows * 4;
};
static_assert(Shared::kBytes == PKV_SHARED_BYTES, "the launcher asks for as many");

// Reads the block id of this thread's key of a tile, and none for a key behind the end.
PKV_DEV i32 find_block(const AttentionParams& p, const WorkItem& item, i32 tile) {
  const i32 key = item.first_key + tile * kKeys + static_cast<i32>(threadIdx.x);
  if (threadIdx.x >= kKeys || key >= item.end_key) return 0;
  return load(p.block_table + (static_cast<i64>(item.table_row) * p.table_row_stride + key / p.block_size));
}

// Says where the rows of a tile lie; a barrier must follow.
PKV_DEV void leave_places(const AttentionParams& p, const WorkItem& item, i32 kv_head, i32 tile, i32 block) {
  if (threadIdx.x >= kKeys) return;
  const i32 key = item.first_key + tile * kKeys + static_cast<i32>(threadIdx.x);
  const Place place = {block, key % p.block_size};
  store_shared(Shared::kPlaces + (tile % 2 * kKeys + threadIdx.x) * 16,
               i64x2{p.k_layout.row(place, kv_head), p.v_layout.row(place, kv_head)});
}

PKV_DEV void load_tile(const AttentionParams& p, const WorkItem& item, i32 tile) {
  const smem_t k_tile = tile % 2 * Shared::kStage;
  const i32 row_bytes = p.head_dim * Stored<KV>::kBytes;
  const i32 num_rows = item.end_key - item.first_key - tile * kKeys;
#pragma unroll 2  // more addresses at once only take registers from the products
  for (i32 i = 0; i < kKeys * KeyTile::kRowChunks / kThreads; i++) {
    const i32 at = i * kThreads + static_cast<i32>(threadIdx.x);
    const i32 row = at / KeyTile::kRowChunks, chunk = at % KeyTile::kRowChunks;
    const i64x2 place = load_shared<i64x2>(Shared::kPlaces + (tile % 2 * kKeys + row) * 16);
    const smem_t to = KeyTile::at(k_tile, row, chunk);
    const i32 byte = chunk * 16;
    const i32 bytes = row < num_rows ? row_bytes - byte : 0;
    copy_chunk(p.copy_bytes, to, p.k_cache + (place.x * Stored<KV>::kBytes + byte), bytes);
    copy_chunk(p.copy_bytes, to + Shared::kTile, p.v_cache + (place.y * Stored<KV>::kBytes + byte), bytes);
  }
}

// The keys that some rows of a warp see, and those that all of them see.
struct WarpKeys {
  i32 first, end;
  i32 first_of_all, end_of_all;
};

PKV_DEV WarpKeys keys_of_warp(const AttentionParams& p, const WorkItem& item, i32 kv_head, i32 first_row) {
  const i32 last_row = minimum(first_row + kWarpRows, item.num_rows) - 1;
  if (last_row < first_row) return {0, 0, 0, 0};
  if (kAllFeatures && item.mask_start >= 0) {
    return {item.first_key, item.end_key, item.first_key, p.sliding_window > 0 ? 0 : item.context_len};
  }
  const KeyRange first = keys_of<kAllFeatures>(p, item, row_rule<kAllFeatures>(p, item, kv_head, first_row, 0.f));
  const KeyRange last = keys_of<kAllFeatures>(p, item, row_rule<kAllFeatures>(p, item, kv_head, last_row, 0.f));
  return {first.first, last.end, last.first, first.end};
}

// Folds kStepKeys keys, from row key_row of a tile on, into a warp's results.
PKV_DEV void attend(const AttentionParams& p, const WorkItem& item, const RowRule (&rules)[kRowTiles][2], smem_t k_tile,
                    i32 key_row, i32 first_key, bool is_masked, i32 first_row, i32 lane, RowPair (&rows)[kRowTiles],
                    float (&out)[kRowTiles][kOutTiles][4]) {
  float scores[kRowTiles][kKeyTiles * 2][4] = {};
  const auto query = [&](u32(&a)[4], i32 m, i32 step) {
    load_query_fragment<Math, kHeadDim>(a, Shared::kQueries, first_row + m * 16, step, lane);
  };
#pragma unroll
  for (i32 pair = 0; pair < KeyTile::kRowChunks / 2; pair++) {
    add_scores<KV, kHeadDim, kRowTiles, kKeyTiles>(scores, k_tile, key_row, pair, lane, query);
  }
#pragma unroll
  for (i32 m = 0; m < kRowTiles; m++) {
    make_scores<kAllFeatures>(p, item, rules[m], scores[m], first_key, first_row + m * 16, lane, is_masked);
    soften(scores[m], rows[m], out[m]);
  }
#pragma unroll
  for (i32 t = 0; t < kKeyTiles; t++) {
    u32 weights[kRowTiles][4];
#pragma unroll
    for (i32 m = 0; m < kRowTiles; m++) weight_fragment<Math>(weights[m], scores[m][t * 2], scores[m][t * 2 + 1]);
#pragma unroll
    for (i32 pair = 0; pair < KeyTile::kRowChunks / 2; pair++) {
      add_values<KV, kHeadDim, kRowTiles>(out, weights, k_tile + Shared::kTile, key_row + t * 16, pair, lane);
    }
  }
}

// Stores rows whose keys are cut, as pairs of elements.
PKV_DEV void store_partial_row(const AttentionParams& p, const WorkItem& item, i32 kv_head, i32 row, RowTotal total,
                               float v_scale, const float (&out)[kOutTiles][4], i32 half, i32 lane) {
  if (row >= item.num_rows) return;
#pragma unroll
  for (i32 i = 0; i < kOutTiles; i++) {
    const i32 dim = dim_of_pair<KV>(i, lane);
    const f32x2 pair = pair_of<KV>(out, i, half);
    if (dim < p.head_dim) {
      store_partial(p, item, kv_head, row, dim, total, {pair.x * v_scale, pair.y * v_scale});
    }
  }
}

// Puts a row into the tile of the warp's queries, which nobody needs any more, to be stored 16 bytes at a time.
PKV_DEV void leave_row(const AttentionParams& p, const WorkItem& item, i32 kv_head, i32 first_row, i32 row, RowTotal total,
                       float v_scale, const float (&out)[kOutTiles][4], i32 half, i32 lane) {
  const QueryRow at = query_row(p, item, kv_head, row);
  const bool exists = row < item.num_rows;
  const RowTotal whole = kAllFeatures && exists ? with_sink(p, total, at.q_head) : total;
  const float factor = normaliser(whole, total.base) * v_scale;
#pragma unroll
  for (i32 i = 0; i < kOutTiles; i++) {
    const i32 dim = dim_of_pair<KV>(i, lane);
    const f32x2 pair = pair_of<KV>(out, i, half);
    const smem_t to = QueryTile::at(Shared::kQueries, row, dim / 8) + dim % 8 * 2;
    store_shared(to, pack(Q{}, pair.x * factor, pair.y * factor));
  }
  if (exists && lane % 4 == 0) store_lse(p, item, at, lse_of(whole));
}

PKV_DEV void store_rows(const AttentionParams& p, const WorkItem& item, i32 kv_head, i32 first_row, i32 lane) {
  for (i32 i = lane; i < kWarpRows * QueryTile::kRowChunks; i += kWarpSize) {
    const i32 row = first_row + i / QueryTile::kRowChunks, chunk = i % QueryTile::kRowChunks;
    if (row >= item.num_rows || chunk * 8 >= p.head_dim) continue;
    const i64 offset = out_offset(p, item, query_row(p, item, kv_head, row)) + chunk * 8;
    store_as(p.out + offset * 2, load_shared<u32x4>(QueryTile::at(Shared::kQueries, row, chunk)));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) paged_prefill(PKV_PARAM AttentionParams p) {
  WorkItem item;
  i32 kv_head;
  if (!find_work(p, item, kv_head)) return;
  const i32 warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const i32 first_row = warp * kWarpRows;
  const i32 num_tiles = (item.end_key - item.first_key + kKeys - 1) / kKeys;

  leave_places(p, item, kv_head, 0, find_block(p, item, 0));
  i32 next_block = find_block(p, item, 1);
  sync_block();  // it is known where the first tile lies
  if (num_tiles > 0) load_tile(p, item, 0);
  copy_async_commit();
  stage_queries<Q, KV, kHeadDim, kRows, kThreads>(p, item, kv_head, Shared::kQueries, Shared::kExponents);
  const WarpKeys seen = keys_of_warp(p, item, kv_head, first_row);

  RowRule rules[kRowTiles][2];
  RowPair rows[kRowTiles];
  float out[kRowTiles][kOutTiles][4] = {};
  sync_block();  // the queries are there
  const float scale = p.softmax_scale * scale_of(p.k_scale, p.k_scale_stride, kv_head) * Stored<KV>::kFactor;
#pragma unroll
  for (i32 m = 0; m < kRowTiles; m++) {
#pragma unroll
    for (i32 half = 0; half < 2; half++) {
      const i32 row = first_row + m * 16 + half * 8 + lane / 4;
      rules[m][half] = row_rule<kAllFeatures>(p, item, kv_head, row, scale * rescaled_by<Q, KV>(Shared::kExponents, row));
    }
  }
  for (i32 tile = 0; tile < num_tiles; tile++) {
    leave_places(p, item, kv_head, tile + 1, next_block);
    next_block = find_block(p, item, tile + 2);
    copy_async_wait<0>();
    sync_block();  // the tile is there, it is known where the next one lies, and the stage of the one before is free
    if (tile + 1 < num_tiles) load_tile(p, item, tile + 1);
    copy_async_commit();
    const i32 first_key = item.first_key + tile * kKeys;
    if (first_key >= seen.end || first_key + kKeys <= seen.first) continue;
    const smem_t k_tile = tile % 2 * Shared::kStage;
#pragma unroll 1
    for (i32 row = 0; row < kKeys; row += kStepKeys) {
      const i32 key = first_key + row;
      const bool is_masked = key < seen.first_of_all || key + kStepKeys > seen.end_of_all;
      attend(p, item, rules, k_tile, row, key, is_masked, first_row, lane, rows, out);
    }
  }
  copy_async_wait<0>();

  item = item_again(p);
  kv_head = static_cast<i32>(blockIdx.x % p.num_kv_heads);
  const float v_scale = scale_of(p.v_scale, p.v_scale_stride, kv_head) * Stored<KV>::kFactor;
  sync_warp();  // the warp needs its queries no more
#pragma unroll
  for (i32 m = 0; m < kRowTiles; m++) {
#pragma unroll
    for (i32 half = 0; half < 2; half++) {
      const i32 row = first_row + m * 16 + half * 8 + lane / 4;
      const RowTotal total = {rows[m].base[half], quad_sum(rows[m].sum[half])};
      if (item.partial_row >= 0) {
        store_partial_row(p, item, kv_head, row, total, v_scale, out[m], half, lane);
      } else {
        leave_row(p, item, kv_head, first_row, row, total, v_scale, out[m], half, lane);
      }
    }
  }
  if (item.partial_row >= 0) return;
  sync_warp();  // the rows are there
  store_rows(p, item, kv_head, first_row, lane);
}
