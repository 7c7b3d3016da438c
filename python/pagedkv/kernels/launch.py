"""The one way to a device: what a launch is, and who carries launches out.

Everything above makes a `Launch`; everything below, a driver with a GPU or the tests' host that checks each access,
takes one. Who takes those of a kind of device stands in `LAUNCHERS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kernels.checked import Parameters
from pagedkv.kernels.variants import Variant

if TYPE_CHECKING:
    import torch

MAX_GRID = 2**31 - 1

Arrays: TypeAlias = "Mapping[str, torch.Tensor | None]"
"""Arrays by the fields of a struct that point to them; None for a null pointer."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes
    ----------
    variant : Variant
        The kernel as it is compiled, its threads and its shared memory.
    grid : int
        Thread blocks.
    params : numpy.ndarray
        The kernel's struct, one element, which is passed by value.
    arrays : mapping of str to torch.Tensor or None
        What the struct's pointers point to, by field; None for a null pointer.
    written : frozenset of str
        Those of the arrays that the kernel may write.
    """

    variant: Variant
    grid: int
    params: np.ndarray[Any, Any]
    arrays: Arrays
    written: frozenset[str]


class Launcher(Protocol):
    """Carries out the launches of one device."""

    @property
    def arch(self) -> str:
        """The architecture that kernels are compiled for, such as "sm_90a"."""

    @property
    def num_multiprocessors(self) -> int:
        """Multiprocessors of the device."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def load(self, variant: Variant) -> None:
        """Make a kernel ready, so that its first launch waits for nothing."""

    def launch(self, launch: Launch) -> None:
        """Run a kernel on the current stream."""


def _cuda_launcher(device: "torch.device") -> Launcher:
    from pagedkv.kernels.cuda_launcher import launcher_of_device

    return launcher_of_device(device.index)


LAUNCHERS: dict[str, Callable[["torch.device"], Launcher]] = {"cuda": _cuda_launcher}
"""Who launches on a kind of device, by its name in torch."""


def launcher_of(device: "torch.device") -> Launcher:
    """Return who launches on a device whose kind is in `LAUNCHERS`."""
    return LAUNCHERS[device.type](device)


def run(
    launcher: Launcher,
    variant: Variant,
    params: Parameters,
    arrays: Arrays,
    written: frozenset[str],
    grid: int,
) -> None:
    """Launch a kernel; nothing is launched where there are no blocks.

    Parameters
    ----------
    launcher : Launcher
        Of the device of the arrays.
    variant : Variant
        The kernel.
    params : Parameters
        Its struct, but for the pointers.
    arrays : mapping of str to torch.Tensor or None
        Its pointers.
    written : frozenset of str
        The arrays that it may write.
    grid : int
        Thread blocks.

    Raises
    ------
    InvalidArgumentError
        If there is more work than a grid has blocks, or outputs overlap other arrays.
    """
    if grid == 0:
        return
    if grid > MAX_GRID:
        raise InvalidArgumentError(
            f"{variant.kernel}: expected work for {MAX_GRID} thread blocks at most, found {grid}"
        )
    launcher.launch(Launch(variant, grid, params.pack(arrays), arrays, written))
