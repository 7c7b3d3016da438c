// How the lanes of a warp meet.
#pragma once
#include "state.h"

namespace pkv_host {

// Notes that a lane has come; fails where others wait for something else.
void arrive(Warp& warp, u32 lane, Meeting meeting, Site site);

// Waits until all 32 lanes have come. What they bring is in Warp::in, what they get in Warp::out; `compute` turns the
// one into the other. A lane's results are read before it can come to the next meeting, so they are not overwritten.
template <class Compute>
void meet(Meeting meeting, Site site, Compute compute) {
  Fiber& fiber = this_fiber();
  Warp& warp = warp_of(fiber);
  arrive(warp, fiber.thread % 32, meeting, site);
  if (warp.arrived != ~0u) {
    fiber.waits = meeting;
    let_others_run();
    return;
  }
  warp.arrived = 0;
  state.counts.collectives++;
  compute(warp);
  const u32 first = fiber.thread / 32 * 32;
  for (u32 lane = 0; lane < 32; lane++)
    if (first + lane != fiber.thread) wake(first + lane);
}

}  // namespace pkv_host
