"""A device that is the host: tensors go to memory of their own, a kernel runs, what it may write comes back."""

import contextlib

import torch

from host_device.build import build_kernel
from host_device.launch import launch
from host_device.memory import Memory
from pagedkv.kernels.launch import LAUNCHERS


class HostDevice:
    """Launches the package's kernels in the place of a GPU.

    Parameters
    ----------
    seed, schedule, count
        As for `launch`.
    edits : dict of str to sequence of pairs of str
        What to change in the sources of a kernel, as for `build_kernel`.
    asan : bool
        Whether kernels are compiled with AddressSanitizer, for a process that runs under it.
    macros : dict
        Macros beside those of the variant.
    memory : Memory
        Tensors that lie in it are used where they are; all others go to memory of their own and come back.

    Attributes
    ----------
    launched : list of (str, Launched)
        Every kernel that ran, and what it did.
    loaded : list of Variant
        What was to be made ready.
    """

    # So many blocks side by side that short sequences are cut into pieces too.
    arch = "sm_90"
    num_multiprocessors = 12

    def __init__(self, *, seed=1, schedule="uniform", count=False, edits=None, asan=False, macros=None, memory=None):
        self.launched = []
        self.loaded = []
        self._how = {"seed": seed, "schedule": schedule, "count": count}
        self._edits = edits or {}
        self._asan = asan
        self._macros = macros or {}
        self._home = memory or Memory()

    def is_capturing(self):
        """There are no graphs."""
        return False

    def load(self, variant):
        """Note a kernel; it is compiled when it is launched."""
        self.loaded.append(variant)

    def launch(self, asked):
        """Run a kernel: its parameters as they were packed, but for pointers to tensors that were moved."""
        variant, params = asked.variant, asked.params.copy()
        macros = self._macros | dict(variant.macros)
        library = build_kernel(variant.kernel, macros, edits=self._edits.get(variant.kernel, ()), asan=self._asan)
        given = {name: tensor for name, tensor in asked.arrays.items() if tensor is not None}
        assert {name: params[0][name] for name in asked.arrays} == {
            name: given[name].data_ptr() if name in given else 0 for name in asked.arrays
        }
        away = {name: tensor for name, tensor in given.items() if not self._home.holds(tensor)}
        memory = Memory()
        placed = memory.place_all(away, writable=asked.written)
        for name, tensor in placed.items():
            params[0][name] = tensor.data_ptr()
        regions = [*self._home.regions, *memory.regions]
        grid, packed = (asked.grid,), params.tobytes()
        done = launch(library, packed, grid, variant.threads, variant.shared_bytes, regions, **self._how)
        self.launched.append((variant.kernel, done))
        for name in asked.written & away.keys():
            given[name].copy_(placed[name])

    @contextlib.contextmanager
    def in_place_of_gpu(self):
        """Make the package launch here what it does with tensors on the CPU; what it allocates is NaN at first."""
        before = torch.are_deterministic_algorithms_enabled()
        LAUNCHERS["cpu"] = lambda _: self
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
            del LAUNCHERS["cpu"]
