"""Which device an operation runs on, and arrays as it needs them there: torch tensors, zero-copy from any library."""

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv import _core
from pagedkv.exceptions import InvalidArgumentError, StateError
from pagedkv.kernels.launch import LAUNCHERS, launcher_of

if TYPE_CHECKING:
    import torch

# Device types of DLPack by their names in torch, as far as they are not the host's.
_DLPACK_KINDS = {2: "cuda", 13: "cuda"}


def runs_kernels(array: Any) -> bool:
    """Whether operations on an array are launched as kernels, because of where it lies."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.device.type in LAUNCHERS
    if isinstance(array, np.ndarray):
        return "cpu" in LAUNCHERS
    if isinstance(array, _core.Tensor):
        return array.device.partition(":")[0] in LAUNCHERS and not array.is_packed
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        return _DLPACK_KINDS.get(array.__dlpack_device__()[0], "cpu") in LAUNCHERS
    return False


def as_tensor(argument: str, array: Any) -> "torch.Tensor":
    """Return an array as a torch tensor over the same memory.

    Raises
    ------
    TypeError
        If it is no array.
    InvalidArgumentError
        If it requires grad, or its library does not give its memory away.
    """
    import torch

    if isinstance(array, torch.Tensor):
        if array.requires_grad:
            raise InvalidArgumentError(
                f"{argument}: expected a tensor without gradient, found one that requires grad: detach it"
            )
        return array
    if isinstance(array, _core.Tensor):
        # Its capsule waits for nobody's stream, and packed keys refuse to leave.
        return torch.utils.dlpack.from_dlpack(array.__dlpack__(max_version=(1, 0)))
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{argument}: expected an array that speaks DLPack, found {type(array).__name__}")
    try:
        return torch.utils.dlpack.from_dlpack(array)
    except (BufferError, RuntimeError, ValueError) as error:
        found = f"{type(array).__name__}: {error}"
        raise InvalidArgumentError(
            f"{argument}: expected an array that gives its memory away, found {found}"
        ) from error


def optional_tensor(argument: str, array: Any) -> "torch.Tensor | None":
    """As `as_tensor`, of an argument that may be left out."""
    return None if array is None else as_tensor(argument, array)


def on_host(argument: str, array: Any) -> Any:
    """Return an index array in host memory, for checks and plans; one of a GPU is waited for and copied."""
    import torch

    if isinstance(array, torch.Tensor):
        return array.cpu()
    if isinstance(array, np.ndarray) or not runs_kernels(array):
        return array
    return as_tensor(argument, array).cpu()


def uploaded(array: Any, device: "torch.device", *, argument: str = "plan") -> "torch.Tensor":
    """Return a copy of host memory on a device, made in the order of its current stream.

    The staging memory is torch's, which hands it out again when the copy is done.

    Raises
    ------
    StateError
        If a graph is being captured: its replays would copy whatever is in the staging memory then.
    """
    import torch

    if device.type in LAUNCHERS and launcher_of(device).is_capturing():
        raise StateError(f"{argument}: expected memory on {device} while a graph is being captured, found the host's")
    tensor = torch.as_tensor(array)
    if device.type != "cuda":
        return tensor.to(device, copy=True)
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    staged.copy_(tensor)
    return staged.to(device, non_blocking=True)
