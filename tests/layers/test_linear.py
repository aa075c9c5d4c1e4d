"""Linear: whatever the layout of its weight, the product is the same."""

import pytest
import torch

from refimpl.layers.linear import Linear, can_pack

CPU = torch.device("cpu")


def filled(in_features, out_features, dtype=torch.float32):
    linear = Linear(in_features, out_features, dtype, CPU)
    linear.weight.data.copy_(torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1)))
    return linear


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize(("in_features", "out_features"), [(48, 96), (96, 48)], ids=["wide", "tall"])
@pytest.mark.parametrize("twice", [False, True])
def test_layouts_give_the_same_product(monkeypatch, capability, in_features, out_features, twice):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    linear = filled(in_features, out_features)
    expected = linear.weight.double()
    linear.pack(keep_plain=False, twice=twice)
    for tokens in (1, 2, 9):
        x = torch.randn(tokens, in_features)
        torch.testing.assert_close(linear(x).double(), x.double() @ expected.T, rtol=1e-5, atol=1e-5)


def test_a_weight_in_another_layout_is_kept_once_unless_it_is_tied():
    if not can_pack(torch.zeros(1)):
        pytest.skip("this CPU has no packed layout for float32")
    alone, tied = filled(48, 96), filled(48, 96)
    alone.pack()
    tied.pack(keep_plain=True)
    assert alone.weight.numel() == 0
    assert tied.weight.shape == (96, 48)


def test_a_released_weight_is_nowhere(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    linear = filled(48, 96)
    linear.pack(twice=True)

    def layouts():
        return [name for name, value in vars(linear).items() if isinstance(value, torch.Tensor)]

    assert sorted(layouts()) == (["_for_one_token", "_packed"] if can_pack(torch.zeros(1)) else [])
    linear.release()
    assert layouts() == []


def test_float64_is_left_as_it_is():
    linear = filled(48, 96, torch.float64)
    linear.pack(twice=True)
    x = torch.randn(1, 48, dtype=torch.float64)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight))


def test_bfloat16_is_multiplied_in_float32_and_rounded_where_the_cpu_has_no_products_of_it(monkeypatch):
    weight_dtypes = []

    def packs_float32_only(weight):
        weight_dtypes.append(weight.dtype)
        return weight.dtype == torch.float32

    monkeypatch.setattr("refimpl.layers.linear.can_pack", packs_float32_only)
    linear = filled(48, 96, torch.bfloat16)
    expected = linear.weight.double()
    linear.pack(twice=True)
    assert weight_dtypes == [torch.bfloat16, torch.float32]
    for tokens in (1, 5):
        x = torch.randn(tokens, 48).bfloat16()
        product = linear(x)
        assert product.dtype == torch.bfloat16
        torch.testing.assert_close(product.double(), x.double() @ expected.T, rtol=2**-8, atol=2**-6)


def test_a_large_model_in_bfloat16_is_never_kept_twice(monkeypatch):
    monkeypatch.setattr("refimpl.layers.linear.can_pack", lambda weight: weight.dtype == torch.float32)
    linear = filled(48, 96, torch.bfloat16)
    linear.pack()
    assert linear.weight.shape == (96, 48)
