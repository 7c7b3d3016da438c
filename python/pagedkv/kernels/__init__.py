"""The device room: compiles the CUDA sources of `cuda/`; knows arrays and numbers, nothing of pools or schedulers."""
