// cp.async, as late as the hardware may: the destination holds NaN from the issue to the wait that covers its group, so
// a missing or weak wait, a forgotten commit and a destination still in use all change the result.
#include "state.h"

extern "C" __attribute__((weak)) void* __asan_region_is_poisoned(void*, size_t);

namespace pkv_host {

void copy_async(u32 shared_offset, const void* from, u32 bytes, bool valid, Site site) {
  Fiber& fiber = this_fiber();
  if (valid) {
    check_global(from, bytes, Access::kReadConstant, site);
    if (__asan_region_is_poisoned && __asan_region_is_poisoned(const_cast<void*>(from), bytes))
      fail("AddressSanitizer: cp.async reads %p, which is poisoned, at %s:%d", from, site.file, site.line);
  } else if (reinterpret_cast<uintptr_t>(from) % bytes) {
    fail("misaligned source of a cp.async that fills with zeros at %s:%d", site.file, site.line);
  }
  char* to = shared_at(shared_offset, bytes, Access::kWrite, site);
  const Copy copy = {shared_offset, from, bytes, valid, fiber.open_group};
  mark_in_flight(copy, fiber.thread);
  memset(to, 0xff, bytes);
  fiber.copies.push_back(copy);
}

void commit_async() { this_fiber().open_group++; }

void wait_async(u32 groups_left) {
  Fiber& fiber = this_fiber();
  size_t kept = 0;
  for (const Copy& copy : fiber.copies) {
    if (copy.group + groups_left >= fiber.open_group) {  // too young, or never committed
      fiber.copies[kept++] = copy;
      continue;
    }
    if (copy.valid) memcpy(state.shared + copy.shared_offset, copy.from, copy.bytes);
    else memset(state.shared + copy.shared_offset, 0, copy.bytes);
    mark_landed(copy);
  }
  fiber.copies.resize(kept);
}

}  // namespace pkv_host
