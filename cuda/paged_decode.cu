// paged_decode: attention of few query rows per sequence over a paged cache, the keys of long sequences cut into pieces.
//
//   parameters   AttentionParams (include/attention.cuh): arrays, shapes, strides
//   a block      one work item (at most 16 query rows of a sequence, a range of keys) under one KV head;
//                grid.x = items * num_kv_heads, or more
//   rows         queries times query heads of the KV head: all of them share each key and value that is read
//
// Variants: PKV_HEAD_DIM 64, 128, 192 or 256, head_dim rounded up; PKV_Q F16 or BF16; PKV_KV the same, E4M3 or E5M2;
// PKV_FEATURES 0: causal alone, 1: and window, ALiBi, soft cap, sinks, tree mask; PKV_WARPS, PKV_STAGES: the shape;
// PKV_BLOCKS: so many blocks have registers on a multiprocessor. Unless told, ptxas spends 234 for sm_100 and sm_120 where
// 168 do, or spills at 96.
//
// The warps of a block are on their own until its end. Each takes every PKV_WARPS-th run of 16 keys, has a ring of
// PKV_STAGES stages of its own that cp.async fills, and keeps softmax and results of the 16 rows; only then are the results
// of the warps joined. So nothing waits at a barrier between the first byte and the last, and a block has
// (PKV_STAGES - 1) * PKV_WARPS * 32 rows of K and V under way: 64 KiB at 128 elements of 16 bits.
// The products are 16x8x16 on the tensor cores, rows on their long side. Shared memory: Shared::kBytes.
#include "queries.cuh"
#include "results.cuh"

using Q = PKV_Q;
using KV = PKV_KV;
using Math = Stored<KV>::Math;
constexpr i32 kHeadDim = PKV_HEAD_DIM;
constexpr bool kAllFeatures = PKV_FEATURES != 0;
constexpr i32 kWarps = PKV_WARPS;
constexpr i32 kThreads = kWarps * kWarpSize;
constexpr i32 kStages = PKV_STAGES;
constexpr i32 kRows = 16;
constexpr i32 kWarpKeys = 16;
constexpr i32 kSteps = kHeadDim / 16;
constexpr i32 kOutTiles = kHeadDim / 8;
// The queries' fragments take 64 registers at 256 elements, which then are read again for every tile.
constexpr bool kQueriesInRegisters = kHeadDim < 256;

using KeyTile = Tile<KV, kHeadDim>;

struct Shared {
  static constexpr u32 kTile = kWarpKeys * KeyTile::kRowBytes;
  static constexpr u32 kStage = kWarps * 2 * kTile;
  static constexpr u32 kPlaces = kStages * kStage;             // per warp, where the rows of two tiles lie
  static constexpr u32 kExponents = kPlaces + kWarps * 32 * 16;
  static constexpr u32 kOwnQueries = kExponents + kRows * 4;
  // Queries that go on to registers are staged where the last stage will be.
  static constexpr u32 kQueries = kQueriesInRegisters ? (kStages - 1) * kStage : kOwnQueries;
  static constexpr u32 kBytes = kOwnQueries + (kQueriesInRegisters ? 0 : kRows * kHeadDim * 2);
  // After the loop the stages make room for the warps' results.
  static constexpr u32 kOutRow = kHeadDim * 4 + 32;
  static constexpr u32 kTotals = kWarps * kRows * kOutRow;
  static_assert(kTotals + kWarps * kRows * 8 <= kPlaces, "the results of all warps fit where the stages were");
  static_assert(kRows * kHeadDim * 2 <= kStage, "the queries fit into a stage");
};
static_assert(Shared::kBytes == PKV_SHARED_BYTES, "the launcher asks for as many");

// What a warp loads: runs of 16 keys, from its first one in steps of all warps' keys.
struct KeyStream {
  i32 first_key, end_key, num_tiles;
  i32 block;  // of one key of the next two tiles to be loaded, the first of an even number
};

PKV_DEV i32 first_key_of(const KeyStream& keys, i32 tile) { return keys.first_key + tile * (kWarps * kWarpKeys); }

// Reads the block ids of the keys of `tile` and the next tile, one per lane, and none for a key behind the end.
PKV_DEV i32 find_blocks(const AttentionParams& p, const WorkItem& item, const KeyStream& keys, i32 tile, i32 lane) {
  const i32 key = first_key_of(keys, tile + lane / kWarpKeys) + lane % kWarpKeys;
  if (key >= keys.end_key) return 0;
  return load(p.block_table + (static_cast<i64>(item.table_row) * p.table_row_stride + key / p.block_size));
}

// Begins to load a tile into its stage; there may be none left. Called for all tiles in turn.
PKV_DEV void load_tile(const AttentionParams& p, const WorkItem& item, i32 kv_head, KeyStream& keys, i32 tile, i32 warp,
                       i32 lane) {
  const smem_t places = Shared::kPlaces + warp * (32 * 16);
  if (tile % 2 == 0) {
    const i32 key = first_key_of(keys, tile + lane / kWarpKeys) + lane % kWarpKeys;
    const Place place = {keys.block, key % p.block_size};
    sync_warp();
    store_shared(places + lane * 16, i64x2{p.k_layout.row(place, kv_head), p.v_layout.row(place, kv_head)});
    keys.block = find_blocks(p, item, keys, tile + 2, lane);
    sync_warp();
  }
  if (tile < keys.num_tiles) {
    const smem_t k_tile = tile % kStages * Shared::kStage + warp * (2 * Shared::kTile);
    const i32 row_bytes = p.head_dim * Stored<KV>::kBytes;
    const i32 num_rows = minimum(kWarpKeys, keys.end_key - first_key_of(keys, tile));
#pragma unroll
    for (i32 i = 0; i < kWarpKeys * KeyTile::kRowChunks / kWarpSize; i++) {
      const i32 row = (i * kWarpSize + lane) / KeyTile::kRowChunks, chunk = (i * kWarpSize + lane) % KeyTile::kRowChunks;
      const i64x2 place = load_shared<i64x2>(places + (tile % 2 * kWarpKeys + row) * 16);
      const smem_t to = KeyTile::at(k_tile, row, chunk);
      const i32 byte = chunk * 16;
      const G<const u8> k = p.k_cache + (place.x * Stored<KV>::kBytes + byte);
      const G<const u8> v = p.v_cache + (place.y * Stored<KV>::kBytes + byte);
      copy_chunk(p.copy_bytes, to, k, row < num_rows ? row_bytes - byte : 0);
      copy_chunk(p.copy_bytes, to + Shared::kTile, v, row < num_rows ? row_bytes - byte : 0);
    }
  }
}

// Folds a tile that has arrived into the rows' results.
template <class Query>
PKV_DEV void attend(const AttentionParams& p, const WorkItem& item, const RowRule (&rules)[2], smem_t k_tile, i32 first_key,
                    i32 lane, Query query, RowPair& rows, float (&out)[1][kOutTiles][4]) {
  float scores[1][2][4] = {};
#pragma unroll
  for (i32 pair = 0; pair < KeyTile::kRowChunks / 2; pair++) {
    add_scores<KV, kHeadDim, 1, 1>(scores, k_tile, 0, pair, lane, query);
  }
  make_scores<kAllFeatures>(p, item, rules, scores[0], first_key, 0, lane, true);
  soften(scores[0], rows, out[0]);
  u32 weights[1][4];
  weight_fragment<Math>(weights[0], scores[0][0], scores[0][1]);
#pragma unroll
  for (i32 pair = 0; pair < KeyTile::kRowChunks / 2; pair++) {
    add_values<KV, kHeadDim, 1>(out, weights, k_tile + Shared::kTile, 0, pair, lane);
  }
}

// Puts what a warp has of the rows where the stages were.
PKV_DEV void leave_results(const RowPair& rows, const float (&out)[kOutTiles][4], i32 warp, i32 lane) {
#pragma unroll
  for (i32 half = 0; half < 2; half++) {
    const i32 row = warp * kRows + half * 8 + lane / 4;
    const float sum = quad_sum(rows.sum[half]);
    if (lane % 4 == 0) store_shared(Shared::kTotals + row * 8, f32x2{rows.base[half], sum});
#pragma unroll
    for (i32 i = 0; i < kOutTiles; i++) {
      store_shared(row * Shared::kOutRow + dim_of_pair<KV>(i, lane) * 4, pair_of<KV>(out, i, half));
    }
  }
}

// Joins the warps' results: a thread takes two neighbouring elements of a row at a time.
PKV_DEV void join_results(const AttentionParams& p, const WorkItem& item, i32 kv_head) {
  constexpr i32 kPairs = kHeadDim / 2;
  const float v_scale = scale_of(p.v_scale, p.v_scale_stride, kv_head) * Stored<KV>::kFactor;
  for (i32 i = threadIdx.x; i < item.num_rows * kPairs; i += kThreads) {
    const i32 row = i / kPairs, dim = i % kPairs * 2;
    if (dim >= p.head_dim) continue;
    RowTotal total = {minus_infinity(), 0.f};
#pragma unroll
    for (i32 warp = 0; warp < kWarps; warp++) {
      total.base = maximum(total.base, load_shared<f32x2>(Shared::kTotals + (warp * kRows + row) * 8).x);
    }
    f32x2 sum = {0.f, 0.f};
#pragma unroll
    for (i32 warp = 0; warp < kWarps; warp++) {
      const f32x2 part = load_shared<f32x2>(Shared::kTotals + (warp * kRows + row) * 8);
      const f32x2 pair = load_shared<f32x2>((warp * kRows + row) * Shared::kOutRow + dim * 4);
      const float factor = part.x == minus_infinity() ? 0.f : exp2_approx(part.x - total.base);
      total.sum += part.y * factor;
      sum.x += pair.x * factor;
      sum.y += pair.y * factor;
    }
    sum = {sum.x * v_scale, sum.y * v_scale};
    if (item.partial_row >= 0) {
      store_partial(p, item, kv_head, row, dim, total, sum);
    } else {
      store_whole<Q, kAllFeatures>(p, item, kv_head, row, dim, total, sum);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, PKV_BLOCKS) paged_decode(PKV_PARAM AttentionParams p) {
  WorkItem item;
  i32 kv_head;
  if (!find_work(p, item, kv_head)) return;
  const i32 warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;

  const i32 first_key = item.first_key + warp * kWarpKeys;
  const i32 num_keys = maximum(item.end_key - first_key, 0);
  KeyStream keys = {first_key, item.end_key, (num_keys + kWarps * kWarpKeys - 1) / (kWarps * kWarpKeys), 0};
  keys.block = find_blocks(p, item, keys, 0, lane);
#pragma unroll
  for (i32 tile = 0; tile < kStages - 1; tile++) {
    load_tile(p, item, kv_head, keys, tile, warp, lane);
    copy_async_commit();
  }

  stage_queries<Q, KV, kHeadDim, kRows, kThreads>(p, item, kv_head, Shared::kQueries, Shared::kExponents);
  sync_block();  // the queries are there
  u32 fragments[kQueriesInRegisters ? kSteps : 1][4];
  if constexpr (kQueriesInRegisters) {
#pragma unroll
    for (i32 step = 0; step < kSteps; step++) {
      load_query_fragment<Math, kHeadDim>(fragments[step], Shared::kQueries, 0, step, lane);
    }
    sync_block();  // every warp has them, and the last stage is free
  }
  const auto query = [&](u32(&a)[4], i32, i32 step) {
    if constexpr (kQueriesInRegisters) {
#pragma unroll
      for (i32 i = 0; i < 4; i++) a[i] = fragments[step][i];
    } else {
      load_query_fragment<Math, kHeadDim>(a, Shared::kQueries, 0, step, lane);
    }
  };
  const float scale = p.softmax_scale * scale_of(p.k_scale, p.k_scale_stride, kv_head) * Stored<KV>::kFactor;
  RowRule rules[2];
#pragma unroll
  for (i32 half = 0; half < 2; half++) {
    const i32 row = half * 8 + lane / 4;
    const float of_row = rescaled_by<Q, KV>(Shared::kExponents, row);
    rules[half] = row_rule<kAllFeatures>(p, item, kv_head, row, scale * of_row);
  }

  RowPair rows;
  float out[1][kOutTiles][4] = {};
  for (i32 tile = 0; tile < keys.num_tiles; tile++) {
    copy_async_wait<kStages - 2>();
    sync_warp();  // the tile is there, and the stage of the tile before is free
    load_tile(p, item, kv_head, keys, tile + kStages - 1, warp, lane);
    copy_async_commit();
    const smem_t k_tile = tile % kStages * Shared::kStage + warp * (2 * Shared::kTile);
    attend(p, item, rules, k_tile, first_key_of(keys, tile), lane, query, rows, out);
  }
  copy_async_wait<0>();
  sync_block();  // no warp needs the stages
  leave_results(rows, out[0], warp, lane);
  sync_block();  // all results are there
  join_results(p, item, kv_head);
}
