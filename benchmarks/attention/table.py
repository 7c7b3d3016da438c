"""The lines of the attention benchmark: what each works on, and what it must reach."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

BLOCK_SIZE = 16
MIN_KV_BYTES = 1 << 28
BFLOAT16_SETS = ("avx512_bf16", "amx")  # instruction sets with products of bfloat16
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}

Kind = Literal["decode", "quantised", "packed", "prefill", "append", "copy", "layers", "overhead"]


@dataclass(frozen=True)
class Shape:
    """Sequences of equal length, their heads, how keys lie, and the threads that work on them."""

    num_seqs: int = 16
    seq_len: int = 4096
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    num_queries: int = 1
    threads: int = 2
    keys: Literal["natural", "packed"] = "natural"

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of all sequences, in one layer."""
        return self.num_seqs * self.seq_len * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of a token, in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def q_dtype(self) -> str:
        """Element type of queries and output."""
        return self.dtype if ITEM_BYTES[self.dtype] > 1 else "bfloat16"

    @property
    def flops(self) -> int:
        """Floating-point operations of both products, in one layer; queries are the last tokens of a sequence."""
        first = self.seq_len - self.num_queries + 1
        scores = self.num_queries * (first + self.seq_len) // 2
        return 4 * self.num_seqs * self.num_q_heads * self.head_dim * scores

    def raised(self) -> "Shape":
        """Return the shape with as many sequences as make `MIN_KV_BYTES`."""
        num_seqs = math.ceil(MIN_KV_BYTES / (self.seq_len * self.token_bytes))
        return dataclasses.replace(self, num_seqs=max(self.num_seqs, num_seqs))


@dataclass(frozen=True)
class Must:
    """Figures that a line must reach: shares and ratios at least, `ours` at most."""

    of_limit: float | None = None
    ratio: float | None = None
    ours: float | None = None

    def is_met(self, line: Mapping[str, Any]) -> bool | None:
        """Say whether a line reaches them; None where one of its figures is missing."""
        wanted = {name: bound for name, bound in dataclasses.asdict(self).items() if bound is not None}
        if any(line[name] is None for name in wanted):
            return None
        return all(line[name] <= bound if name == "ours" else line[name] >= bound for name, bound in wanted.items())

    def text(self) -> str:
        """Return them for people."""
        shown = [
            None if self.of_limit is None else f"{self.of_limit:.0%} of limit",
            None if self.ratio is None else f"{self.ratio:g}x",
            None if self.ours is None else f"<= {self.ours:g}",
        ]
        return ", ".join(text for text in shown if text)


@dataclass(frozen=True)
class Line:
    """A line: its work, what limits it, and what it must reach by instruction set."""

    what: str
    kind: Kind
    shape: Shape = field(default_factory=Shape)
    must: Mapping[str, Must] = field(default_factory=dict)
    fma_limits: tuple[str, ...] = ()  # instruction sets on which arithmetic is the limit, not the plain read


def _must(
    of_limit: tuple[float | None, float | None] = (None, None),
    ratio: tuple[float | None, float | None] = (None, None),
    ours: float | None = None,
) -> dict[str, Must]:
    avx2, avx512_bf16 = (Must(share, times, ours) for share, times in zip(of_limit, ratio, strict=True))
    return {"avx2": avx2, **dict.fromkeys(BFLOAT16_SETS, avx512_bf16)}


LINES = (
    Line("decode_bf16_16x4096", "decode", must=_must((0.70, 0.65), (2.5, 1.8))),
    Line("decode_bf16_1x32768", "decode", Shape(1, 32_768), _must((0.65, 0.65), (2.5, None))),
    Line("decode_fp16_16x4096", "decode", Shape(dtype="float16"), _must((0.65, 0.60))),
    Line("decode_bf16_d64", "decode", Shape(head_dim=64), _must((0.65, 0.60))),
    Line("decode_bf16_mha", "decode", Shape(num_kv_heads=32), _must((0.70, 0.70))),
    Line("decode_smollm2", "decode", Shape(num_q_heads=9, num_kv_heads=3, head_dim=64), _must((0.70, 0.70))),
    Line("decode_fp8_16x4096", "quantised", Shape(dtype="float8_e4m3fn"), _must(ratio=(1.3, 1.5))),
    Line("decode_fp8_packed", "quantised", Shape(dtype="float8_e4m3fn", keys="packed"), _must(ratio=(1.3, 1.5))),
    Line("decode_bf16_gqa12", "decode", Shape(num_q_heads=24, num_kv_heads=2), _must((0.45, 0.40)), ("avx2",)),
    Line("decode_gqa12_packed", "packed", Shape(num_q_heads=24, num_kv_heads=2, keys="packed")),
    Line("decode_context_1thread", "decode", Shape(threads=1), _must((0.60, 0.60))),
    Line("prefill_1x2048", "prefill", Shape(1, 2048, num_queries=2048), _must((0.80, 0.45), (1.3, 1.4))),
    Line("append_kv", "append", Shape(1, 8192, num_queries=8192), _must((0.60, 0.60))),
    Line("append_kv_decode", "append", Shape(256, 256)),
    Line("copy_blocks", "copy", must=_must((0.80, 0.80))),
    Line("layer_of_32_against_1", "layers", must=_must(ours=1.03)),
    Line("run_overhead", "overhead", Shape(1, 1), must=_must(ours=5.0)),
)
