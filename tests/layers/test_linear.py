"""Linear: whatever the layout of its weight, the product is the same."""

import pytest
import torch

from refimpl.layers import cpu_products
from refimpl.layers.cpu_products import ByFbgemm, ByOneDNN, OneTokenApart, fastest_product, runs
from refimpl.layers.linear import Linear

CPU = torch.device("cpu")
HAS_FBGEMM, HAS_ONEDNN = runs(ByFbgemm, torch.float32), runs(ByOneDNN, torch.float32)


def filled(in_features, out_features, dtype=torch.float32):
    linear = Linear(in_features, out_features, dtype, CPU)
    linear.weight.data.copy_(torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1)))
    return linear


def without(monkeypatch, dtype):
    """A CPU on which oneDNN has no products of a dtype."""
    monkeypatch.setattr(cpu_products, "runs", lambda product, asked: asked != dtype and runs(product, asked))


@pytest.mark.parametrize(("in_features", "out_features"), [(48, 96), (96, 48)], ids=["wide", "tall"])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_layouts_give_the_same_product(monkeypatch, capability, in_features, out_features, twice):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    linear = filled(in_features, out_features)
    expected = linear.weight.double()
    linear.pack(keep_plain=False, twice=twice)
    for tokens in (1, 2, 9):
        x = torch.randn(tokens, in_features)
        torch.testing.assert_close(linear(x).double(), x.double() @ expected.T, rtol=1e-5, atol=1e-5)


def test_a_weight_in_another_layout_is_kept_once_unless_it_is_tied():
    if not HAS_ONEDNN:
        pytest.skip("this CPU has no packed layout for float32")
    alone, tied = filled(48, 96), filled(48, 96)
    alone.pack()
    tied.pack(keep_plain=True)
    assert alone.weight.numel() == 0
    assert tied.weight.shape == (96, 48)


def test_a_released_weight_is_nowhere():
    linear = filled(48, 96)
    linear.pack(twice=True)
    linear.release()
    assert not [name for name, value in vars(linear).items() if value is not None and "product" in name]


def test_float64_is_left_as_it_is():
    linear = filled(48, 96, torch.float64)
    linear.pack(twice=True)
    x = torch.randn(1, 48, dtype=torch.float64)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight))


def test_one_token_of_float32_has_a_layout_apart_if_it_may():
    if not HAS_ONEDNN:
        pytest.skip("this CPU has no packed layout for float32")
    weight = torch.randn(48, 96)
    product = fastest_product(weight, twice=True)
    assert isinstance(product, OneTokenApart)
    for tokens in (1, 2, 8):
        x = torch.randn(tokens, 96)
        torch.testing.assert_close(product(x), x @ weight.T)
    assert type(fastest_product(weight, twice=False)) is ByOneDNN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_weights_of_16_bits_are_multiplied_in_float32_and_activations_are_not_rounded(monkeypatch, dtype, tokens):
    if not HAS_FBGEMM:
        pytest.skip("this build of torch has no FBGEMM")
    without(monkeypatch, torch.bfloat16)
    linear = filled(48, 96, dtype)
    expected = linear.weight.double()
    linear.pack()
    assert linear.weight.numel() == 0
    x = torch.randn(tokens, 48)
    assert linear(x).dtype == linear.dtype == torch.float32
    torch.testing.assert_close(linear(x).double(), x.double() @ expected.T, rtol=1e-5, atol=1e-5)
    assert torch.equal(linear(x.to(dtype)), linear(x.to(dtype).float()))


@pytest.mark.parametrize(("weight", "error"), [(2.0**-14, 0.0), (1.9921875, 0.0), (65280.0, 0.0), (2.0**-20 * 1.3, 2**-25)])
def test_float16_holds_weights_of_bfloat16_but_for_the_last_bits_of_tiny_ones(monkeypatch, weight, error):
    if not HAS_FBGEMM:
        pytest.skip("this build of torch has no FBGEMM")
    without(monkeypatch, torch.bfloat16)
    matrix = torch.full((16, 16), weight).bfloat16()
    product = fastest_product(matrix, twice=False)
    assert isinstance(product, ByFbgemm)
    one = torch.zeros(1, 16)
    one[0, 0] = 1
    assert (product(one) - matrix[:1].float()).abs().max() <= error


@pytest.mark.parametrize("weight", [1e5, float("inf"), float("nan")])
def test_a_weight_that_float16_cannot_hold_leaves_the_matrix_as_it_is(monkeypatch, weight):
    without(monkeypatch, torch.bfloat16)
    linear = filled(48, 96, torch.bfloat16)
    linear.weight.data[3, 5] = weight
    linear.pack()
    assert linear.weight.shape == (96, 48)
    x = torch.randn(2, 48)
    expected = torch.nn.functional.linear(x.bfloat16(), linear.weight)
    torch.testing.assert_close(linear(x), expected, equal_nan=True)
