"""Which products of a few tokens are a kernel's, and what it refuses; its values are held in test_specs.py."""

import pytest
import torch
from kernel_device import DEVICE

from refimpl.errors import RefimplError
from refimpl.kernels import linear, overlap
from refimpl.kernels.attention_tiles import Target
from refimpl.kernels.few_tokens import room_for_parts

H200, A100 = Target(90, 132), Target(80, 108)


@pytest.mark.parametrize(
    ("tokens", "rows", "dtype", "target", "served"),
    [
        (1, 128_256, torch.bfloat16, H200, True),
        (1, 128_256, torch.bfloat16, A100, True),
        (2, 4096, torch.float16, H200, True),
        (16, 4096, torch.bfloat16, H200, True),
        (17, 4096, torch.bfloat16, H200, False),
        (8, 6144, torch.bfloat16, H200, False),
        (8, 4096, torch.bfloat16, A100, False),
        (1, 4096, torch.float32, H200, False),
        (0, 4096, torch.bfloat16, H200, False),
    ],
)
def test_few_tokens_are_the_kernels_where_the_rows_are_few(monkeypatch, tokens, rows, dtype, target, served):
    monkeypatch.setattr(linear, "target_of", lambda device: target)
    assert linear.serves(torch.empty(tokens, 8, dtype=dtype), torch.empty(rows, 8, dtype=dtype)) is served


def test_more_tokens_are_refused():
    x, weight = torch.zeros(17, 8, device=DEVICE), torch.zeros(4, 8, device=DEVICE)
    with pytest.raises(RefimplError, match="x has 17 tokens; the kernel takes up to 16: use torch's product"):
        linear.linear(x, weight)
    with pytest.raises(RefimplError, match="x has 2 tokens; the kernel takes up to 1"):
        linear.gated_linear(x[:2], weight)


def test_nothing_overlaps_where_there_is_no_gpu():
    assert overlap.overlapping(torch.zeros(1)) == {"OVERLAP": False}


def test_programs_that_share_a_tile_have_room_for_their_sums_and_count_themselves():
    scales, given = torch.ones(7, dtype=torch.float16, device=DEVICE), torch.zeros(30, dtype=torch.int32, device=DEVICE)
    parts, arrivals = room_for_parts(scales, (2, 5, 4), 64 * 16, None)
    assert (parts.dtype, len(parts)) == (torch.float32, 2 * 5 * 4 * 64 * 16)
    assert arrivals.tolist() == [0] * 10
    assert room_for_parts(scales, (2, 5, 4), 64 * 16, given)[1] is given
    assert all(one is scales for one in room_for_parts(scales, (2, 5, 1), 64 * 16, None)), "nothing is made for one split"
