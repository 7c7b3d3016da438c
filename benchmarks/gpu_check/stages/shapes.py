"""The shapes that are timed: caches of several layers in shuffled blocks, filled with random numbers."""

from dataclasses import dataclass
from typing import Any

import torch

import pagedkv

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """A batch over some layers, which are used one after another.

    Attributes
    ----------
    num_seqs, seq_len, num_queries : int
        Sequences, the tokens of each, and how many of them are queries, the last ones.
    num_layers : int
        So many that what one of them left in the second-level cache is gone when its turn comes again.
    """

    num_seqs: int
    seq_len: int
    num_queries: int = 1
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    num_layers: int = 4

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one layer."""
        item = getattr(torch, self.dtype).itemsize
        return 2 * self.num_seqs * self.seq_len * self.num_kv_heads * self.head_dim * item

    @property
    def bytes_moved(self) -> int:
        """Bytes that attention over one layer must move: keys and values once, queries and results."""
        rows = self.num_seqs * self.num_queries * self.num_q_heads * self.head_dim
        return self.kv_bytes + 2 * rows * torch.bfloat16.itemsize

    @property
    def flops(self) -> float:
        """Operations of causal attention over one layer: two products, for each pair of a query and a key it sees."""
        context = self.seq_len - self.num_queries
        pairs = self.num_queries * context + self.num_queries * (self.num_queries + 1) / 2
        return 4.0 * self.num_seqs * self.num_q_heads * self.head_dim * pairs


class PagedBatch:
    """Our side of a shape.

    Parameters
    ----------
    shape : Shape
        The shape.
    device : str
        Where to make it.
    """

    def __init__(self, shape: Shape, device: str) -> None:
        torch.manual_seed(0)
        self.shape = shape
        width = -(-shape.seq_len // BLOCK_SIZE)
        num_blocks = shape.num_seqs * width + 1
        sizes = (num_blocks, BLOCK_SIZE, shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype)
        self.cache = pagedkv.KVCache(*sizes, max_num_seqs=shape.num_seqs, max_blocks_per_seq=width, device=device)
        self.layers = [self.cache.layer(layer) for layer in range(shape.num_layers)]
        for k_and_v in self.layers:
            for array in k_and_v:
                array.copy_(torch.randn(array.shape, device=device, dtype=torch.bfloat16))
        table = torch.randperm(num_blocks - 1).add(1).int().reshape(shape.num_seqs, width)
        self.table = table.to(device)
        self.seq_lens = torch.full((shape.num_seqs,), shape.seq_len, dtype=torch.int32)
        num_tokens = shape.num_seqs * shape.num_queries
        self.starts = torch.arange(0, num_tokens + 1, shape.num_queries, dtype=torch.int32)
        self.q = torch.randn(num_tokens, shape.num_q_heads, shape.head_dim, device=device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.attention = pagedkv.PagedAttention(shape.num_q_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
        self.attention.plan(self.table, self.seq_lens, self.starts)

    def run(self, layer: int) -> None:
        """Compute the attention of a layer."""
        self.attention.run(self.q, *self.layers[layer], out=self.out)

    def dense(self, layer: int, sequences: slice) -> tuple[Any, Any, Any]:
        """Return queries, keys and values of some sequences as torch's attention takes them."""
        shape = self.shape
        table = self.table[sequences].long()
        k, v = (array[table].transpose(1, 2).flatten(2, 3)[:, :, : shape.seq_len] for array in self.layers[layer])
        q = self.q.view(shape.num_seqs, shape.num_queries, shape.num_q_heads, shape.head_dim)[sequences]
        return q.transpose(1, 2), k, v

    def error(self, layer: int) -> float:
        """Return how far the last sequence's result is off, relative to its size, by torch in float32."""
        self.run(layer)
        shape = self.shape
        q, k, v = (array.float() for array in self.dense(layer, slice(-1, None)))
        k, v = (array.repeat_interleave(shape.num_q_heads // shape.num_kv_heads, 1) for array in (k, v))
        rows = torch.arange(shape.num_queries, device=q.device)[:, None] + shape.seq_len - shape.num_queries
        seen = torch.arange(shape.seq_len, device=q.device) <= rows
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)[0]
        found = self.out.view(shape.num_seqs, shape.num_queries, shape.num_q_heads, shape.head_dim)[-1].float()
        return float((found - want).norm() / want.norm())
