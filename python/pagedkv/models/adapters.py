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
from pagedkv.models.padding import padded_rows

_ARGUMENT = "lora_request"


@dataclass(frozen=True, slots=True)
class _Part:
    """The tokens of a step that run with one adapter; all of them where `rows` is None."""

    layers: Mapping[str, LowRank]
    rows: torch.Tensor | None


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
        self._num_rows = (0, 0)

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
        self._num_rows = (len(of_token), padded_rows(len(of_token)))
        try:
            for adapter in np.unique(of_token[of_token > 0]).tolist():
                is_own = of_token == adapter
                rows = None if is_own.all() else torch.from_numpy(np.flatnonzero(is_own)).to(self._model.device)
                self._parts.append(_Part(self._adapters[adapter], rows))
            yield
        finally:
            self._parts = []

    def _add_deltas(self, name: str, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        parts = [part for part in self._parts if name in part.layers]
        if not parts:
            return
        x, out = (found.view(-1, found.shape[-1]) for found in (inputs[0], output))
        if len(x) not in self._num_rows:
            raise UnsupportedError(
                f"{_ARGUMENT}: expected {name} to see each of {self._num_rows[0]} tokens once, found {len(x)} rows in"
                f" {type(module).__name__}"
            )
        for part in parts:
            own = part.layers[name]
            if part.rows is None:
                out += linear(linear(x, own.down), own.up) * own.scale
            else:
                out.index_add_(0, part.rows, linear(linear(x[part.rows], own.down), own.up) * own.scale)

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
