// CUDA threads as fibers: a switch saves six registers and a stack pointer. Who runs next is drawn from a seed, so a
// launch can be repeated. x86-64 only.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdlib>

#include "state.h"

#ifndef __x86_64__
#error "the switch between fibers is written for x86-64"
#endif

extern "C" void pkv_switch(void** save, void* to);
asm(R"(
.pushsection .text
.globl pkv_switch
.type pkv_switch,@function
pkv_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size pkv_switch,.-pkv_switch
.popsection
)");

// There only in a process that runs under AddressSanitizer, which must be told of every switch.
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void**, const void*, size_t);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
__attribute__((weak)) void __asan_unpoison_memory_region(void const volatile*, size_t);
}

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace pkv_host {

State state;

namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kGuardBytes = 4096;
constexpr u32 kPriorityChange = 400;  // a warp gets a new priority every so many picks

void* launcher_stack_pointer;
void* launcher_fake_stack;
const void* launcher_stack;
size_t launcher_stack_bytes;

bool under_asan() { return __sanitizer_start_switch_fiber != nullptr; }

// To a fiber, or to the launcher when `to` is null. `from` is null when the launcher itself switches.
void switch_to(Fiber* from, Fiber* to) {
  state.counts.switches++;
  void** save = from ? &from->stack_pointer : &launcher_stack_pointer;
  void** fake = from ? &from->fake_stack : &launcher_fake_stack;
  if (to) {
    state.current = to->thread;
    threadIdx = {to->thread, 0, 0};
  }
  if (under_asan()) {
    const bool leaves_for_good = from && from->done;
    __sanitizer_start_switch_fiber(leaves_for_good ? nullptr : fake, to ? to->stack : launcher_stack,
                                   to ? kStackBytes : launcher_stack_bytes);
  }
  pkv_switch(save, to ? to->stack_pointer : launcher_stack_pointer);
  if (under_asan()) __sanitizer_finish_switch_fiber(*fake, nullptr, nullptr);
}

u32 nth_bit(u32 bits, u32 n) {
  for (; n > 0; n--) bits &= bits - 1;
  return __builtin_ctz(bits);
}

u32 pick_uniform() {
  u32 n = next_random() % state.num_ready, warp = 0;
  for (;; warp++) {
    const u32 here = __builtin_popcount(state.ready[warp]);
    if (n < here) return warp * 32 + nth_bit(state.ready[warp], n);
    n -= here;
  }
}

// The warp of the highest priority that can run: others starve until it waits, as far apart as warps can get.
u32 pick_by_priority() {
  const u32 warps = state.ready.size();
  if (next_random() % kPriorityChange == 0) state.priority[next_random() % warps] = next_random() & 0xffff;
  u32 best = warps;
  for (u32 w = 0; w < warps; w++)
    if (state.ready[w] && (best == warps || state.priority[w] > state.priority[best])) best = w;
  const u32 lanes = state.ready[best];
  return best * 32 + nth_bit(lanes, next_random() % __builtin_popcount(lanes));
}

Fiber* pick() {
  const u32 thread = state.schedule == kUniform ? pick_uniform() : pick_by_priority();
  state.num_ready--;
  state.ready[thread / 32] &= ~(1u << thread % 32);
  return &state.fibers[thread];
}

// Names every lane by what it waits for: those that are missing from a meeting are the ones to look at.
void report_deadlock() {
  int n = snprintf(state.message, state.message_bytes, "block (%u,%u): no thread can go on:", blockIdx.x, blockIdx.y);
  auto add = [&](const char* format, auto... values) {
    if (n < state.message_bytes) n += snprintf(state.message + n, state.message_bytes - n, format, values...);
  };
  for (size_t w = 0; w < state.warps.size(); w++) {
    const Warp& warp = state.warps[w];
    u32 at_barrier = 0, exited = 0;
    for (u32 lane = 0; lane < 32; lane++) {
      const Fiber& fiber = state.fibers[w * 32 + lane];
      if (fiber.done) exited |= 1u << lane;
      else if (fiber.waits == Meeting::kBlockBarrier) at_barrier |= 1u << lane;
    }
    add(" warp %zu:", w);
    if (warp.arrived)
      add(" lanes %08x wait in %s at %s:%d;", warp.arrived, name_of(warp.meeting), warp.site.file, warp.site.line);
    if (at_barrier)
      add(" lanes %08x at a block barrier, %s:%d;", at_barrier, state.barrier_site.file, state.barrier_site.line);
    if (exited) add(" lanes %08x exited;", exited);
  }
  state.failed = true;
}

void fiber_main() {
  if (under_asan()) {
    const void* stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
    if (!launcher_stack) {  // the first fiber of a launch is entered from the launcher
      launcher_stack = stack;
      launcher_stack_bytes = bytes;
    }
  }
  state.body(state.argument);
  Fiber& fiber = this_fiber();
  if (!fiber.copies.empty()) fail("exits with %zu cp.async never waited for", fiber.copies.size());
  fiber.done = true;
  state.alive--;
  let_others_run();
  abort();
}

// A new stack returns into fiber_main. Stacks are staggered: else all fibers share the same sets of the caches.
void reset(Fiber& fiber, u32 thread) {
  fiber.thread = thread;
  fiber.done = false;
  fiber.waits = Meeting::kNone;
  fiber.epoch = 1;
  fiber.open_group = 0;
  fiber.copies.clear();
  fiber.visits.clear();
  fiber.fake_stack = nullptr;
  if (under_asan()) __asan_unpoison_memory_region(fiber.stack, kStackBytes);
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes - thread * 1088 % 65536 / 16 * 16);
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(fiber_main);
  memset(top - 8, 0, 6 * sizeof(void*));
  fiber.stack_pointer = top - 8;
}

}  // namespace

void prepare_fibers(u32 threads) {
  static char* stacks = nullptr;
  static size_t have = 0;
  constexpr size_t kPitch = kStackBytes + kGuardBytes;
  if (have < threads) {
    if (stacks) munmap(stacks, have * kPitch);
    stacks = static_cast<char*>(mmap(nullptr, threads * kPitch, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) abort();
    for (size_t i = 0; i < threads; i++) mprotect(stacks + i * kPitch, kGuardBytes, PROT_NONE);
    have = threads;
  }
  state.fibers.resize(threads);
  state.warps.resize(threads / 32);
  for (size_t i = 0; i < threads; i++) state.fibers[i].stack = stacks + i * kPitch + kGuardBytes;
  launcher_stack = nullptr;
}

void start_block() {
  const u32 threads = state.fibers.size();
  memset(static_cast<void*>(state.warps.data()), 0, state.warps.size() * sizeof(Warp));
  state.ready.assign(threads / 32, 0);
  state.priority.assign(threads / 32, 0);
  for (u32& priority : state.priority) priority = next_random() & 0xffff;
  state.num_ready = 0;
  state.alive = threads;
  state.at_barrier = 0;
  for (u32 i = 0; i < threads; i++) {
    reset(state.fibers[i], i);
    wake(i);
  }
}

void run_block() {
  while (state.num_ready && !state.failed) switch_to(nullptr, pick());
  if (!state.failed && state.alive) report_deadlock();
}

void wake(u32 thread) {
  state.fibers[thread].waits = Meeting::kNone;
  state.num_ready++;
  state.ready[thread / 32] |= 1u << thread % 32;
}

// This fiber waits or has ended; it goes on when another one wakes it.
void let_others_run() {
  Fiber* fiber = &this_fiber();
  if (!state.num_ready) {
    if (state.alive) report_deadlock();
    switch_to(fiber, nullptr);
    return;
  }
  Fiber* next = pick();
  if (next != fiber) switch_to(fiber, next);
}

void stop_launch() {
  state.failed = true;
  this_fiber().done = true;
  switch_to(&this_fiber(), nullptr);
  abort();
}

void fail(const char* format, ...) {
  char text[900];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  snprintf(state.message, state.message_bytes, "block (%u,%u) thread %u: %s", blockIdx.x, blockIdx.y,
           this_fiber().thread, text);
  stop_launch();
}

void refuse(const char* what, Site site) { fail("%s at %s:%d", what, site.file, site.line); }

}  // namespace pkv_host
