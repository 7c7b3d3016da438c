"""What a model's `config.json` says of its attention layers, under the many names that Hugging Face models use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.planning.layers import LayerShape
from pagedkv.planning.parameters import count_parameters
from pagedkv.planning.windows import windows_of

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "kv_n_heads", "n_head_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM = ("head_dim", "kv_channels", "head_size")
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length")
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_ESTIMATED = "weights are estimated from the configuration; --weights gives their bytes"
# What no model comes near, and what planning, which looks at each layer, still does at once.
_MOST_LAYERS = 100_000
_MOST = 2**31 - 1
_WITHOUT_KEYS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "moe", "mlp"}


@dataclass(frozen=True)
class ModelConfig:
    """What planning needs of a model.

    Parameters
    ----------
    name : str
        What it is called.
    layers : dict of int to LayerShape
        What each layer that attends keeps of a token.
    num_q_heads : int
        Query heads.
    dtype : str
        Element type of the weights.
    max_model_len : int or None
        Longest sequence that it was made for.
    weight_bytes : int
        Bytes of its weights.
    weights_are_estimated : bool
        Whether they were counted from the configuration, since no weights lie beside it.
    notes : list of str
        What was assumed.
    """

    name: str
    layers: dict[int, LayerShape]
    num_q_heads: int
    dtype: str
    max_model_len: int | None
    weight_bytes: int
    weights_are_estimated: bool
    notes: list[str] = field(default_factory=list)

    def with_weights(self, weight_bytes: int) -> ModelConfig:
        """Return it with weights of these bytes, which are no estimate."""
        notes = [note for note in self.notes if note != _ESTIMATED]
        return replace(self, weight_bytes=weight_bytes, weights_are_estimated=False, notes=notes)


def read_model_config(source: str | PathLike[str] | Mapping[str, Any]) -> ModelConfig:
    """Read the configuration of a model.

    Parameters
    ----------
    source : path or mapping
        A `config.json`, a folder that has one, or its content.

    Raises
    ------
    InvalidArgumentError
        For a file that is none, or a field that is missing, no number or beyond any model's, by its name.
    UnsupportedError
        For an encoder, or a model none of whose layers keeps keys and values.

    Examples
    --------
    >>> model = read_model_config({"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512})
    >>> len(model.layers), model.layers[0].num_kv_heads, model.layers[0].head_dim
    (2, 8, 64)
    """
    folder: Path | None = None
    if isinstance(source, Mapping):
        content = dict(source)
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        content, folder = _load(path), path.parent
    text = _text_part(content)
    fields = _Fields(text)
    if content.get("is_encoder_decoder"):
        raise UnsupportedError("model: has an encoder (is_encoder_decoder), whose cache is not that of a decoder")
    notes: list[str] = []
    num_layers, num_heads = fields.whole(_LAYERS, _MOST_LAYERS), fields.whole(_HEADS)
    num_kv_heads, head_dim = _kept(fields, num_heads, notes)
    windows = windows_of(text, num_layers, notes)
    layers = {
        layer: LayerShape(num_kv_heads, head_dim, windows[layer]) for layer in _attending(text, num_layers, notes)
    }
    if not layers:
        raise UnsupportedError("model: none of its layers keeps keys and values")
    dtype = _dtype(content, text, notes)
    weight_bytes = None if folder is None else _weights_beside(folder)
    estimated = weight_bytes is None
    if weight_bytes is None:
        weight_bytes = count_parameters(text, num_layers, num_heads, num_kv_heads, head_dim) * _ITEM_BYTES[dtype]
        notes.append(_ESTIMATED)
    longest = fields.optional(_LONGEST)
    name = str(content.get("_name_or_path") or content.get("model_type") or "model")
    return ModelConfig(name, layers, num_heads, dtype, longest, weight_bytes, estimated, notes)


class _Fields:
    """Whole numbers of a configuration, found under one of several names; some models keep a few in a part of it."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._parts = [content, *(content[name] for name in ("attn_config",) if isinstance(content.get(name), Mapping))]

    def optional(self, names: Iterable[str], most: int = _MOST) -> int | None:
        for part in self._parts:
            for name in names:
                value = part.get(name)
                if value is None:
                    continue
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise InvalidArgumentError(f"model: {name}: expected a whole number of at least 1, found {value!r}")
                if value > most:
                    raise InvalidArgumentError(f"model: {name}: expected at most {most:,}, found {value}")
                return value
        return None

    def whole(self, names: tuple[str, ...], most: int = _MOST) -> int:
        value = self.optional(names, most)
        if value is None:
            raise InvalidArgumentError(f"model: expected {names[0]} (or {', '.join(names[1:])}), found none of them")
        return value

    def is_set(self, name: str) -> bool:
        return bool(self._parts[0].get(name))


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise InvalidArgumentError(
            f"model: expected a config.json, or a folder that has one, found none at {path}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"model: expected JSON, found {path}: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"model: expected an object of JSON, found {type(content).__name__} in {path}")
    return content


def _text_part(content: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a model of several kinds of input that describes its decoder."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        part = content.get(name)
        if isinstance(part, dict):
            return _text_part(part)
    return content


def _kept(fields: _Fields, num_heads: int, notes: list[str]) -> tuple[int, int]:
    """Return the KV heads of a layer and their dimension."""
    rank = fields.optional(("kv_lora_rank",))
    if rank is not None:
        rope = fields.optional(("qk_rope_head_dim",)) or 0
        notes.append(
            f"latent attention: {rank} + {rope} elements a token and layer; no kernel of this package reads them"
        )
        # Keys and values are one latent vector; halves of it stand for both.
        return 1, -(-(rank + rope) // 2)
    head_dim = fields.optional(_HEAD_DIM)
    if head_dim is None:
        head_dim = fields.whole(_HIDDEN) // num_heads
    num_kv_heads = fields.optional(_KV_HEADS)
    old_falcon = fields.is_set("multi_query") and not fields.is_set("new_decoder_architecture")
    if old_falcon or (num_kv_heads is None and fields.is_set("multi_query")):
        num_kv_heads = 1
    return num_kv_heads or num_heads, head_dim


def _attending(text: Mapping[str, Any], num_layers: int, notes: list[str]) -> list[int]:
    """Return the layers that keep keys and values."""
    kinds = text.get("layer_types") or text.get("layers_block_type") or []
    period, offset = text.get("attn_layer_period"), text.get("attn_layer_offset", 0)
    found = list(range(num_layers))
    if kinds:
        found = [layer for layer, kind in enumerate(kinds[:num_layers]) if kind not in _WITHOUT_KEYS]
    elif isinstance(period, int) and period > 0:
        found = [layer for layer in found if layer % period == offset]
    if len(found) < num_layers:
        notes.append(
            f"{num_layers - len(found)} of {num_layers} layers keep a state instead of keys; it is not counted"
        )
    shared = text.get("num_kv_shared_layers") or 0
    if shared:
        notes.append(f"the last {shared} layers read what earlier ones keep")
        found = [layer for layer in found if layer < num_layers - shared]
    return found


def _dtype(content: Mapping[str, Any], text: Mapping[str, Any], notes: list[str]) -> str:
    given = text.get("dtype") or text.get("torch_dtype") or content.get("dtype") or content.get("torch_dtype")
    name = str(given).removeprefix("torch.")
    if name in _ITEM_BYTES:
        return name
    notes.append(f"no element type that a cache has (found {given!r}): bfloat16 is assumed")
    return "bfloat16"


def _weights_beside(folder: Path) -> int | None:
    """Return the bytes of the weights that lie in a folder, None where there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        total = json.loads(index.read_text()).get("metadata", {}).get("total_size")
        if isinstance(total, int):
            return total
    files = list(folder.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) or None
