"""What each function of the CUDA vocabulary must give: chosen inputs, definitions in NumPy and torch, and how near.

`probes/vocabulary.cu` applies a function to 32 lanes of 16 words and gives 4 words per lane. Whoever can run it, the
host shim or a GPU, is held to the same definitions.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedkv.kernels.compile import Cubin, compile_kernel, source_folder

PROBES = Path(__file__).parent / "probes"
KERNEL = "vocabulary"
SHARED_BYTES = 512
LANES, IN_WORDS, OUT_WORDS = np.arange(32), 16, 4
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-42, -1e-42, 1.0, 65504, 65520, 3.4e38, 1e-8, -2.5], np.float32)


def functions() -> list[str]:
    """Return the functions of the probe; the place of each is its number."""
    (names,) = re.findall(r"enum Function \{(.*?)\}", (PROBES / f"{KERNEL}.cu").read_text(), re.DOTALL)
    return names.replace(",", " ").split()[:-1]


def compile_probe(arch: str, folder: Path) -> Cubin:
    """Compile the probe for a GPU; its sources are put together in a folder, which must be empty."""
    shutil.copytree(source_folder() / "include", folder / "include")
    shutil.copy(PROBES / f"{KERNEL}.cu", folder)
    return compile_kernel(KERNEL, arch, sources=folder)


@dataclass(frozen=True)
class Case:
    """A function, what it is given, and what it must give.

    Attributes
    ----------
    function : str
        Its name in the probe.
    words : array, shape (num_launches, 32, 16), uint32
        The inputs.
    define : callable
        Takes the inputs of a launch; returns the outputs that it must give, as words or float32, and how far off they
        may be: 0, or numbers that broadcast.
    read : callable
        Reads words of 32 lanes as what is compared.
    """

    function: str
    words: Any
    define: Callable[[Any], tuple[Any, Any]]
    read: Callable[[Any], Any]

    def wrong_lanes(self, outputs: Any, others: Any = None) -> list[str]:
        """Return where outputs are not as near to the definition, or to the outputs of others, as they must be.

        Parameters
        ----------
        outputs : array, shape (num_launches, 32, 4), uint32
            What somebody gave for `words`.
        others : array, shape (num_launches, 32, 4), uint32, optional
            What to compare it with; each of the two may then be as far off as the definition allows.
        """
        wrong = []
        for number, words in enumerate(self.words):
            want, tolerance = self.define(words)
            got = self.read(outputs[number])[:, : want.shape[1]]
            if others is not None:
                want, tolerance = self.read(others[number])[:, : want.shape[1]], 2 * tolerance
            near = _near(got, want, tolerance)
            where = f"{self.function}, launch {number}, lane"
            wrong += [f"{where} {i}: got {got[i]}, expected {want[i]}" for i in LANES[~near.all(axis=1)]]
        return wrong


def _near(got: Any, want: Any, tolerance: Any) -> Any:
    if got.dtype.kind != "f":
        return got == want
    with np.errstate(invalid="ignore"):
        off = np.abs(got.astype(np.float64) - want.astype(np.float64))
    return (got == want) | (np.isnan(got) & np.isnan(want)) | (off <= tolerance)


# How words are read


def as_words(words: Any) -> Any:
    """Compare bits."""
    return words


def as_floats(words: Any) -> Any:
    """Compare numbers; a NaN is like another."""
    return words.view(np.float32)


def as_halves(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Compare pairs of 16-bit numbers."""

    def read(words: Any) -> Any:
        pairs = torch.from_numpy(np.ascontiguousarray(words).view(np.int16)).view(dtype)
        return pairs.float().numpy().reshape(len(words), -1)

    return read


# Inputs


def _launches(*columns: Any) -> Any:
    """Return inputs whose first words are these columns, each of a multiple of 32 values or rows of them."""
    parts = [np.asarray(column).reshape(len(column), -1).view(np.uint32) for column in columns]
    words = np.zeros((len(parts[0]), IN_WORDS), np.uint32)
    given = np.concatenate(parts, axis=1)
    words[:, : given.shape[1]] = given
    return words.reshape(-1, 32, IN_WORDS)


def _random_words(num_launches: int, columns: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 2**32, (32 * num_launches, columns), dtype=np.uint32)


def _random_floats(num_launches: int, columns: int, seed: int, scale: float = 8.0) -> Any:
    shape = (32 * num_launches, columns)
    values = (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)
    values.reshape(-1)[: len(SPECIAL)] = SPECIAL
    return values


def _wide_floats(num_launches: int, seed: int) -> Any:
    """Return floats of all magnitudes and both signs."""
    rng = np.random.default_rng(seed)
    values = np.ldexp(rng.uniform(1, 2, 32 * num_launches), rng.integers(-140, 128, 32 * num_launches))
    values = (values * rng.choice([-1, 1], len(values))).astype(np.float32)
    values[: len(SPECIAL)] = SPECIAL
    return values


def _codes() -> Any:
    """Return all bytes, four to a word."""
    return np.arange(256, dtype=np.uint8).view(np.uint32)


# Products and matrices


def _halves(matrix: Any, dtype: torch.dtype) -> Any:
    bits = torch.from_numpy(matrix).to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return bits[..., 0::2] | bits[..., 1::2] << 16


def _matrices(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    matrices = [rng.standard_normal(shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8))]
    if seed % 2:  # rows and columns of different magnitudes
        matrices[0] *= np.exp2(rng.integers(-6, 7, (16, 1))).astype(np.float32)
        matrices[1] *= np.exp2(rng.integers(-6, 7, (1, 8))).astype(np.float32)
    return matrices


GROUP, PAIR = LANES // 4, LANES % 4
# Where a lane's registers of A, B and the sum lie: rows, and pairs of columns or columns, as the PTX manual says.
OF_A = [(GROUP + i % 2 * 8, PAIR + i // 2 * 4) for i in range(4)]
OF_B = [(GROUP, PAIR + i * 4) for i in range(2)]
OF_SUM = [(GROUP + i // 2 * 8, 2 * PAIR + i % 2) for i in range(4)]


def _mma_case(function: str, dtype: torch.dtype) -> Case:
    """A is 16 x 16 by rows, B 16 x 8 by columns, the sum 16 x 8."""

    def define(words: Any) -> Any:
        rows, columns, d = np.zeros((16, 8), np.uint32), np.zeros((8, 8), np.uint32), np.zeros((16, 8), np.float32)
        for array, places, first in ((rows, OF_A, 0), (columns, OF_B, 4), (d.view(np.uint32), OF_SUM, 6)):
            for i, place in enumerate(places):
                array[place] = words[:, first + i]
        a, b = (as_halves(dtype)(matrix).astype(np.float64) for matrix in (rows, columns))
        want, size = a @ b.T + d, np.abs(a) @ np.abs(b.T) + np.abs(d)
        of_lane = [np.stack([matrix[place] for place in OF_SUM], axis=1) for matrix in (want.astype(np.float32), size)]
        # 17 terms, of which each may lose what lies 2^-22 below the largest.
        return of_lane[0], of_lane[1] * 2.0**-18

    launches = []
    for seed in range(4):
        a, b, d = _matrices(seed)
        rows, columns = _halves(a, dtype), _halves(np.ascontiguousarray(b.T), dtype)
        words = [rows[place] for place in OF_A] + [columns[place] for place in OF_B]
        words += [d[place].view(np.uint32) for place in OF_SUM]
        launches.append(_launches(np.stack(words, axis=1)))
    return Case(function, np.concatenate(launches), define, as_floats)


def _matrix_load_case(function: str, transposed: bool) -> Case:
    def define(words: Any) -> Any:
        elements = np.ascontiguousarray(words[:, :4]).view(np.uint16)[words[:, 4]].reshape(4, 8, 8)
        if transposed:  # matrix, row, element
            elements = elements.transpose(0, 2, 1)
        want = elements.reshape(4, 8, 4, 2)[:, LANES // 4, LANES % 4].astype(np.uint32)
        return (want[..., 0] | want[..., 1] << 16).T, 0

    named = np.random.default_rng(2).permuted(np.tile(LANES, (2, 1)), axis=1).astype(np.uint32).reshape(-1)
    return Case(function, _launches(_random_words(2, 4, 1), named), define, as_words)


# Numbers


def _pack_case(function: str, dtype: torch.dtype) -> Case:
    def define(words: Any) -> Any:
        return torch.from_numpy(words[:, :2].copy().view(np.float32)).to(dtype).float().numpy(), 0

    pairs = np.concatenate([_random_floats(2, 2, 3), _wide_floats(4, 4).reshape(-1, 2)])
    return Case(function, _launches(pairs), define, as_halves(dtype))


def _unpack_case(function: str, dtype: torch.dtype) -> Case:
    def define(words: Any) -> Any:
        return as_halves(dtype)(words[:, :1]), 0

    return Case(function, _launches(_random_words(4, 1, 5)), define, as_floats)


def _float_case(function: str, values: Any, define: Callable[..., Any]) -> Case:
    columns = values.reshape(len(values), -1).shape[1]

    def of_words(words: Any) -> Any:
        with np.errstate(all="ignore"):
            want, tolerance = define(*np.ascontiguousarray(words[:, :columns]).view(np.float32).T)
        return want.astype(np.float32)[:, None], np.asarray(tolerance)[..., None]

    return Case(function, _launches(values), of_words, as_floats)


def _flushed(values: Any) -> Any:
    return np.where(np.abs(values) < 2.0**-126, np.copysign(0.0, values), values)


def _ulps(count: float, values: Any) -> Any:
    """Return that many units in the last place of float32 numbers."""
    return count * np.spacing(
        np.maximum(np.abs(np.nan_to_num(values, posinf=1, neginf=1)), 2.0**-126, dtype=np.float32)
    )


def _exp2(x: Any) -> Any:
    want = _flushed(np.exp2(_flushed(x.astype(np.float64)))).astype(np.float32)
    return want, _ulps(2, want)


def _log2(x: Any) -> Any:
    # Within (0.5, 2) the manual gives an absolute error, elsewhere a relative one.
    want = np.log2(_flushed(x.astype(np.float64)))
    return want, 2.0**-22 * np.maximum(1, np.abs(np.nan_to_num(want, nan=1, posinf=1, neginf=1)))


def _reciprocal(x: Any) -> Any:
    want = _flushed(1 / _flushed(x.astype(np.float64))).astype(np.float32)
    return want, _ulps(1, want)


def _fused(a: Any, b: Any, c: Any) -> Any:
    return a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble), 0


def _word_case(function: str, words: Any, define: Callable[[Any], list[Any]]) -> Case:
    """A case whose outputs are words, one column after another."""

    def of_words(launch: Any) -> Any:
        columns = [np.broadcast_to(np.asarray(column), 32).astype(np.uint32) for column in define(launch)]
        return np.stack(columns, axis=1), 0

    return Case(function, words, of_words, as_words)


def _permuted(words: Any) -> list[Any]:
    picked = []
    for a, b, selector in words[:, :3].tolist():
        of_both = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
        picks = [selector >> 4 * i & 15 for i in range(4)]
        each = [(255 if of_both[n & 7] > 127 else 0) if n & 8 else of_both[n & 7] for n in picks]
        picked.append(int.from_bytes(each, "little"))
    return [picked]


# FP8


def _decode_case(function: str, dtype: torch.dtype, words: Any, *, num_bytes: int, factor: float = 1.0) -> Case:
    def define(launch: Any) -> Any:
        codes = np.ascontiguousarray(launch[:, :1]).view(np.uint8)[:, :num_bytes]
        return torch.from_numpy(codes.copy()).view(dtype).float().numpy() * np.float32(factor), 0

    return Case(function, words, define, as_halves(torch.float16))


def _encode_case(function: str, dtype: torch.dtype) -> Case:
    largest = torch.finfo(dtype).max

    def define(words: Any) -> list[Any]:
        values = torch.from_numpy(np.ascontiguousarray(words[:, 0]).view(np.float32))
        codes = values.clamp(-largest, largest).to(dtype).view(torch.uint8).numpy().astype(np.uint32)
        sign = words[:, 0] >> 24 & 0x80
        return [np.where(values.isnan().numpy(), sign | 0x7F, codes)]

    numbers = torch.arange(256).to(torch.uint8).view(dtype).double()
    numbers = numbers[numbers.isfinite()].sort().values
    halfway = ((numbers[1:] + numbers[:-1]) / 2).float()  # ties, and what lies just beside them
    floats = torch.cat([halfway, halfway * (1 + 2**-20), halfway * (1 - 2**-20)]).numpy()
    floats = np.concatenate([floats, _wide_floats(4, 6)])
    return _word_case(function, _launches(floats[: len(floats) // 32 * 32]), define)


# Memory

OTHER = LANES ^ 1


def _copied(words: Any, flag: int, first: int, count: int) -> list[Any]:
    taken = (words[OTHER, flag] & 1).astype(bool)
    return [np.where(taken, words[OTHER, first + i], 0) for i in range(count)]


def _narrow(words: Any) -> list[Any]:
    own = np.ascontiguousarray(words).view(np.uint8).reshape(32, -1).astype(np.uint32)
    return [words[:, 2], words[:, 3], own[:, 2] | own[:, 3] << 8, own[:, 5] | own[:, 7] << 8]


def _integers(words: Any) -> list[Any]:
    a, b = np.ascontiguousarray(words[:, :2]).view(np.int32).T
    return [np.minimum(a, b).view(np.uint32), np.maximum(a, b).view(np.uint32)]


def _votes() -> Any:
    return np.concatenate([LANES == 17, LANES < 0, LANES >= 0]).astype(np.uint32)


def _lanes_to_read() -> Any:
    named = np.random.default_rng(5).permutation(32).astype(np.uint32)
    return _launches(_random_words(1, 1, 7), named)


def _e4m3_pairs() -> Any:
    codes = np.arange(256, dtype=np.uint32)
    return _launches(codes | (codes ^ 1) << 8)


FUSED = np.tile(np.array([1 + 2.0**-12, 1 - 2.0**-12, -1.0], np.float32), (32, 1))

CASES = {
    case.function: case
    for case in (
        _mma_case("kMmaF16", torch.float16),
        _mma_case("kMmaBF16", torch.bfloat16),
        _matrix_load_case("kLoadMatrices", transposed=False),
        _matrix_load_case("kLoadMatricesTransposed", transposed=True),
        _pack_case("kPackF16", torch.float16),
        _pack_case("kPackBF16", torch.bfloat16),
        _unpack_case("kUnpackF16", torch.float16),
        _unpack_case("kUnpackBF16", torch.bfloat16),
        _word_case("kPermuteBytes", _launches(_random_words(2, 3, 8)), _permuted),
        _float_case("kExp2", _random_floats(4, 1, 9, scale=50), _exp2),
        _float_case("kLog2", np.concatenate([_wide_floats(2, 10), _random_floats(2, 1, 11, scale=1)[:, 0]]), _log2),
        _float_case("kReciprocal", _wide_floats(4, 12), _reciprocal),
        _float_case("kMaximum", _random_floats(2, 2, 13), lambda a, b: (np.fmax(a, b), 0)),
        _float_case("kMultiplyAdd", FUSED, _fused),
        _float_case("kMagnitude", _wide_floats(1, 14), lambda x: (np.abs(x), 0)),
        _word_case("kIntegers", _launches(_random_words(2, 2, 15)), _integers),
        _word_case("kShuffle", _lanes_to_read(), lambda words: [words[words[:, 1], 0]]),
        _word_case("kShuffleXor", _launches(_random_words(1, 1, 16)), lambda words: [words[LANES ^ 5, 0]]),
        _word_case("kAnyInWarp", _launches(_votes()), lambda words: [words[:, 0].any()]),
        _word_case("kBitCount", _launches(_random_words(1, 1, 17)), lambda words: [np.bitwise_count(words[:, 0])]),
        _decode_case("kE4M3", torch.float8_e4m3fn, _e4m3_pairs(), num_bytes=2),
        _decode_case("kE4M3ByBits", torch.float8_e4m3fn, _launches(_codes()), num_bytes=4, factor=2.0**-8),
        _decode_case("kE5M2", torch.float8_e5m2, _launches(_codes()), num_bytes=4),
        _encode_case("kEncodeE4M3", torch.float8_e4m3fn),
        _encode_case("kEncodeE5M2", torch.float8_e5m2),
        _word_case("kLoadWide", _launches(_random_words(1, 16, 18)), lambda words: list(words[:, :4].T)),
        _word_case("kLoadNarrow", _launches(_random_words(1, 16, 19)), _narrow),
        _word_case("kLoadAgain", _launches(_random_words(1, 16, 20)), lambda words: list(words[:, 4:8].T)),
        _word_case(
            "kLoadWritten",
            _launches(_random_words(1, 4, 21)),
            lambda words: [words[:, 0], words[:, 1], words[:, 2] & 0xFFFF, words[:, 3] & 0xFF],
        ),
        _word_case("kShared", _launches(_random_words(1, 3, 22)), lambda words: list(words[OTHER, :3].T)),
        _word_case("kCopyAsync16", _launches(_random_words(2, 16, 23)), lambda words: _copied(words, 8, 0, 4)),
        _word_case(
            "kCopyAsync8",
            _launches(_random_words(2, 16, 24)),
            lambda words: _copied(words, 8, 0, 2) + _copied(words, 9, 2, 2),
        ),
    )
}


def run_case(case: Case, apply: Callable[[int, Any], Any]) -> Any:
    """Return the outputs of a case, shape (num_launches, 32, 4).

    Parameters
    ----------
    case : Case
        The case.
    apply : callable
        Takes the number of a function and 32 x 16 words; returns 32 x 4 words.
    """
    number = functions().index(case.function)
    return np.stack([apply(number, words) for words in case.words])
