"""Models and tokenizers from a folder, a GGUF file, or as they are."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kv_cache.checks import check_is_there, device_name
from pagedkv.models.dtypes import fastest_dtype
from pagedkv.models.gguf_file import architecture
from pagedkv.models.gguf_llama import ARCHITECTURES, GGUFLlama
from pagedkv.models.transformers import TransformersModel

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    model: PreTrainedModel | str | PathLike[str], tokenizer: Any = None, dtype: str | torch.dtype = "auto"
) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer.

    Parameters
    ----------
    model : transformers.PreTrainedModel, str or path
        A model, taken as it is; or the folder of one, a ``.gguf`` file, or a name that transformers knows.
    tokenizer : tokenizer, str or path, optional
        A tokenizer, taken as it is, or where to load one; by default it is loaded from where the model is. A model that
        is taken as it is has none then.
    dtype : str or torch.dtype
        "auto", "float32", "float16" or "bfloat16". "auto" is the type that the weights are stored in. Those of a
        GGUF file are unpacked, into bfloat16 where the CPU multiplies it in hardware and float32 elsewhere.

    Returns
    -------
    model : transformers.PreTrainedModel
        The model, in evaluation mode if it was loaded.
    tokenizer : transformers.PreTrainedTokenizerBase or None
        The tokenizer.

    Raises
    ------
    InvalidArgumentError
        If there is no such file, it can't be loaded, or `dtype` is unknown or not that of the model taken as it is.
    """
    dtype = _dtype(dtype)
    if not isinstance(model, str | PathLike):
        if not isinstance(model, PreTrainedModel):
            raise InvalidArgumentError(
                f"model: expected a model of transformers, a folder, a GGUF file or a name, found {model!r}"
            )
        if dtype not in ("auto", model.dtype):
            raise InvalidArgumentError(f"dtype: expected that of the given model, {model.dtype}, found {dtype}")
        return model, _load_tokenizer(tokenizer)
    source, options = _locate("model", model)
    tokenizer = _load_tokenizer(model if tokenizer is None else tokenizer)
    if dtype == "auto" and options:
        dtype = fastest_dtype()
    return _from("model", AutoModelForCausalLM, source, options, dtype=dtype), tokenizer


def open_model(
    model: PreTrainedModel | str | PathLike[str],
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    *,
    device: str | torch.device | None = None,
    for_adapters: bool = False,
    **storage: Any,
) -> tuple[TransformersModel | GGUFLlama, Any]:
    """Load a model that runs step plans, and its tokenizer.

    Parameters
    ----------
    model, tokenizer, dtype
        As for `load_model`. On the CPU a GGUF file of Llama's or Qwen2's architecture is run by `GGUFLlama`, all else
        by transformers.
    device : str or torch.device, optional
        Where the model is to be: "cpu", "cuda" or "cuda:N"; by default where a given model is, and the CPU for others.
    for_adapters : bool
        Whether adapters will be added, so that transformers runs every model.
    **storage
        `kv_cache_dtype`, `k_scale` and `v_scale`, as for `TransformersModel`.

    Returns
    -------
    model : TransformersModel or GGUFLlama
        The model over a paged cache.
    tokenizer : transformers.PreTrainedTokenizerBase or None
        The tokenizer.

    Raises
    ------
    UnsupportedError, InvalidArgumentError
        If there is no such device, or a given model is on another one.
    """
    place = find_device(device)
    if isinstance(model, str | PathLike) and place.type == "cpu" and not for_adapters:
        source, options = _locate("model", model)
        if options and architecture(path := Path(source) / options["gguf_file"]) in ARCHITECTURES:
            tokenizer = _load_tokenizer(model if tokenizer is None else tokenizer)
            chosen = _dtype(dtype)
            chosen = fastest_dtype() if isinstance(chosen, str) else chosen
            return GGUFLlama(path, chosen, **storage), tokenizer
    loaded, tokenizer = load_model(model, tokenizer, dtype)
    if isinstance(model, str | PathLike):
        loaded = torch.nn.Module.to(loaded, place)
    elif device is not None and not _is_at(loaded.device, place):
        raise InvalidArgumentError(f"device: expected that of the given model, {loaded.device}, found {place}")
    return TransformersModel(loaded, **storage), tokenizer


def find_device(device: str | torch.device | None) -> torch.device:
    """Return a device by its name, the CPU by default.

    Parameters
    ----------
    device : str or torch.device, optional
        "cpu", "cuda" or "cuda:N".

    Returns
    -------
    torch.device
        The device.

    Raises
    ------
    UnsupportedError
        If it is of another kind.
    InvalidArgumentError
        If torch finds no such GPU.
    """
    check_is_there(name := device_name(device or "cpu"))
    place = torch.device(name)
    return place if place.type == "cpu" else torch.device(place.type, place.index or 0)


def _is_at(found: torch.device, wanted: torch.device) -> bool:
    return found.type == wanted.type and (found.index or 0) == (wanted.index or 0)


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or dtype in _DTYPES.values():
        return dtype
    found = _DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise InvalidArgumentError(f"dtype: expected one of auto, {', '.join(_DTYPES)}, found {dtype!r}")
    return found


def _locate(argument: str, name: str | PathLike[str]) -> tuple[str, dict[str, str]]:
    """Return what to give `from_pretrained`, and its options: a GGUF file is a folder and a file in it."""
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise InvalidArgumentError(f"{argument}: expected a GGUF file, found none at {path}")
        return str(path.parent), {"gguf_file": path.name}
    # No name of a model begins like these.
    is_path = isinstance(name, PathLike) or path.is_file() or str(name).startswith((".", "/", "~"))
    if is_path and not path.is_dir():
        raise InvalidArgumentError(f"{argument}: expected a folder or a GGUF file, found none at {path}")
    return str(path if path.is_dir() else name), {}


def _load_tokenizer(tokenizer: Any) -> Any:
    if not isinstance(tokenizer, str | PathLike):
        return tokenizer
    return _from("tokenizer", AutoTokenizer, *_locate("tokenizer", tokenizer))


def _from(argument: str, factory: Any, source: str, options: dict[str, str], **more: Any) -> Any:
    try:
        return factory.from_pretrained(source, **options, **more)
    except (OSError, ValueError) as error:  # transformers tells all that is wrong with a folder or a name by these
        where = f"{source}/{options['gguf_file']}" if options else source
        raise InvalidArgumentError(
            f"{argument}: expected what transformers can load, found {where}: {error}"
        ) from error
