"""Which layers of a model see a window only."""

from collections.abc import Mapping
from typing import Any


def windows_of(text: Mapping[str, Any], num_layers: int, notes: list[str]) -> list[int | None]:
    """Return the window of each layer in tokens, None for those that see everything.

    Parameters
    ----------
    text : mapping
        Configuration of a decoder.
    num_layers : int
        Its layers.
    notes : list of str
        Where assumptions are added.

    Examples
    --------
    >>> windows_of({"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}, 2, [])
    [32, None]
    >>> windows_of({"sliding_window": 32, "use_sliding_window": False}, 2, [])
    [None, None]
    >>> windows_of({"sliding_window": 8, "sliding_window_pattern": 3}, 4, [])
    [8, 8, None, 8]
    """
    window = text.get("sliding_window")
    chunk = text.get("attention_chunk_size")
    kinds = text.get("layer_types") or []
    if kinds:
        of_kind = {"sliding_attention": window, "chunked_attention": chunk}
        if "chunked_attention" in kinds:
            notes.append("layers that see chunks are counted as windows of their length")
        return [of_kind.get(kind) for kind in kinds[:num_layers]] + [None] * (num_layers - len(kinds))
    if not isinstance(window, int) or window < 1 or text.get("use_sliding_window") is False:
        return [None] * num_layers
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 1:
        return [None if (layer + 1) % pattern == 0 else window for layer in range(num_layers)]
    if text.get("model_type") == "gemma2":
        return [window if layer % 2 == 0 else None for layer in range(num_layers)]
    # Qwen 2 gives windows to the layers from this one on.
    first = text.get("max_window_layers", 0) if text.get("use_sliding_window") else 0
    return [window if layer >= first else None for layer in range(num_layers)]
