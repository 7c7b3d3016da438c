// How a thread of append_kv and gather_kv moves its share of a row: as it is, by vectors, or number by number.
//
// PKV_VECTOR_BYTES above 0: both sides have one type, and a vector of so many bytes, which divides every address and every
// stride in bytes, is moved. 0: types differ, and PKV_ELEMENTS elements, 8 or 1, are converted; 8 where they divide
// head_dim and all strides, and 16 bytes, or all eight elements where they are fewer, divide the addresses.
#pragma once
#include "numbers.cuh"

constexpr bool kConverts = PKV_VECTOR_BYTES == 0;
constexpr i32 kMovedBytes = kConverts ? 1 : PKV_VECTOR_BYTES;  // what is not used has a type too
constexpr i32 kConverted = kConverts ? PKV_ELEMENTS : 1;
static_assert(kConverts == (PKV_ELEMENTS > 0), "elements are converted or vectors moved");

PKV_DEV i32 elements_moved(i32 type) { return kConverts ? kConverted : kMovedBytes / bytes_of_type(type); }

// Stores `factor` times what is there, or what is there over `divisor`; both are 1 where no number is made.
PKV_DEV void move_elements(G<u8> to, i32 to_type, G<const u8> from, i32 from_type, float factor, float divisor) {
  if constexpr (kConverts) {
    Numbers<kConverted> numbers = load_numbers<kConverted>(from, from_type);
#pragma unroll
    for (i32 i = 0; i < kConverted; i++) numbers.value[i] = numbers.value[i] * factor / divisor;
    store_numbers<kConverted>(to, to_type, numbers);
  } else {
    store_as(to, load_as<typename Vector<kMovedBytes>::type>(from));
  }
}

// Calls move(head, first element) for each share that a thread of kThreads has of a token's rows.
template <i32 kThreads, class Move>
PKV_DEV void for_each_share(i32 type, i32 num_kv_heads, i32 head_dim, Move move) {
  const i32 share = elements_moved(type), row_shares = head_dim / share;
  for (i32 i = threadIdx.x; i < num_kv_heads * row_shares; i += kThreads) {
    const i32 head = i / row_shares;
    move(head, (i - head * row_shares) * share);
  }
}
