"""Norms, rotary positions and draws on the CPU, in every instruction set, against float64."""

import numpy as np
import pytest
import torch

from pagedkv.attention.row_ops import draw_tokens, rms_norm, rotary_embedding
from pagedkv.exceptions import InvalidArgumentError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def make(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(x):
    """Return room for a tensor of its shape, NaN all over, and the memory around it: rows are far apart."""
    memory = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype)
    return memory[..., : x.shape[-1]], memory[..., x.shape[-1] :]


def assert_near(found, expected, dtype):
    """Results are computed in float32 and rounded once."""
    expected = torch.from_numpy(expected)
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps * 0.6 + 2e-6, atol=1e-6)


def normalized(x):
    x = x.double().numpy()
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)


def turned(x, angles, num_turned):
    x = x.double().numpy()
    half = x.shape[-1] // 2
    cos, sin = angles[:, None, :half].double().numpy(), angles[:, None, half:].double().numpy()
    first, second = x[..., :half], x[..., half:]
    pairs = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return np.where(np.arange(x.shape[1])[:, None] < num_turned, pairs, x)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 576])
def test_rows_are_divided_by_their_root_mean_square(dtype, size):
    x = make(70, size, dtype=dtype)
    out, around = poisoned(x)
    rms_norm(x, out, eps=EPS)
    assert_near(out, normalized(x), dtype)
    assert around.isnan().all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 30, 32, 34, 64, 128])
def test_pairs_of_the_first_heads_are_turned_and_others_copied(dtype, head_dim):
    x = make(40, 5, head_dim, dtype=dtype)
    angles = make(40, head_dim, seed=1)
    out, around = poisoned(x)
    rotary_embedding(x, angles, out, num_turned_heads=3)
    assert_near(out[:, :3], turned(x, angles, 3)[:, :3], dtype)
    assert torch.equal(out[:, 3:], x[:, 3:])
    assert around.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_the_same_bits_whatever_the_instructions_and_threads(dtype, isa):
    x, heads, angles = make(600, 576, dtype=dtype), make(600, 9, 64, dtype=dtype), make(600, 64, seed=1)
    found = []
    for num_threads in (1, 2):
        normed, room = torch.empty_like(x), torch.empty_like(heads)
        rms_norm(x, normed, eps=EPS, num_threads=num_threads)
        rotary_embedding(heads, angles, room, num_turned_heads=6, num_threads=num_threads)
        found.append((normed, room))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDKV_CPU_ISA", "scalar")
        normed, room = torch.empty_like(x), torch.empty_like(heads)
        rms_norm(x, normed, eps=EPS)
        rotary_embedding(heads, angles, room, num_turned_heads=6)
    assert all(torch.equal(one, normed) and torch.equal(other, room) for one, other in found), isa


@pytest.mark.usefixtures("isa")
def test_rows_of_zeros_stay_zeros_and_a_nan_stays_in_its_row():
    x = torch.zeros(3, 48)
    x[1] = 2.0
    x[2, 40] = torch.nan
    out = torch.empty_like(x)
    rms_norm(x, out, eps=EPS)
    assert (out[0] == 0).all()
    torch.testing.assert_close(out[1], torch.ones(48), atol=1e-5, rtol=0)
    assert out[2].isnan().all()


def test_rows_of_a_part_of_a_larger_array_are_read_where_they_lie():
    wide = make(4, 2, 64, dtype=torch.bfloat16)
    whole, part = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(4, 64, dtype=torch.bfloat16)
    rms_norm(wide[:, 1], part, eps=EPS)
    rms_norm(wide[:, 1].contiguous(), whole, eps=EPS)
    assert torch.equal(part, whole)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_nothing_is_written_where_there_is_nothing(shape):
    rms_norm(torch.ones(shape), torch.empty(shape), eps=EPS)


@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 0, 8), (3, 2, 0)])
def test_no_head_is_turned_where_there_is_none(shape):
    rotary_embedding(torch.ones(shape), torch.ones(shape[0], shape[2]), torch.empty(shape), num_turned_heads=0)


X, HEADS, ANGLES = torch.ones(3, 8), torch.ones(3, 4, 8), torch.ones(3, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": -1.0}, "eps: expected a finite number, 0 or more, found -1"),
        ({"eps": float("nan")}, "eps: expected a finite number, 0 or more, found NaN"),
        ({"x": torch.ones(3, 7)}, r"out: expected shape \(num_rows=3, size=7\), found \(3, 8\)"),
        ({"x": torch.ones(3, 16)[:, ::2]}, "x: expected"),
        ({"x": torch.ones(3)}, "x: expected"),
        ({"out": torch.full((8,), 7.0).expand(3, 8)}, "out: expected"),
    ],
)
def test_norm_of_bad_arguments_is_refused_by_name(change, message):
    arguments = {"x": X, "out": torch.full((3, 8), 7.0), "eps": EPS} | change
    with pytest.raises(InvalidArgumentError, match=message):
        rms_norm(arguments["x"], arguments["out"], eps=arguments["eps"])
    assert (arguments["out"] == 7).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_turned_heads": 5}, "num_turned_heads: expected at most num_heads=4, found 5"),
        (
            {"x": HEADS[..., :7], "cos_sin": ANGLES[:, :7]},
            r"out: expected shape \(num_tokens=3, num_heads=4, head_dim=7\)",
        ),
        ({"cos_sin": torch.ones(3, 4)}, r"cos_sin: expected shape \(num_tokens=3, head_dim=8\), found \(3, 4\)"),
        ({"cos_sin": torch.ones(2, 8)}, r"cos_sin: expected shape \(num_tokens=3, head_dim=8\), found \(2, 8\)"),
        ({"x": torch.ones(3, 4, 16)[..., ::2]}, "x: expected"),
    ],
)
def test_turn_of_bad_arguments_is_refused_by_name(change, message):
    arguments = {"x": HEADS, "cos_sin": ANGLES, "out": torch.full((3, 4, 8), 7.0), "num_turned_heads": 2} | change
    arrays = [arguments[name] for name in ("x", "cos_sin", "out")]
    with pytest.raises(InvalidArgumentError, match=message):
        rotary_embedding(*arrays, num_turned_heads=arguments["num_turned_heads"])
    assert (arguments["out"] == 7).all()


def test_heads_of_an_odd_number_of_elements_are_refused():
    heads = torch.ones(3, 4, 7)
    with pytest.raises(InvalidArgumentError, match="head_dim: expected an even number, found 7"):
        rotary_embedding(heads, torch.ones(3, 7), torch.empty_like(heads), num_turned_heads=2)


def test_results_may_not_lie_where_inputs_do():
    x, heads = torch.ones(3, 8), torch.ones(3, 4, 8)
    with pytest.raises(InvalidArgumentError, match="out: .*overlap with x"):
        rms_norm(x, x, eps=EPS)
    with pytest.raises(InvalidArgumentError, match="out: .*overlap with x"):
        rotary_embedding(heads, ANGLES, heads, num_turned_heads=2)
    with pytest.raises(InvalidArgumentError, match="out: .*overlap with cos_sin"):
        rotary_embedding(torch.ones(3, 1, 8), heads[:, 0], heads[:, :1], num_turned_heads=1)
    scores = torch.zeros(3, 8)
    with pytest.raises(InvalidArgumentError, match="tokens: .*overlap with scores"):
        draw_tokens(scores, np.ones(3, np.float32), np.zeros(3), scores.view(torch.int32).view(-1)[:3])


@pytest.mark.parametrize("name", ["x", "out", "cos_sin"])
def test_element_types_that_are_not_computed_with_are_refused_by_name(name):
    arrays = {"x": HEADS, "cos_sin": ANGLES, "out": torch.empty_like(HEADS)}
    arrays[name] = arrays[name].to(torch.int32)
    with pytest.raises(TypeError, match=f"{name}: expected"):
        rotary_embedding(*arrays.values(), num_turned_heads=2)


def draws(scores, temperature, uniform, num_threads=None):
    memory = torch.full((len(scores) + 2,), -1, dtype=torch.int32)
    count = (len(scores),)
    temperature, uniform = np.broadcast_to(temperature, count), np.broadcast_to(uniform, count)
    arrays = temperature.astype(np.float32), uniform.astype(np.float64)
    draw_tokens(scores, *arrays, memory[1:-1], num_threads=num_threads)
    assert memory[0] == memory[-1] == -1
    return memory[1:-1]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 255, 256, 257, 1000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_token_is_the_first_whose_cumulative_weight_exceeds_the_number(dtype, vocab_size, temperature):
    scores = make(1, vocab_size, dtype=dtype).mul_(2).expand(500, -1)
    weights = torch.softmax(scores[0].double() / temperature, 0)
    uniform = np.linspace(0, 1, 500, endpoint=False)
    found = draws(scores, temperature, uniform).long()
    up_to = weights.cumsum(0)
    slack = 1e-5
    target = torch.from_numpy(uniform)
    assert (up_to[found] > target - slack).all()
    assert (up_to[found] - weights[found] <= target + slack).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_of_minus_infinity_are_never_drawn(dtype):
    scores = torch.full((1, 600), -torch.inf, dtype=dtype)
    scores[0, [3, 300, 513]] = torch.tensor([0.0, 1.0, 0.5], dtype=dtype)
    uniform = np.append(np.linspace(0, 1, 999, endpoint=False), np.nextafter(1.0, 0.0))
    assert set(draws(scores.expand(1000, -1), 1.0, uniform).tolist()) == {3, 300, 513}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-3])
def test_lowest_temperatures_draw_the_best_token(temperature):
    scores = make(1, 1000).expand(100, -1)
    assert (draws(scores, temperature, np.linspace(0, 1, 100, endpoint=False)) == scores[0].argmax()).all()


@pytest.mark.usefixtures("isa")
def test_draws_do_not_depend_on_the_type_of_the_scores_or_on_threads():
    uniform = np.random.default_rng(0).random(200)
    scores = make(200, 5000, dtype=torch.bfloat16)
    found = draws(scores, 0.7, uniform)
    assert torch.equal(draws(scores.float(), 0.7, uniform), found)
    assert torch.equal(draws(scores, 0.7, uniform, num_threads=1), found)


@pytest.mark.usefixtures("isa")
def test_first_token_of_infinite_score_is_drawn_whatever_the_number():
    scores = make(50, 700)
    scores[:, 333] = scores[:, 600] = torch.inf
    assert (draws(scores, 1.0, np.linspace(0, 1, 50, endpoint=False)) == 333).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_token_of_a_row_that_means_nothing_is_one_of_the_vocabulary(value):
    scores = make(3, 700)
    scores[0] = value
    scores[1, 650] = value
    found = draws(scores, 1.0, 0.5)
    assert ((found >= 0) & (found < 700)).all()
    assert found[2] == draws(scores[2:], 1.0, 0.5)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected a finite number above 0, found 0"),
        ({"temperature": np.inf}, "temperature: expected a finite number above 0, found inf"),
        ({"uniform": 1.0}, "uniform: expected a number from 0 to below 1, found 1"),
        ({"uniform": np.nan}, "uniform: expected a number from 0 to below 1, found NaN"),
        ({"scores": torch.ones(3, 0)}, "vocab_size: expected above 0, found 0"),
        ({"scores": torch.ones(3, 16)[:, ::2]}, "scores: expected"),
    ],
)
def test_draw_of_bad_arguments_is_refused_by_name(change, message):
    arguments = {"scores": torch.ones(3, 8), "temperature": 1.0, "uniform": 0.5} | change
    tokens = torch.full((3,), 7, dtype=torch.int32)
    numbers = np.full(3, arguments["temperature"], np.float32), np.full(3, arguments["uniform"])
    with pytest.raises(InvalidArgumentError, match=message):
        draw_tokens(arguments["scores"], *numbers, tokens)
    assert (tokens == 7).all()


@pytest.mark.parametrize("name", ["temperature", "uniform"])
def test_draw_takes_one_number_a_row(name):
    numbers = {"temperature": np.ones(3, np.float32), "uniform": np.zeros(3)}
    numbers[name] = numbers[name][:2]
    with pytest.raises(InvalidArgumentError, match=rf"{name}: expected shape \(num_rows=3,\), found \(2,\)"):
        draw_tokens(torch.ones(3, 8), *numbers.values(), torch.empty(3, dtype=torch.int32))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("temperature", np.ones(3)),
        ("temperature", np.ones((3, 1), np.float32)),
        ("temperature", [1.0, 1.0, 1.0]),
        ("uniform", np.zeros(3, np.float32)),
        ("uniform", torch.zeros(3)),
    ],
)
def test_numbers_of_a_draw_that_are_no_such_array_are_refused_by_name(name, wrong):
    numbers = {"temperature": np.ones(3, np.float32), "uniform": np.zeros(3)} | {name: wrong}
    with pytest.raises(TypeError, match=f"{name}: expected a one-dimensional float(32|64) array, found"):
        draw_tokens(torch.ones(3, 8), *numbers.values(), torch.empty(3, dtype=torch.int32))


def test_tokens_of_another_type_are_refused_by_name():
    with pytest.raises(TypeError, match="tokens: expected dtype int32, found int64"):
        draw_tokens(torch.ones(3, 8), np.ones(3, np.float32), np.zeros(3), torch.empty(3, dtype=torch.int64))
