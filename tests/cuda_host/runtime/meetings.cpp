// Barriers, and what the 32 lanes of a warp do together. Nobody goes on before all have come: the last one computes.
#include "meetings.h"

namespace pkv_host {

const char* name_of(Meeting meeting) {
  switch (meeting) {
    case Meeting::kShuffle: return "a shuffle";
    case Meeting::kVote: return "a vote";
    case Meeting::kMultiply: return "mma";
    case Meeting::kLoadMatrices: return "ldmatrix";
    case Meeting::kWarpBarrier: return "a warp barrier";
    case Meeting::kBlockBarrier: return "a block barrier";
    case Meeting::kNone: break;
  }
  return "nothing";
}

void arrive(Warp& warp, u32 lane, Meeting meeting, Site site) {
  if (!warp.arrived) {
    warp.meeting = meeting;
    warp.site = site;
  } else if (warp.meeting != meeting || warp.site.line != site.line || warp.site.file != site.file) {
    fail("divergent warp: lane %u reaches %s at %s:%d while lanes %08x wait in %s at %s:%d", lane, name_of(meeting),
         site.file, site.line, warp.arrived, name_of(warp.meeting), warp.site.file, warp.site.line);
  }
  warp.arrived |= 1u << lane;
}

void block_barrier(Site site) {
  Fiber& fiber = this_fiber();
  const u32 threads = state.fibers.size();
  const Site& first = state.barrier_site;
  if (state.at_barrier && (first.line != site.line || first.file != site.file))
    fail("divergent barrier: %s:%d while %u threads wait at %s:%d", site.file, site.line, state.at_barrier, first.file,
         first.line);
  if (state.alive != threads)
    fail("a block barrier at %s:%d after %u threads of the block have exited", site.file, site.line,
         threads - state.alive);
  state.barrier_site = site;
  fiber.epoch++;
  if (++state.at_barrier < threads) {
    fiber.waits = Meeting::kBlockBarrier;
    let_others_run();
    return;
  }
  state.at_barrier = 0;
  state.counts.barriers++;
  for (u32 thread = 0; thread < threads; thread++)
    if (thread != fiber.thread) wake(thread);
}

void warp_barrier(Site site) {
  meet(Meeting::kWarpBarrier, site, [](Warp& warp) { warp.epoch++; });
}

u32 shuffle(u32 value, u32 source_lane, Site site) {
  Fiber& fiber = this_fiber();
  Warp& warp = warp_of(fiber);
  const u32 lane = fiber.thread % 32;
  if (source_lane > 31) fail("a shuffle from lane %u at %s:%d", source_lane, site.file, site.line);
  warp.in[lane][0] = value;
  warp.in[lane][1] = source_lane;
  meet(Meeting::kShuffle, site, [](Warp& warp) {
    for (u32 lane = 0; lane < 32; lane++) warp.out[lane][0] = warp.in[warp.in[lane][1]][0];
  });
  return warp.out[lane][0];
}

u32 vote(bool value, Site site) {
  Fiber& fiber = this_fiber();
  Warp& warp = warp_of(fiber);
  const u32 lane = fiber.thread % 32;
  warp.in[lane][0] = value;
  meet(Meeting::kVote, site, [](Warp& warp) {
    u32 bits = 0;
    for (u32 lane = 0; lane < 32; lane++) bits |= warp.in[lane][0] << lane;
    for (u32 lane = 0; lane < 32; lane++) warp.out[lane][0] = bits;
  });
  return warp.out[lane][0];
}

}  // namespace pkv_host
