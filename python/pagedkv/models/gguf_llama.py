"""A Llama or Qwen2 from a GGUF file, without transformers: a handful of operations per layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from pagedkv.attention.row_ops import rms_norm, rotary_embedding
from pagedkv.exceptions import UnsupportedError
from pagedkv.models.gguf_file import GGUFFile
from pagedkv.models.huge_pages import use_huge_pages
from pagedkv.models.linear import Linear
from pagedkv.models.metadata import AttentionMetadata
from pagedkv.models.padding import compiles_products, pad_step
from pagedkv.models.storage import choose_storage
from pagedkv.planning.layers import LayerShape, group_layers

if TYPE_CHECKING:
    from pagedkv.config import GroupSpec
    from pagedkv.kv_cache import KVCache

ARCHITECTURES = ("llama", "qwen2")

# Rows that pass through a layer together, but for attention: what lies between its products is small enough then for
# malloc to keep the memory, which would else come back from the system page by page.
_ROWS = 2048


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    out: Linear
    gate: Linear
    up: Linear
    down: Linear


class GGUFLlama:
    """A decoder of Llama's architecture, with its weights unpacked and its keys and values in a paged cache.

    It has the methods of `TransformersModel`. Queries, keys and values are one product; residuals are added and
    gates multiplied within products, and the weights of a norm are multiplied into those of the product behind it.

    Parameters
    ----------
    path : str or path
        The GGUF file, of architecture "llama" or "qwen2".
    dtype : torch.dtype
        Element type of the weights.
    kv_cache_dtype, k_scale, v_scale
        As for `TransformersModel`.

    Attributes
    ----------
    layers, dtype, vocab_size, max_model_len, device
        As those of `TransformersModel`.

    Raises
    ------
    UnsupportedError
        If the file's model is another, has experts, or scales its positions in a way that is not implemented.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        dtype: torch.dtype = torch.float32,
        *,
        kv_cache_dtype: str | torch.dtype = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        file = GGUFFile(path, dtype)
        if file.architecture not in ARCHITECTURES:
            raise UnsupportedError(f"model: expected one of {', '.join(ARCHITECTURES)}, found {file.architecture!r}")
        if file.size("expert_count", 0):
            raise UnsupportedError(f"model: expected no experts, found {file.size('expert_count')}")
        self._storage = choose_storage(kv_cache_dtype, k_scale, v_scale, str(dtype).removeprefix("torch."))
        self.dtype = self._storage.dtype
        self.device = torch.device("cpu")
        self._pads_steps = compiles_products(dtype, self.device)
        self.max_model_len: int | None = int(file.size("context_length"))
        self._num_q_heads = int(file.size("attention.head_count"))
        self._num_kv_heads = int(file.size("attention.head_count_kv", self._num_q_heads))
        hidden_size = int(file.size("embedding_length"))
        self._head_dim = int(file.size("attention.key_length", hidden_size // self._num_q_heads))
        if (value_dim := file.size("attention.value_length", self._head_dim)) != self._head_dim:
            raise UnsupportedError(f"model: expected values of {self._head_dim} elements, as keys, found {value_dim}")
        self._window = file.size("attention.sliding_window", 0) or None
        self._eps = float(file.size("attention.layer_norm_rms_epsilon"))
        self._frequencies = _frequencies(file, self._head_dim)
        self._embedding = file.tensor("token_embd.weight")
        self.vocab_size = len(self._embedding)
        self._layers = [self._read_layer(file, number, dtype) for number in range(int(file.size("block_count")))]
        head = "output.weight" if file.has("output.weight") else "token_embd.weight"
        self._head = Linear(_behind_norm(file, "output_norm.weight", [head], dtype))
        file.check_all_read()
        products = [getattr(layer, part.name) for layer in self._layers for part in fields(_Layer)]
        use_huge_pages(product.memory for product in [*products, self._head])
        shape = LayerShape(self._num_kv_heads, self._head_dim, self._window)
        self.layers = dict.fromkeys(range(len(self._layers)), shape)
        ends = (file.field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        self.eos_token_ids = frozenset(int(end) for end in ends if end is not None)

    def cache_groups(self, max_model_len: int | None = None) -> list[GroupSpec]:
        """Return the cache groups that the model needs: one.

        Parameters
        ----------
        max_model_len : int, optional
            Longest sequence. A window that holds it is none.

        Returns
        -------
        list of GroupSpec
            For `CacheConfig`.
        """
        return group_layers(self.layers, self.dtype, max_model_len or self.max_model_len)

    @torch.inference_mode()
    def forward(
        self, plan: Any, kv_cache: KVCache, previous_tokens: torch.Tensor | None = None, rows: Any = None
    ) -> torch.Tensor:
        """Run the tokens of a plan.

        Parameters
        ----------
        plan, kv_cache, previous_tokens, rows
            As for `TransformersModel.forward`.

        Returns
        -------
        torch.Tensor, shape (num_rows, vocab_size)
            Logits, in the type of the weights.
        """
        num_wanted = len(plan.sample_rows if rows is None else rows)
        if self._pads_steps:
            plan, rows = pad_step(plan, rows)
        token_ids = from_dlpack(plan.token_ids)
        if previous_tokens is not None and len(previous_tokens):
            source = from_dlpack(plan.input_from).long()
            token_ids = torch.where(source < 0, token_ids, previous_tokens[source.clamp(min=0)])
        sample_rows = from_dlpack(plan.sample_rows) if rows is None else torch.from_numpy(rows)
        scales = {"k_scale": self._storage.k_scale, "v_scale": self._storage.v_scale}
        step = AttentionMetadata.from_plan(plan, kv_cache, **scales)
        angles = from_dlpack(plan.positions)[:, None].float() * self._frequencies
        # Rounded to the type of the weights, as transformers does it.
        cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(self._embedding.dtype).float()
        parts = list(torch.split(self._embedding[token_ids], _ROWS))
        heads = self._embedding.new_empty((len(token_ids), self._num_q_heads + 2 * self._num_kv_heads, self._head_dim))
        *layers, last = self._layers
        for number, layer in enumerate(layers):
            parts = self._rest_of_layer(layer, self._attend(number, layer, parts, heads, cos_sin, step), parts)
        # Behind the last attention only rows of which logits are wanted go on.
        attended = self._attend(len(layers), last, parts, heads, cos_sin, step)[sample_rows]
        parts = self._rest_of_layer(last, attended, list(torch.split(torch.cat(parts)[sample_rows], _ROWS)))
        return self._head(self._normed(torch.cat(parts)))[:num_wanted]

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(x)
        rms_norm(x, normed, eps=self._eps)
        return normed

    def _attend(
        self,
        number: int,
        layer: _Layer,
        parts: list[torch.Tensor],
        heads: torch.Tensor,
        cos_sin: torch.Tensor,
        step: AttentionMetadata,
    ) -> torch.Tensor:
        """Return what all rows attend to, of shape (num_tokens, num_q * head_dim); `heads` is room for a layer's."""
        num_q, num_turned = self._num_q_heads, self._num_q_heads + self._num_kv_heads
        for x, angles, room in zip(parts, torch.split(cos_sin, _ROWS), torch.split(heads, _ROWS), strict=True):
            qkv = layer.qkv(self._normed(x)).view(room.shape)
            rotary_embedding(qkv, angles, room, num_turned_heads=num_turned)
        attended = step.attend(
            number,
            heads[:, :num_q],
            heads[:, num_q:num_turned],
            heads[:, num_turned:],
            softmax_scale=self._head_dim**-0.5,
            sliding_window=self._window,
            soft_cap=None,
            sinks=None,
        )
        return attended.reshape(len(heads), num_q * self._head_dim)

    def _rest_of_layer(self, layer: _Layer, attended: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the rows behind a layer, in the same parts."""
        found = []
        for rows, part in zip(torch.split(attended, _ROWS), parts, strict=True):
            x = layer.out.plus(rows, part)
            normed = self._normed(x)
            found.append(layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), x))
        return found

    def _read_layer(self, file: GGUFFile, number: int, dtype: torch.dtype) -> _Layer:
        block = f"blk.{number}"
        heads = {"attn_q": self._num_q_heads, "attn_k": self._num_kv_heads} if file.architecture == "llama" else {}
        names = ("attn_q", "attn_k", "attn_v")
        qkv = _behind_norm(
            file, f"{block}.attn_norm.weight", [f"{block}.{name}.weight" for name in names], dtype, heads
        )
        bias = None
        if file.has(f"{block}.attn_q.bias"):
            biases = [_in_halves(file.tensor(f"{block}.{name}.bias"), heads.get(name)) for name in names]
            bias = torch.cat(biases)
        norm = f"{block}.ffn_norm.weight"
        return _Layer(
            Linear(qkv, bias),
            Linear(file.tensor(f"{block}.attn_output.weight")),
            Linear(_behind_norm(file, norm, [f"{block}.ffn_gate.weight"], dtype)),
            Linear(_behind_norm(file, norm, [f"{block}.ffn_up.weight"], dtype)),
            Linear(file.tensor(f"{block}.ffn_down.weight")),
        )


def _behind_norm(
    file: GGUFFile, norm: str, names: list[str], dtype: torch.dtype, heads: dict[str, int] | None = None
) -> torch.Tensor:
    """Return weights of products as one, with those of the norm before them multiplied in before they are rounded."""
    weights = []
    for name in names:
        weight = file.tensor(name, torch.float32)
        weights.append(_in_halves(weight, (heads or {}).get(name.split(".")[-2])))
    return (torch.cat(weights) * file.tensor(norm, torch.float32)).to(dtype)


def _in_halves(weight: torch.Tensor, num_heads: int | None) -> torch.Tensor:
    """Undo llama.cpp's order of rows: elements that turn together lie half a head apart, not side by side."""
    if num_heads is None:
        return weight
    head_dim = len(weight) // num_heads
    return weight.view(num_heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def _frequencies(file: GGUFFile, head_dim: int) -> torch.Tensor:
    """Return by how much each pair of elements turns per position."""
    if (turned := file.size("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedError(f"model: expected all {head_dim} elements of a head to turn, found {turned}")
    base = float(file.size("rope.freq_base", 10000.0))
    frequencies = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scaling = file.size("rope.scaling.type", "none")
    if scaling == "linear":
        frequencies /= float(file.size("rope.scaling.factor"))
    elif scaling != "none":
        raise UnsupportedError(f"model: expected positions without scaling, or linear, found {scaling!r}")
    if file.has("rope_freqs.weight"):
        frequencies /= file.tensor("rope_freqs.weight", torch.float32)
    return frequencies
