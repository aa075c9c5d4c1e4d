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
@pytest.mark.parametrize("for_one_token", [False, True])
def test_layouts_give_the_same_product(monkeypatch, capability, in_features, out_features, for_one_token):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    linear = filled(in_features, out_features)
    expected = linear.weight.double()
    linear.pack(keep_plain=False, for_one_token=for_one_token)
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
    linear.pack(for_one_token=True)
    linear.release()
    assert not [name for name, value in vars(linear).items() if isinstance(value, torch.Tensor)]
    assert linear.weight.numel() in (0, 48 * 96)


def test_float64_is_left_as_it_is():
    linear = filled(48, 96, torch.float64)
    linear.pack(for_one_token=True)
    x = torch.randn(1, 48, dtype=torch.float64)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight))
