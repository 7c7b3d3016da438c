"""How many parameters a model has, by its configuration; an estimate for who has no weights at hand."""

from collections.abc import Mapping
from typing import Any


def count_parameters(text: Mapping[str, Any], num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the parameters of a decoder: embeddings, projections of attention, and feed-forward layers.

    Parameters
    ----------
    text : mapping
        Configuration of a decoder.
    num_layers, num_heads, num_kv_heads, head_dim : int
        What was found in it.

    Examples
    --------
    Llama 2 7B has 6.74 billion:

    >>> llama = {"hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000, "hidden_act": "silu"}
    >>> round(count_parameters(llama, 32, 32, 32, 128) / 1e9, 2)
    6.74
    """

    def number(*names: str, default: int) -> int:
        found = next((text[name] for name in names if isinstance(text.get(name), int)), default)
        return int(found)

    hidden = number("hidden_size", "n_embd", "d_model", default=num_heads * head_dim)
    inner = number("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", default=4 * hidden)
    vocabulary = number("vocab_size", "padded_vocab_size", default=0)
    named = (text.get(name) for name in ("hidden_act", "hidden_activation", "activation_function", "activation"))
    # Where none is named it is transformers' default, which is gated for those that call their width so.
    default = "silu" if "intermediate_size" in text else ""
    activation = next((str(found) for found in named if found), default)
    matrices = 3 if activation in {"silu", "swish", "gelu_pytorch_tanh"} or "glu" in activation else 2
    experts = number("num_local_experts", "num_experts", "n_routed_experts", default=0)
    attention = hidden * head_dim * (2 * num_heads + 2 * num_kv_heads)
    dense = matrices * hidden * inner
    if experts:
        expert = number("moe_intermediate_size", default=inner)
        shared = number("n_shared_experts", "num_shared_experts", default=0)
        sparse = matrices * hidden * expert * (experts + shared) + hidden * experts
        num_dense = min(number("first_k_dense_replace", default=0), num_layers)
        feed_forward = num_dense * dense + (num_layers - num_dense) * sparse
    else:
        feed_forward = num_layers * dense
    tied = bool(text.get("tie_word_embeddings", False))
    positions = number("max_position_embeddings", "n_positions", default=0) if "word_embed_proj_dim" in text else 0
    return (1 if tied else 2) * vocabulary * hidden + positions * hidden + num_layers * attention + feed_forward
