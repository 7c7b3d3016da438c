// What the vocabulary asks of the runtime, and what the driver hands to it. The runtime is built once and without
// sanitizers; everything here returns by value, so that only instrumented code touches a kernel's own arrays.
#pragma once
#include <stdint.h>
#include <string.h>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// CUDA's built-in names, as far as kernels use them.
struct dim3 { u32 x, y, z; };
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace pkv_host {

// Where a kernel called the vocabulary. A default argument, so that it is the line of the kernel.
struct Site { const char* file; int line; };
constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
#define PKV_SITE pkv_host::Site site = pkv_host::here()

enum class Access { kRead, kReadConstant, kWrite };  // constant: nobody writes it while the kernel runs

// Memory. A check that fails ends the launch and does not return.
void check_global(const void* at, u32 bytes, Access access, Site site);
char* shared_at(u32 offset, u32 bytes, Access access, Site site);
void copy_async(u32 shared_offset, const void* from, u32 bytes, bool valid, Site site);
void commit_async();
void wait_async(u32 groups_left);

// Barriers and what a warp does together.
void block_barrier(Site site);
void warp_barrier(Site site);
u32 shuffle(u32 value, u32 source_lane, Site site);
u32 vote(bool value, Site site);  // a bit per lane

struct Words { u32 word[4]; };
struct Floats { float value[4]; };
enum class Half { kF16, kBF16 };
Words load_matrices(u32 shared_offset, bool transposed, Site site);  // four of them
Floats multiply(Half type, Floats sum, Words a, u32 b0, u32 b1, Site site);

// A finding of the vocabulary itself.
[[noreturn]] void refuse(const char* what, Site site);

inline u32 lane_id() { return threadIdx.x % 32; }

// ---- what the driver in Python hands over ----

struct Tensor {
  const char* name;
  char* base;
  i64 bytes;
  i32 writable;
  u64 bytes_read, bytes_written;  // counted with Launch::count
  u64 sectors, least_sectors;     // of 32 bytes per access of a warp; as few as the bytes need
};

struct Counts { u64 switches, collectives, products, barriers, matrix_loads, bank_conflicts; };

enum Schedule { kUniform = 0, kWarpPriority = 1 };

struct Launch {
  u32 grid_x, grid_y, grid_z, threads, shared_bytes;
  u32 count;     // whether to count global traffic
  u64 seed;
  i32 schedule;
};

// Runs a kernel; 0, or 1 with a message. `body` calls the kernel with the parameters at `argument`.
int run_kernel(void (*body)(void*), void* argument, const Launch& launch, Tensor* tensors, int num_tensors,
               Counts* counts, char* message, int message_bytes);

}  // namespace pkv_host
