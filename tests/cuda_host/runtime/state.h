// The state of a launch: one thread block at a time, its threads as fibers of one thread of the system.
#pragma once
#include <cstdio>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "interface.h"

namespace pkv_host {

enum class Meeting { kNone, kShuffle, kVote, kMultiply, kLoadMatrices, kWarpBarrier, kBlockBarrier };
const char* name_of(Meeting meeting);

// A cp.async that has been issued and not yet waited for.
struct Copy { u32 shared_offset; const void* from; u32 bytes; bool valid; u32 group; };

struct Fiber {
  void* stack_pointer;
  char* stack;
  void* fake_stack;  // AddressSanitizer's
  u32 thread;
  bool done;
  Meeting waits;
  u32 epoch;         // barriers of the block passed, from 1
  u32 open_group;    // of cp.async
  std::vector<Copy> copies;
  std::vector<std::pair<u64, u32>> visits;  // call site, how often; for the counters
};

struct Warp {
  u32 arrived;       // lanes, a bit each
  Meeting meeting;
  Site site;
  u32 epoch;         // barriers of the warp passed
  u32 in[32][12], out[32][4];
};

struct State {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  u32 current, alive, at_barrier, block;
  Site barrier_site;
  bool failed;

  std::vector<u32> ready;  // per warp, a bit per lane
  std::vector<u32> priority;
  u32 num_ready;
  i32 schedule;
  u64 random;

  char* shared;
  u32 shared_bytes;
  std::vector<Tensor*> tensors;
  bool count;
  Counts counts;

  void (*body)(void*);
  void* argument;
  char* message;
  int message_bytes;
};
extern State state;

inline Fiber& this_fiber() { return state.fibers[state.current]; }
inline Warp& warp_of(const Fiber& fiber) { return state.warps[fiber.thread / 32]; }

inline u64 next_random() {  // xorshift64*
  u64& x = state.random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x * 0x2545F4914F6CDD1Dull >> 16;
}

// fibers.cpp
void prepare_fibers(u32 threads);
void start_block();
void run_block();
void wake(u32 thread);
void let_others_run();
[[noreturn]] void stop_launch();
__attribute__((format(printf, 1, 2), noreturn)) void fail(const char* format, ...);

// shared_memory.cpp
void start_shared_memory();
void mark_in_flight(const Copy& copy, u32 thread);
void mark_landed(const Copy& copy);

// global_memory.cpp, counters.cpp
void start_global_memory();
void start_counters();
void count_access(u32 tensor, const void* at, u32 bytes, bool write, Site site);
void close_counters();

}  // namespace pkv_host
