// Shared memory: bounds, alignment, reads of what nobody wrote, and races. A race is two accesses to a word, one of
// them a write, by two threads with neither a block barrier between them nor, within a warp, a warp barrier. It is
// found from the barriers that each thread has passed, not from the order in which threads happened to run.
#include "state.h"

namespace pkv_host {
namespace {

constexpr u32 kWord = 4;
constexpr u16 kNobody = 0, kSeveral = 0xffff;  // threads and warps are counted from 1

// What is known of a word. A moment is a thread's count of block barriers and its warp's count of warp barriers.
struct Moment { u32 block_epoch, warp_epoch; };
struct Word {
  u16 writer, reader;      // thread + 1
  u16 reader_warp;         // warp + 1
  u16 in_flight;           // thread + 1 whose cp.async has not landed
  Moment written, read;
};

std::vector<Word> words;

Moment now(const Fiber& fiber) { return {fiber.epoch, warp_of(fiber).epoch}; }

// Whether nothing orders an access by `thread` at `then` before one by `fiber` now.
bool unordered(u32 thread, Moment then, const Fiber& fiber) {
  if (thread == fiber.thread || then.block_epoch != fiber.epoch) return false;
  return thread / 32 != fiber.thread / 32 || then.warp_epoch == warp_of(fiber).epoch;
}

void check_not_written(const Word& word, u32 at, const Fiber& fiber, const char* verb, Site site) {
  if (word.in_flight)
    fail("%s of shared offset %u while a cp.async of thread %d is in flight, at %s:%d", verb, at, word.in_flight - 1,
         site.file, site.line);
  if (word.writer != kNobody && unordered(word.writer - 1, word.written, fiber))
    fail("race: %s of shared offset %u, written by thread %d with no barrier between, at %s:%d", verb, at,
         word.writer - 1, site.file, site.line);
}

void check_not_read(const Word& word, u32 at, const Fiber& fiber, Site site) {
  if (word.reader == kNobody || word.read.block_epoch != fiber.epoch) return;
  const bool same_warp = word.reader_warp == fiber.thread / 32 + 1;
  if (word.reader == fiber.thread + 1 || (same_warp && word.read.warp_epoch != warp_of(fiber).epoch)) return;
  if (word.reader == kSeveral)
    fail("race: write of shared offset %u, read by several threads with no barrier between, at %s:%d", at, site.file,
         site.line);
  fail("race: write of shared offset %u, read by thread %d with no barrier between, at %s:%d", at, word.reader - 1,
       site.file, site.line);
}

void note_read(Word& word, const Fiber& fiber) {
  const u16 thread = fiber.thread + 1, warp = fiber.thread / 32 + 1;
  const bool first = word.reader == kNobody || word.read.block_epoch != fiber.epoch;
  word.reader = first || word.reader == thread ? thread : kSeveral;
  word.reader_warp = first || word.reader_warp == warp ? warp : kSeveral;
  word.read = now(fiber);
}

void note_written(Word& word, const Fiber& fiber) {
  word.writer = fiber.thread + 1;
  word.written = now(fiber);
}

}  // namespace

void start_shared_memory() {
  words.assign((state.shared_bytes + kWord - 1) / kWord, Word{});
  memset(state.shared, 0xff, state.shared_bytes);  // NaN in every type
}

char* shared_at(u32 offset, u32 bytes, Access access, Site site) {
  const Fiber& fiber = this_fiber();
  const bool writes = access == Access::kWrite;
  const char* verb = writes ? "write" : "read";
  if (static_cast<u64>(offset) + bytes > state.shared_bytes)
    fail("%s of shared offset %u, %u bytes, beyond the %u bytes there are, at %s:%d", verb, offset, bytes,
         state.shared_bytes, site.file, site.line);
  if (offset % bytes) fail("misaligned %s of shared offset %u, %u bytes, at %s:%d", verb, offset, bytes, site.file, site.line);
  for (u32 i = offset / kWord; i < (offset + bytes + kWord - 1) / kWord; i++) {
    Word& word = words[i];
    check_not_written(word, i * kWord, fiber, verb, site);
    if (writes) {
      check_not_read(word, i * kWord, fiber, site);
      note_written(word, fiber);
    } else {
      if (word.writer == kNobody)
        fail("read of shared offset %u, which nobody wrote, at %s:%d", i * kWord, site.file, site.line);
      note_read(word, fiber);
    }
  }
  return state.shared + offset;
}

void mark_in_flight(const Copy& copy, u32 thread) {
  for (u32 i = copy.shared_offset / kWord; i < (copy.shared_offset + copy.bytes) / kWord; i++)
    words[i].in_flight = thread + 1;
}

// Landed for the thread that waited; the others need a barrier behind the wait.
void mark_landed(const Copy& copy) {
  for (u32 i = copy.shared_offset / kWord; i < (copy.shared_offset + copy.bytes) / kWord; i++) {
    words[i].in_flight = kNobody;
    note_written(words[i], this_fiber());
  }
}

}  // namespace pkv_host
