"""A device that is the host: tensors go to memory of their own, a kernel runs, what it may write comes back."""

import math

from host_device.build import build_kernel
from host_device.launch import launch
from host_device.memory import Memory
from pagedkv.kernels import variants
from pagedkv.kernels.params import pack


class HostDevice:
    """How kernels are compiled and run.

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
    """

    def __init__(self, *, seed=1, schedule="uniform", count=False, edits=None, asan=False, macros=None, memory=None):
        self.launched = []
        self._how = {"seed": seed, "schedule": schedule, "count": count}
        self._edits = edits or {}
        self._asan = asan
        self._macros = macros or {}
        self._home = memory or Memory()

    def run(self, variant, tensors, values, writable, grid):
        """Run a kernel.

        Parameters
        ----------
        variant : pagedkv.kernels.variants.Variant
            The kernel as it is compiled, and its shape.
        tensors : dict of str to tensor or None
            The parameters that are pointers, by name; None is a null pointer.
        values : dict
            The other parameters.
        writable : set of str
            The tensors that the kernel may write.
        grid : int
            Blocks.
        """
        macros = self._macros | dict(variant.macros)
        library = build_kernel(variant.kernel, macros, edits=self._edits.get(variant.kernel, ()), asan=self._asan)
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        away = {name: tensor for name, tensor in given.items() if not self._home.holds(tensor)}
        memory = Memory()
        placed = given | memory.place_all(away, writable=writable)
        regions = [*self._home.regions, *memory.regions]
        addresses = {name: placed[name].data_ptr() if name in placed else 0 for name in tensors}
        params = pack(variant.kernel, addresses | values).tobytes()
        done = launch(library, params, (grid,), variant.threads, variant.shared_bytes, regions, **self._how)
        self.launched.append((variant.kernel, done))
        for name in writable & away.keys():
            given[name].copy_(placed[name])


def widest_vector(*tensors):
    """Return the bytes of the widest vector that divides the address and all strides of all tensors."""
    sizes = [tensor.element_size() for tensor in tensors]
    whole = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    for tensor, size in zip(tensors, sizes, strict=True):
        whole += [stride * size for stride in tensor.stride()[:-1]] + [tensor.shape[-1] * size]
    return variants.widest_vector(math.gcd(*whole), max(sizes))
