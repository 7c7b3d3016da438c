// Memory for tensors: far apart with nothing between, each ending at a page that nobody may touch. A wrong block id, a
// stride of another tensor or an offset that wrapped cannot land in a tensor. Only touched pages cost memory, so a
// tensor may be spread as far as strides of 2^31 elements want.
#include <sys/mman.h>

#include "interface.h"

namespace {

constexpr u64 kPage = 4096;
constexpr u64 kFirst = 0x200000000000, kLast = 0x500000000000;  // nothing of the system's lies here
constexpr u64 kApart = 64ull << 30;   // further than 2^32 elements of 8 bytes
constexpr u64 kAlignment = 256;       // as cudaMalloc's
constexpr int kTries = 1000;          // places may be taken by tensors of earlier launches

u64 round_up(u64 value, u64 unit) { return (value + unit - 1) / unit * unit; }
u64 length_of(u64 bytes) { return round_up(bytes, kPage) + kPage; }

}  // namespace

extern "C" void* pkv_reserve(u64 bytes) {
  static u64 next = kFirst;
  const u64 length = length_of(bytes);
  for (int i = 0; i < kTries; i++) {
    if (next + length > kLast) next = kFirst;
    const u64 start = next;
    next += round_up(length, kApart) + kApart;
    void* got = mmap(reinterpret_cast<void*>(start), length, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == MAP_FAILED) continue;
    mprotect(reinterpret_cast<void*>(start + length - kPage), kPage, PROT_NONE);
    return reinterpret_cast<void*>(start + length - kPage - round_up(bytes, kAlignment));
  }
  return nullptr;
}

extern "C" void pkv_release(void* tensor, u64 bytes) {
  munmap(reinterpret_cast<void*>(reinterpret_cast<u64>(tensor) / kPage * kPage), length_of(bytes));
}
