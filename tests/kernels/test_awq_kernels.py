"""The product by 4-bit weights in every way that it is cut, also those of other Tritons and devices."""

import pytest
import torch
from kernel_device import DEVICE

from refimpl.kernels import awq_gemm, awq_reference
from refimpl.kernels.awq_gemm import Cut, awq_linear, cut
from refimpl.kernels.spec import get


@pytest.mark.parametrize(("tokens", "splits"), [(8, 1), (8, 3), (16, 2), (32, 5)])
def test_products_are_the_same_however_they_are_cut(monkeypatch, tokens, splits):
    spec = get("awq_linear")
    shape = {"T": 19, "out_features": 75, "in_features": 1152, "group": 64, "gap": 8}
    case = spec.make_case(shape, torch.float16, DEVICE, 3)
    monkeypatch.setattr(awq_gemm, "cut", lambda *sizes: Cut(tokens, 2, splits, None))
    got = spec.launch(**case.inputs, **case.out)
    wide = {key: value.double() if key == "x" else value for key, value in case.inputs.items()}
    torch.testing.assert_close(got.double(), spec.twin(**wide), rtol=1.02 * 2.0**-11, atol=1e-4)


def test_programs_fill_the_processors_and_each_keeps_chunks(monkeypatch):
    monkeypatch.setattr(awq_gemm, "FEW_BY_MMA", True)
    splits = {
        (tokens, *sizes): cut(tokens, *sizes, 128, 90).splits
        for tokens in (1, 16)
        for sizes in ((57344, 8192), (8192, 28672), (8192, 8192), (64, 512))
    }
    assert splits[1, 57344, 8192] == 1, "1,792 programs are more than there is room for at once"
    assert splits[1, 8192, 28672] == splits[1, 8192, 8192] == 4, "4 · 128 programs, where 4 · 132 are held"
    assert splits[16, 8192, 8192] == 3, "3 · 128 programs, where 3 · 132 are held"
    assert splits[1, 64, 512] == 1, "there is one chunk"
    assert [cut(T, 8192, 8192, 128, 90).tokens for T in (1, 8, 9, 16, 17, 100)] == [8, 8, 16, 16, 32, 32]


def test_weights_of_another_form_are_refused():
    words = awq_reference.pack_words(torch.zeros(70, 64, dtype=torch.uint8, device=DEVICE), 32)
    scales = awq_reference.pack_scales(torch.zeros(4, 70, dtype=torch.float16, device=DEVICE))
    zeros = awq_reference.pack_zeros(torch.zeros(4, 70, dtype=torch.uint8, device=DEVICE))
    x = torch.zeros(1, 64, dtype=torch.float16, device=DEVICE)
    result = x.new_empty(1, 70)
    assert not awq_linear(x, words, scales, zeros, 32, result).any()
    with pytest.raises(awq_gemm.RefimplError, match="sizes must be equal"):
        awq_linear(x, words[:1], scales, zeros, 32, result)
    with pytest.raises(awq_gemm.RefimplError, match="words are not in one piece"):
        awq_linear(x, words.transpose(3, 4).contiguous().transpose(3, 4), scales, zeros, 32, result)


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
def test_a_weight_keeps_an_arrival_for_every_tile_that_its_kernel_serves(capability):
    for T in (1, 8, 16, 17, 64, 100, awq_gemm.WITH_ARRIVALS):
        assert -(-T // cut(T, 100, 512, 128, capability).tokens) * 2 <= awq_gemm.num_arrivals(100)
    assert awq_reference.most_tokens(capability) <= awq_gemm.WITH_ARRIVALS
