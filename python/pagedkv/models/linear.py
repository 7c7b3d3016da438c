"""Products with weights that stay as they are: laid out once, in the order in which oneDNN multiplies them."""

from __future__ import annotations

import torch
from torch.nn import functional

from pagedkv.models.padding import compiles_products


class Linear:
    """A product with a matrix, and what is done to its results before they are written.

    In bfloat16, where the CPU multiplies it, the matrix is kept in oneDNN's order alone; else as it is.

    Parameters
    ----------
    weight : torch.Tensor, shape (num_outputs, num_inputs)
        The matrix.
    bias : torch.Tensor, shape (num_outputs,), optional
        Added to each row.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._is_packed = compiles_products(weight.dtype, weight.device) and _can_pack()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self._is_packed else weight
        self._bias = bias

    @property
    def memory(self) -> tuple[int, int]:
        """Where the matrix lies: an address, and a number of bytes."""
        if self._is_packed:
            return torch.ops.mkldnn.data_ptr(self._weight), torch.ops.mkldnn._nbytes(self._weight)
        return self._weight.data_ptr(), self._weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of rows with the matrix."""
        return self._fused(x, "none") if self._is_packed else functional.linear(x, self._weight, self._bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, each element times its sigmoid."""
        if self._is_packed:
            return self._fused(x, "swish")
        return functional.silu(self(x), inplace=True)

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return the product, times a tensor of its shape."""
        return self._fused_with(x, factor, "mul") if self._is_packed else self(x).mul_(factor)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the product plus a tensor of its shape."""
        if self._is_packed:
            return self._fused_with(x, residual, "add")
        if self._bias is None:
            return torch.addmm(residual, x, self._weight.t())
        return self(x).add_(residual)

    def _fused(self, x: torch.Tensor, what: str) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, what, [], "")
        return out

    def _fused_with(self, x: torch.Tensor, other: torch.Tensor, what: str) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, what)
        return out


def _can_pack() -> bool:
    """Whether this build of torch has the operations that its own compiler packs weights by."""
    return torch._C._has_mkldnn and all(
        hasattr(torch.ops.mkldnn, name)
        for name in ("_reorder_linear_weight", "_linear_pointwise", "data_ptr", "_nbytes")
    )
