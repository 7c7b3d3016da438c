// Global memory: every access lies within one registered tensor, is aligned to its size, and meets no other thread's.
// Blocks run one after another here and at once on a GPU, so what one writes no other may touch in the same launch.
#include <climits>

#include "state.h"

namespace pkv_host {
namespace {

constexpr i64 kPageBytes = 1024;
constexpr u32 kNobody = 0, kSeveralBlocks = ~0u;
constexpr u16 kSeveralThreads = 0xffff;

// Who touched a byte of a tensor that the kernel may write. Blocks are counted from 1, threads from 0.
struct Touch { u32 block; u16 thread; u16 epoch; };
struct Byte { Touch write, read; };
using Page = std::unique_ptr<Byte[]>;

// Pages, because a tensor may be spread over terabytes of memory that is only reserved.
std::vector<std::unordered_map<i64, Page>> pages;
u32 last_tensor;

Byte& byte_of(u32 tensor, i64 offset) {
  Page& page = pages[tensor][offset / kPageBytes];
  if (!page) page.reset(new Byte[kPageBytes]());
  return page[offset % kPageBytes];
}

Touch this_touch() {
  const Fiber& fiber = this_fiber();
  return {state.block + 1, static_cast<u16>(fiber.thread), static_cast<u16>(fiber.epoch)};
}

// Whether an earlier touch may happen at the same time as this one: by another block, or by another thread of this one
// with no barrier between.
bool clashes(const Touch& earlier, const Touch& touch) {
  if (earlier.block == kNobody) return false;
  if (earlier.block != touch.block) return true;
  return earlier.thread != touch.thread && earlier.epoch == touch.epoch;
}

void note_read(Byte& byte, const Touch& touch) {
  if (byte.read.block == kNobody) byte.read = touch;
  else if (byte.read.block != touch.block) byte.read.block = kSeveralBlocks;
  else if (byte.read.epoch != touch.epoch) byte.read = touch;
  else if (byte.read.thread != touch.thread) byte.read.thread = kSeveralThreads;
}

void check_touch(u32 index, i64 offset, u32 bytes, Access access, Site site) {
  const Touch touch = this_touch();
  const char* name = state.tensors[index]->name;
  for (u32 i = 0; i < bytes; i++) {
    Byte& byte = byte_of(index, offset + i);
    if (access == Access::kReadConstant && byte.write.block != kNobody)
      fail("read of %s offset %lld as constant, which block %u has written, at %s:%d", name, offset + i,
           byte.write.block - 1, site.file, site.line);
    if (clashes(byte.write, touch))
      fail("%s of %s offset %lld, which block %u thread %u has written, at %s:%d",
           access == Access::kWrite ? "write" : "read", name, offset + i, byte.write.block - 1, byte.write.thread,
           site.file, site.line);
    if (access != Access::kWrite) {
      note_read(byte, touch);
      continue;
    }
    if (clashes(byte.read, touch))
      fail("write of %s offset %lld, which %s, at %s:%d", name, offset + i,
           byte.read.block == touch.block ? "another thread of the block reads" : "another block reads", site.file,
           site.line);
    byte.write = touch;
  }
}

bool holds(const Tensor& tensor, const char* at) { return at >= tensor.base && at < tensor.base + tensor.bytes; }

u32 find_tensor(const char* at) {
  const u32 num_tensors = state.tensors.size();
  if (last_tensor < num_tensors && holds(*state.tensors[last_tensor], at)) return last_tensor;
  for (u32 i = 0; i < num_tensors; i++)
    if (holds(*state.tensors[i], at)) return last_tensor = i;
  return num_tensors;
}

[[noreturn]] void report_stray(const char* at, u32 bytes, const char* verb, Site site) {
  const char* nearest = "none";
  i64 offset = 0, least = LLONG_MAX;
  for (const Tensor* tensor : state.tensors) {
    const i64 from_base = at - tensor->base;
    const i64 distance = from_base < 0 ? -from_base : from_base - tensor->bytes;
    if (distance < least) {
      least = distance;
      nearest = tensor->name;
      offset = from_base;
    }
  }
  fail("%s of %u bytes outside every tensor (nearest: %s, offset %lld) at %s:%d", verb, bytes, nearest, offset,
       site.file, site.line);
}

}  // namespace

void start_global_memory() {
  pages.clear();
  pages.resize(state.tensors.size());
  last_tensor = 0;
}

void check_global(const void* address, u32 bytes, Access access, Site site) {
  const char* at = static_cast<const char*>(address);
  const bool writes = access == Access::kWrite;
  const char* verb = writes ? "write" : "read";
  const u32 index = find_tensor(at);
  if (index == state.tensors.size() || at + bytes > state.tensors[index]->base + state.tensors[index]->bytes)
    report_stray(at, bytes, verb, site);
  const Tensor& tensor = *state.tensors[index];
  if (reinterpret_cast<uintptr_t>(at) % bytes)
    fail("misaligned %s of %s offset %lld, %u bytes, at %s:%d", verb, tensor.name,
         static_cast<i64>(at - tensor.base), bytes, site.file, site.line);
  if (writes && !tensor.writable)
    fail("write of %s, which is read-only, at %s:%d", tensor.name, site.file, site.line);
  if (tensor.writable) check_touch(index, at - tensor.base, bytes, access, site);
  if (state.count) count_access(index, at, bytes, writes, site);
}

}  // namespace pkv_host
