// Right and wrong protocols, one per case, for the tests of the checks themselves. 64 threads; `in` and `out` have
// 64 floats each, shared memory is kSharedBytes.
#include "device.cuh"

struct ProbeParams {
  G<u8> out;
  G<const u8> in;
  i32 which;
};

enum Case {
  kBlockBarrier, kWarpBarrier, kShuffle, kVote, kCopyAsync, kCopyOfZeros, kTwoStages, kOwnWord, kBroadcast,
  kNoBarrier, kWeakBarrier, kShuffleAsBarrier, kOverwritten, kOverwrittenByCopy, kReadOfNothing, kSharedBeyond,
  kSharedMisaligned, kNoWait, kWeakWait, kNoCommit, kNoBarrierBehindWait, kCopyLeftBehind,
  kDivergentShuffle, kDivergentShuffleOnTwoLines, kShuffleOutside, kDivergentBarrier, kBarrierAfterExit, kGlobalBeyond,
  kGlobalMisaligned, kWriteOfInput, kTwoWriters, kTwoBlocks, kReadOfWritten, kConstantReadOfWritten, kOverflow,
  kBeyondLocalArray, kBeyondLocalPointer, kNumCases,
};

constexpr smem_t kHalf = 256;  // of shared memory: a float per thread
constexpr i32 kFloat = sizeof(float);

struct Thread {
  ProbeParams p;
  i32 id, lane, other_lane, other_warp;
  float own;
  G<u8> out;
  G<const u8> in;
};

PKV_DEV smem_t word(i32 thread) { return thread * kFloat; }

PKV_DEV float shared_case(const Thread& t) {
  if (t.p.which != kReadOfNothing) store_shared(word(t.id), t.own);
  switch (t.p.which) {
    case kBlockBarrier: sync_block(); return load_shared<float>(word(t.other_warp));
    case kWarpBarrier: sync_warp(); return load_shared<float>(word(t.other_lane));
    case kOwnWord: return load_shared<float>(word(t.id));
    case kNoBarrier: return load_shared<float>(word(t.other_lane));
    case kWeakBarrier: sync_warp(); return load_shared<float>(word(t.other_warp));
    case kShuffleAsBarrier: shuffle_xor(t.own, 1); return load_shared<float>(word(t.other_lane));
    case kReadOfNothing: return load_shared<float>(word(t.id));
    case kSharedBeyond: return load_shared<float>(word(t.id) + 2 * kHalf);
    case kSharedMisaligned: return load_shared<float>(word(t.id) + 2);
    default: break;
  }
  sync_block();  // kOverwritten: another one reads what the thread then writes
  const float read = load_shared<float>(word(t.other_warp));
  store_shared(word(t.id), read);
  return read;
}

PKV_DEV float copy_case(const Thread& t) {
  if (t.id % 4 == 0) copy_async<16>(word(t.id), t.in, t.p.which != kCopyOfZeros);
  if (t.p.which != kNoCommit) copy_async_commit();
  if (t.p.which == kTwoStages || t.p.which == kWeakWait) {
    if (t.id % 4 == 0) copy_async<16>(kHalf + word(t.id), t.in, true);
    copy_async_commit();
    copy_async_wait<1>();
  } else if (t.p.which != kNoWait && t.p.which != kCopyLeftBehind) {
    copy_async_wait<0>();
  }
  if (t.p.which == kCopyLeftBehind) return t.own;
  if (t.p.which != kNoBarrierBehindWait) sync_block();
  const float value = load_shared<float>(word(t.id) + (t.p.which == kWeakWait ? kHalf : 0));
  if (t.p.which == kTwoStages) copy_async_wait<0>();
  if (t.p.which == kOverwrittenByCopy) {
    if (t.id % 4 == 0) copy_async<16>(word(t.id), t.in, true);
    copy_async_commit();
    copy_async_wait<0>();
  }
  return value;
}

PKV_DEV float warp_case(const Thread& t) {
  switch (t.p.which) {
    case kVote: return any_in_warp(t.id == 33) ? 1.f : 0.f;
    case kDivergentShuffle:
      if (t.lane < 16) return shuffle_xor(t.own, 1);
      return t.own;
    case kDivergentShuffleOnTwoLines:
      if (t.lane < 16) return shuffle_xor(t.own, 1);
      return shuffle_xor(t.own, 2);
    case kShuffleOutside: return float_of(shuffle(bits_of(t.own), 32));
    case kDivergentBarrier:
      if (t.id < 32) sync_block();
      else
        sync_block();
      return t.own;
    case kBarrierAfterExit:
      if (t.id > 0) sync_block();
      return t.own;
    default: return shuffle_xor(t.own, 1);
  }
}

// What UBSan does not see: the array's size is not known here.
PKV_DEV __attribute__((noinline)) float element(const float* numbers, i32 index) { return numbers[index]; }

PKV_DEV float global_case(const Thread& t) {
  const i32 large = 2147483647;
  float local[4] = {0.f, 1.f, 2.f, 3.f};
  switch (t.p.which) {
    case kBroadcast: return load_as<float>(t.p.in);
    case kGlobalBeyond: return load_as<float>(t.in + kFloat);
    case kGlobalMisaligned: return load_as<float>(t.in + 2);
    case kWriteOfInput: store_as(G<u8>{const_cast<u8*>(t.in.address)}, t.own); break;
    case kTwoWriters: store_as(t.p.out, t.own); break;
    case kTwoBlocks: store_as(t.out, t.own); break;
    case kReadOfWritten:
      store_as(t.out, t.own);
      return load_written_as<float>(t.p.out + word(t.other_warp));
    case kConstantReadOfWritten:
      store_as(t.out, t.own);
      return load_as<float>(G<const u8>{t.out.address});
    case kOverflow: return static_cast<float>(large + t.id);
    case kBeyondLocalArray: return local[t.id % 8];
    case kBeyondLocalPointer: return element(local, t.id % 8);
    default: break;
  }
  return t.own;
}

extern "C" __global__ void __launch_bounds__(64) probe(PKV_PARAM ProbeParams p) {
  const i32 id = threadIdx.x;
  const G<const u8> in = p.in + id / 4 * 16;
  const Thread t = {p, id, id % 32, id ^ 1, id ^ 32, static_cast<float>(id), p.out + word(id), p.in + word(id)};
  float value;
  if (p.which == kBlockBarrier || p.which == kWarpBarrier || p.which == kOwnWord ||
      (p.which >= kNoBarrier && p.which <= kSharedMisaligned && p.which != kOverwrittenByCopy)) {
    value = shared_case(t);
  } else if ((p.which >= kCopyAsync && p.which <= kTwoStages) || p.which == kOverwrittenByCopy ||
             (p.which >= kNoWait && p.which <= kCopyLeftBehind)) {
    Thread of_row = t;
    of_row.in = in;
    value = copy_case(of_row);
  } else if (p.which == kShuffle || p.which == kVote ||
             (p.which >= kDivergentShuffle && p.which <= kBarrierAfterExit)) {
    value = warp_case(t);
  } else {
    value = global_case(t);
  }
  if (p.which < kNoBarrier) store_as(t.out, value);  // the wrong ones have shown what they do
}
