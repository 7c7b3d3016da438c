// Where the keys or the values of a token lie in a paged cache. The one place that turns a slot into an address.
#pragma once
#include "device.cuh"

// A slot is block * block_size + offset.
struct Place {
  i64 block;
  i32 offset;
};

PKV_DEV Place place_of(i64 slot, i32 block_size) {
  const i64 block = slot / block_size;
  return {block, static_cast<i32>(slot - block * block_size)};
}

// K or V of one layer, (num_blocks, num_kv_heads, block_size, head_dim), in elements. The last dimension is
// contiguous, the others are as far apart as their owner wants: a layer of a pool in which each block holds all its
// layers, a pool with the layer outermost, a token-major cache of another engine. K and V have a layout each.
struct KVLayout {
  i64 block_stride, head_stride, slot_stride;

  // Offset of the row of head_dim elements. 64 bits throughout: a block id times the stride of a block that holds
  // many layers passes 2^31 within a few thousand blocks.
  PKV_DEV i64 row(Place place, i32 head) const {
    return place.block * block_stride + head * head_stride + place.offset * slot_stride;
  }
};

// A factor for all KV heads (stride 0) or each (stride 1); 1 where there is none.
PKV_DEV float scale_of(G<const float> scales, i32 stride, i32 kv_head) {
  return scales ? load(scales + static_cast<i64>(kv_head) * stride) : 1.f;
}
