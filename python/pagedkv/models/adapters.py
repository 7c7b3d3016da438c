"""Low-rank adapters beside the layers of a model of transformers, several in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.models.lora_files import LowRank
from pagedkv.models.padding import compiles_products, padded_rows

_ARGUMENT = "lora_request"


@dataclass(frozen=True, slots=True)
class _Part:
    """The tokens of a step that run with one adapter; all of them where `rows` is None.

    `rows` is filled up as steps are; the first `num_rows` count.
    """

    layers: Mapping[str, LowRank]
    rows: torch.Tensor | None
    num_rows: int


class Adapters:
    """Adds to the outputs of a model's linear layers what adapters say, each for its own tokens.

    The model is not changed: a hook on each layer that an adapter has adds nothing but during a step.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The base model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._adapters: dict[int, dict[str, LowRank]] = {}
        self._hooks: dict[str, Any] = {}
        self._parts: list[_Part] = []
        self._pads = compiles_products(model.dtype, model.device)
        self._num_rows = 0

    def add(self, adapter: int, layers: Mapping[str, LowRank]) -> None:
        """Take an adapter.

        Parameters
        ----------
        adapter : int
            Its number, from 1.
        layers : mapping of str to LowRank
            What it adds, by the name of the layer.

        Raises
        ------
        InvalidArgumentError
            If the model has no such layer, or one of another shape.
        UnsupportedError
            If a layer is of a kind that adapters are not implemented for.
        """
        modules = {name: self._layer(name, own) for name, own in layers.items()}
        self._adapters[adapter] = {
            name: LowRank(own.down.to(modules[name].weight), own.up.to(modules[name].weight), own.scale)
            for name, own in layers.items()
        }
        for name, module in modules.items():
            if name not in self._hooks:
                self._hooks[name] = module.register_forward_hook(partial(self._add_deltas, name))

    def remove(self, adapter: int) -> None:
        """Drop an adapter, and the hooks of layers that no other has."""
        del self._adapters[adapter]
        kept = {name for layers in self._adapters.values() for name in layers}
        for name in self._hooks.keys() - kept:
            self._hooks.pop(name).remove()

    def close(self) -> None:
        """Drop all adapters; the model is as it was given."""
        for adapter in list(self._adapters):
            self.remove(adapter)

    @contextmanager
    def step(self, adapters: NDArray[np.int64], num_tokens: NDArray[np.int32]) -> Iterator[None]:
        """Say which adapter each token of a forward pass runs with.

        Parameters
        ----------
        adapters : numpy.ndarray, shape (num_sequences,), int64
            The adapter of each sequence, 0 for none.
        num_tokens : numpy.ndarray, shape (num_sequences,), int32
            New tokens of each sequence.
        """
        of_token = np.repeat(adapters, num_tokens)
        self._num_rows = self._padded(len(of_token))
        try:
            for adapter in np.unique(of_token[of_token > 0]).tolist():
                own = np.flatnonzero(of_token == adapter)
                rows = None
                if len(own) < len(of_token):
                    filled = np.pad(own, (0, self._padded(len(own)) - len(own)))
                    rows = torch.from_numpy(filled).to(self._model.device)
                self._parts.append(_Part(self._adapters[adapter], rows, len(own)))
            yield
        finally:
            self._parts = []

    def _add_deltas(self, name: str, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        parts = [part for part in self._parts if name in part.layers]
        if not parts:
            return
        x, out = (found.view(-1, found.shape[-1]) for found in (inputs[0], output))
        if len(x) != self._num_rows:
            raise UnsupportedError(
                f"{_ARGUMENT}: expected {name} to see each of {self._num_rows} tokens once, found {len(x)} rows in"
                f" {type(module).__name__}"
            )
        for part in parts:
            own = part.layers[name]
            if part.rows is None:
                out += linear(linear(x, own.down), own.up) * own.scale
            else:
                delta = linear(linear(x[part.rows], own.down), own.up) * own.scale
                out.index_add_(0, part.rows[: part.num_rows], delta[: part.num_rows])

    def _padded(self, count: int) -> int:
        return padded_rows(count) if self._pads else count

    def _layer(self, name: str, own: LowRank) -> Any:
        try:
            module = self._model.get_submodule(name)
        except AttributeError:
            raise InvalidArgumentError(
                f"{_ARGUMENT}: expected layers of {type(self._model).__name__}, found {name}, which it has not"
            ) from None
        if not isinstance(module, torch.nn.Linear | Conv1D):
            raise UnsupportedError(
                f"{_ARGUMENT}: expected linear layers, found {name}, which is a {type(module).__name__}"
            )
        if module is self._model.get_output_embeddings():  # type: ignore[no-untyped-call]
            raise UnsupportedError(f"{_ARGUMENT}: expected no adapter of the output layer, found one of {name}")
        if ".experts." in name:
            raise UnsupportedError(f"{_ARGUMENT}: expected no adapter of experts, found one of {name}")
        weight = module.weight.shape
        expected = tuple(weight) if isinstance(module, torch.nn.Linear) else tuple(reversed(weight))
        if (found := (own.up.shape[0], own.down.shape[1])) != expected:
            raise InvalidArgumentError(
                f"{_ARGUMENT}: expected {expected[0]} outputs and {expected[1]} inputs for {name}, found {found[0]} and"
                f" {found[1]}"
            )
        return module
