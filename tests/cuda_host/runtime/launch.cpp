// A launch: its blocks one after another, in an order drawn from the seed.
#include <cstdlib>

#include "state.h"

namespace pkv_host {
namespace {

constexpr size_t kSharedAlignment = 128;  // what the vocabulary declares

std::vector<u32> shuffled_blocks(u32 blocks) {
  std::vector<u32> order(blocks);
  for (u32 i = 0; i < blocks; i++) {
    order[i] = i;
    std::swap(order[i], order[next_random() % (i + 1)]);
  }
  return order;
}

void run_one(u32 block, const Launch& launch) {
  state.block = block;
  blockIdx = {block % launch.grid_x, block / launch.grid_x % launch.grid_y, block / launch.grid_x / launch.grid_y};
  void* shared = nullptr;
  if (posix_memalign(&shared, kSharedAlignment, launch.shared_bytes + 1)) abort();
  state.shared = static_cast<char*>(shared);
  start_shared_memory();
  start_block();
  run_block();
  if (state.count) close_counters();
  free(shared);
}

}  // namespace

int run_kernel(void (*body)(void*), void* argument, const Launch& launch, Tensor* tensors, int num_tensors,
               Counts* counts, char* message, int message_bytes) {
  if (launch.threads == 0 || launch.threads % 32 || launch.threads > 1024) {
    snprintf(message, message_bytes, "a block of %u threads is not whole warps", launch.threads);
    return 1;
  }
  message[0] = 0;
  state.failed = false;
  state.body = body;
  state.argument = argument;
  state.message = message;
  state.message_bytes = message_bytes;
  state.count = launch.count;
  state.schedule = launch.schedule;
  state.random = launch.seed * 0x9E3779B97F4A7C15ull + 88172645463325252ull;
  state.shared_bytes = launch.shared_bytes;
  state.tensors.clear();
  for (int i = 0; i < num_tensors; i++) {
    tensors[i].bytes_read = tensors[i].bytes_written = tensors[i].sectors = tensors[i].least_sectors = 0;
    state.tensors.push_back(&tensors[i]);
  }
  gridDim = {launch.grid_x, launch.grid_y, launch.grid_z};
  blockDim = {launch.threads, 1, 1};
  prepare_fibers(launch.threads);
  start_global_memory();
  start_counters();
  for (u32 block : shuffled_blocks(launch.grid_x * launch.grid_y * launch.grid_z)) {
    run_one(block, launch);
    if (state.failed) break;
  }
  *counts = state.counts;
  return state.failed;
}

}  // namespace pkv_host
