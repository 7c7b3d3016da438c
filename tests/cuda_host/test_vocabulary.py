"""What the host makes of each function of the vocabulary, against its definition in NumPy and torch."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from host_device import Memory, build_kernel, launch

PROBES = Path(__file__).parent / "probes"
FUNCTIONS = re.search(r"enum Function \{(.*?)\}", (PROBES / "vocabulary.cu").read_text(), re.DOTALL)[1]
FUNCTIONS = FUNCTIONS.replace(",", " ").split()
SHARED_BYTES = 32 * 16
LANES = np.arange(32)
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-42, -1e-42, 1.0, 65504, 65520, 3.4e38, 1e-8, -2.5], np.float32)


@pytest.fixture(scope="module")
def apply():
    """Return a function that applies a function of the vocabulary: 32 x 16 words in, 32 x 4 words out."""
    kernel = build_kernel("vocabulary", sources=PROBES)

    def apply(function, words):
        memory = Memory()
        inputs = np.zeros((32, 16), np.uint32)
        inputs[:, : words.shape[1]] = words
        given = memory.place("in", torch.from_numpy(inputs.view(np.int32)))
        out = memory.place("out", torch.zeros(32, 4, dtype=torch.int32), writable=True)
        params = struct.pack("QQi4x", out.data_ptr(), given.data_ptr(), FUNCTIONS.index(function))
        launch(kernel, params, (1,), 32, SHARED_BYTES, memory.regions)
        return out.numpy().view(np.uint32)

    return apply


def random_floats(columns, seed=0):
    values = np.random.default_rng(seed).standard_normal((32, columns)).astype(np.float32) * 8
    values.reshape(-1)[: len(SPECIAL)] = SPECIAL
    return values


def halves(matrix, dtype):
    """Return the words of a matrix's pairs of elements, rounded to a 16-bit type."""
    bits = torch.from_numpy(matrix).to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return bits[..., 0::2] | bits[..., 1::2] << 16


@pytest.mark.parametrize(("function", "dtype"), [("kMmaF16", torch.float16), ("kMmaBF16", torch.bfloat16)])
def test_mma_multiplies_matrices_that_lie_as_the_ptx_manual_says(apply, function, dtype):
    rng = np.random.default_rng(1)
    a, b, d = (rng.standard_normal(shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    group, pair = LANES // 4, LANES % 4  # of rows, and of two columns
    rows, columns = halves(a, dtype), halves(np.ascontiguousarray(b.T), dtype)
    words = np.zeros((32, 10), np.uint32)
    for i in range(4):
        words[:, i] = rows[group + i % 2 * 8, pair + i // 2 * 4]
    for i in range(2):
        words[:, 4 + i] = columns[group, pair + i * 4]
    for i in range(4):
        words[:, 6 + i] = d[group + i // 2 * 8, 2 * pair + i % 2].view(np.uint32)
    got = apply(function, words).view(np.float32)
    exact = [torch.from_numpy(x).to(dtype).double().numpy() for x in (a, b)]
    want = exact[0] @ exact[1] + d
    for i in range(4):
        np.testing.assert_allclose(got[:, i], want[group + i // 2 * 8, 2 * pair + i % 2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_load_matrices_gives_lanes_the_elements_that_the_ptx_manual_says(apply, transposed):
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 2**32, (32, 4), dtype=np.uint32)
    named = rng.permutation(32).astype(np.uint32)
    got = apply("kLoadMatricesTransposed" if transposed else "kLoadMatrices", np.column_stack([rows, named]))
    elements = rows.view(np.uint16)[named].reshape(4, 8, 8)  # matrix, row, element
    if transposed:
        elements = elements.transpose(0, 2, 1)
    want = elements.reshape(4, 8, 4, 2)[:, LANES // 4, LANES % 4].astype(np.uint32)
    np.testing.assert_array_equal(got, (want[..., 0] | want[..., 1] << 16).T)


@pytest.mark.parametrize(("function", "dtype"), [("kPackF16", torch.float16), ("kPackBF16", torch.bfloat16)])
def test_pack_rounds_two_floats_to_nearest_even(apply, function, dtype):
    pairs = random_floats(2)
    want = torch.from_numpy(pairs).to(dtype)
    got = torch.from_numpy(apply(function, pairs.view(np.uint32))[:, 0].copy().view(np.int16).reshape(32, 2)).view(
        dtype
    )
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize(("function", "dtype"), [("kUnpackF16", torch.float16), ("kUnpackBF16", torch.bfloat16)])
def test_unpack_gives_both_elements_exactly(apply, function, dtype):
    bits = np.random.default_rng(3).integers(0, 2**32, (32, 1), dtype=np.uint32)
    want = torch.from_numpy(bits.view(np.int16)).view(dtype).float().numpy()
    np.testing.assert_array_equal(apply(function, bits)[:, :2].view(np.float32), want)


def test_permute_bytes_picks_bytes_and_signs(apply):
    words = np.random.default_rng(4).integers(0, 2**32, (32, 3), dtype=np.uint32)
    want = []
    for a, b, selector in words.tolist():
        of_both = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
        picks = [selector >> 4 * i & 15 for i in range(4)]
        picked = [(255 if of_both[n & 7] > 127 else 0) if n & 8 else of_both[n & 7] for n in picks]
        want.append(int.from_bytes(picked, "little"))
    np.testing.assert_array_equal(apply("kPermuteBytes", words)[:, 0], want)


def flushed(values):
    return np.where(np.abs(values) < 2.0**-126, np.copysign(0.0, values), values)


@pytest.mark.parametrize(
    ("function", "definition"),
    [("kExp2", np.exp2), ("kLog2", np.log2), ("kReciprocal", lambda x: 1 / x)],
    ids=["exp2", "log2", "reciprocal"],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_approximations_are_close_and_flush_subnormal_numbers(apply, function, definition):
    x = random_floats(1)
    want = flushed(definition(flushed(x.astype(np.float64))).astype(np.float32))
    np.testing.assert_allclose(apply(function, x.view(np.uint32))[:, :1].view(np.float32), want, rtol=4e-7, atol=0)


def test_maximum_gives_the_number_when_the_other_is_nan(apply):
    pairs = random_floats(2)
    got = apply("kMaximum", pairs.view(np.uint32))[:, 0].view(np.float32)
    np.testing.assert_array_equal(got, np.fmax(pairs[:, 0], pairs[:, 1]))


def test_multiply_add_rounds_once(apply):
    values = np.array([[1 + 2.0**-12, 1 - 2.0**-12, -1.0]] * 32, np.float32)
    got = apply("kMultiplyAdd", values.view(np.uint32))[:, 0].view(np.float32)
    np.testing.assert_array_equal(got, np.float32(-(2.0**-24)))


def test_shuffles_read_the_lane_that_is_named(apply):
    words = np.column_stack([LANES * 3.0, LANES]).astype(np.float32).view(np.uint32)
    words[:, 1] = np.random.default_rng(5).permutation(32)
    np.testing.assert_array_equal(apply("kShuffle", words)[:, 0], words[words[:, 1], 0])
    np.testing.assert_array_equal(apply("kShuffleXor", words)[:, 0], words[LANES ^ 5, 0])


def test_any_in_warp_tells_all_lanes_of_one(apply):
    assert apply("kAnyInWarp", (LANES == 17)[:, None].astype(np.uint32))[:, 0].tolist() == [1] * 32
    assert apply("kAnyInWarp", np.zeros((32, 1), np.uint32))[:, 0].tolist() == [0] * 32


def test_bit_count_counts_bits(apply):
    words = np.random.default_rng(6).integers(0, 2**32, (32, 1), dtype=np.uint32)
    assert apply("kBitCount", words)[:, 0].tolist() == [int(word).bit_count() for word in words[:, 0]]


def test_e4m3_is_exact_in_float16_and_nan_stays_nan(apply):
    for first in range(0, 256, 32):
        codes = np.arange(first, first + 32, dtype=np.uint32)
        got = apply("kE4M3", (codes | (codes ^ 1) << 8)[:, None])[:, 0]
        got = torch.from_numpy(got.copy().view(np.int16).reshape(32, 2)).view(torch.float16).float()
        pairs = torch.from_numpy(np.column_stack([codes, codes ^ 1]).astype(np.uint8)).view(torch.float8_e4m3fn).float()
        torch.testing.assert_close(got, pairs, rtol=0, atol=0, equal_nan=True)
