"""Products with constant matrices: the same numbers whether oneDNN keeps them in its order or not."""

import pytest
import torch

from pagedkv.models import linear
from pagedkv.models.dtypes import has_bf16_product
from pagedkv.models.linear import Linear


@pytest.fixture(params=["float32", "bfloat16", "bfloat16 as it is"])
def dtype(request, monkeypatch):
    """Return a type, and have the matrix kept in torch's order in the last case."""
    if request.param.endswith("as it is"):
        monkeypatch.setattr(linear, "_can_pack", lambda: False)
    return getattr(torch, request.param.split()[0])


@pytest.mark.parametrize("num_rows", [1, 3, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_gives_products_with_what_is_fused_into_them(dtype, num_rows, has_bias):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    weight, bias, x, other = (
        normal(48, 32),
        normal(48) if has_bias else None,
        normal(num_rows, 32),
        normal(num_rows, 48),
    )
    product = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    kept = other.clone()
    layer = Linear(weight, bias)
    with torch.inference_mode():
        found = [layer(x), layer.silu(x), layer.times(x, other), layer.plus(x, other)]
    expected = [product, product * product.sigmoid(), product * other.double(), product + other.double()]
    # A product that is rounded before it is multiplied has two roundings.
    tolerance = {"rtol": 2.0**-7, "atol": 2.0**-5} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for own, want in zip(found, expected, strict=True):
        assert own.dtype is dtype
        torch.testing.assert_close(own.double(), want, **tolerance)
    assert torch.equal(other, kept)


def test_linear_is_packed_where_the_cpu_multiplies_bfloat16():
    assert Linear(torch.zeros(2, 2, dtype=torch.bfloat16))._is_packed == has_bf16_product()
    assert not Linear(torch.zeros(2, 2))._is_packed
