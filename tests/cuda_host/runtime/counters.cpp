// Traffic. The accesses of a warp at one call site, the nth time each of its lanes comes there, are one access of the
// hardware, which moves sectors of 32 bytes.
#include <algorithm>
#include <tuple>

#include "state.h"

namespace pkv_host {
namespace {

constexpr u32 kSectorBytes = 32;

struct Record {
  u64 access;  // call site, warp and nth
  u64 address;
  u32 bytes;   // the same for all lanes
  u32 tensor;
  bool write;
};

std::vector<Record> records;

// How often this lane was at the site before.
u32 visit(Fiber& fiber, u64 site) {
  for (auto& [known, times] : fiber.visits)
    if (known == site) return times++;
  fiber.visits.push_back({site, 1});
  return 0;
}

}  // namespace

void start_counters() {
  state.counts = {};
  records.clear();
}

void count_access(u32 tensor, const void* at, u32 bytes, bool write, Site site) {
  Fiber& fiber = this_fiber();
  const u64 key = (reinterpret_cast<u64>(site.file) * 131 + site.line) & 0xffff;
  const u64 nth = visit(fiber, key);
  records.push_back({key << 48 | static_cast<u64>(fiber.thread / 32) << 40 | nth,
                     reinterpret_cast<u64>(at), bytes, tensor, write});
}

// At the end of a block: adds its accesses up. What several lanes read of one address is one read. No lane's access
// crosses a sector, for it is aligned to its size, and that is at most 16 bytes.
void close_counters() {
  auto key = [](const Record& r) { return std::make_tuple(r.access, r.tensor, r.write, r.address); };
  std::sort(records.begin(), records.end(), [&](const Record& a, const Record& b) { return key(a) < key(b); });
  for (size_t i = 0; i < records.size();) {
    const Record& first = records[i];
    Tensor& tensor = *state.tensors[first.tensor];
    u64 bytes = 0, sectors = 0, last = ~0ull, last_sector = ~0ull;
    for (; i < records.size() && records[i].access == first.access && records[i].tensor == first.tensor &&
           records[i].write == first.write; i++) {
      const u64 address = records[i].address, sector = address / kSectorBytes;
      bytes += address != last ? records[i].bytes : 0;
      sectors += sector != last_sector;
      last = address;
      last_sector = sector;
    }
    (first.write ? tensor.bytes_written : tensor.bytes_read) += bytes;
    tensor.sectors += sectors;
    tensor.least_sectors += (bytes + kSectorBytes - 1) / kSectorBytes;
  }
  records.clear();
}

}  // namespace pkv_host
