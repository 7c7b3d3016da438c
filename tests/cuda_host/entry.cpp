// Compiled once per variant of a kernel: PKV_KERNEL is its file, PKV_ENTRY its entry.
#include "interface.h"
#include PKV_KERNEL

template <class Params> Params params_of(void (*)(Params));
using Params = decltype(params_of(PKV_ENTRY));

static void run(void* argument) { PKV_ENTRY(*static_cast<const Params*>(argument)); }

extern "C" int pkv_launch(const void* params, const pkv_host::Launch* launch, pkv_host::Tensor* tensors,
                          int num_tensors, pkv_host::Counts* counts, char* message, int message_bytes) {
  Params copy;  // aligned, as constant memory is
  memcpy(static_cast<void*>(&copy), params, sizeof copy);
  return pkv_host::run_kernel(run, &copy, *launch, tensors, num_tensors, counts, message, message_bytes);
}

extern "C" int pkv_params_bytes() { return static_cast<int>(sizeof(Params)); }
