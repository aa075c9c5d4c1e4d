"""Log-probabilities of single rows: log_softmax, ranks by probability and id, a finite floor, slices."""

import math

import pytest
import torch

from refimpl.logprobs import LOGPROB_FLOOR
from refimpl.sampling import logprobs
from refimpl.sampling.logprobs import token_logprobs

INF = math.inf
LOGITS = torch.randn(12, 40, generator=torch.Generator().manual_seed(0)) * 4
TOKENS = torch.arange(12) * 3 % 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_they_are_log_softmax(dtype):
    logits = LOGITS.to(dtype)
    expected = logits.double().log_softmax(-1)
    for row, found in enumerate(token_logprobs(logits, TOKENS, [5] * 12)):
        order = sorted(range(40), key=lambda i: (-logits[row, i].item(), i))
        assert found.token_id == TOKENS[row]
        assert found.logprob == pytest.approx(expected[row, found.token_id].item(), rel=1e-5, abs=1e-6)
        assert order[found.rank - 1] == found.token_id
        assert found.top_ids == tuple(order[:5])
        assert found.top_logprobs == pytest.approx(expected[row, order[:5]].tolist(), rel=1e-5, abs=1e-6)


def test_each_row_has_its_own_number():
    counts = [0, 1, 40, 7] * 3
    found = token_logprobs(LOGITS, TOKENS, counts)
    assert [len(one.top_ids) for one in found] == [len(one.top_logprobs) for one in found] == counts
    assert token_logprobs(LOGITS[:2], TOKENS[:2], [0, 0])[1].top_ids == ()


def test_minus_infinity_becomes_the_floor():
    logits = torch.tensor([[0.0, -INF, 1.0, -INF]])
    [found] = token_logprobs(logits, torch.tensor([1]), [4])
    assert found.logprob == LOGPROB_FLOOR
    assert found.rank == 3
    assert found.top_ids == (2, 0, 1, 3)
    assert found.top_logprobs[2:] == (LOGPROB_FLOOR, LOGPROB_FLOOR)


def test_equal_tokens_are_ranked_by_id():
    [low, high] = token_logprobs(torch.tensor([[5.0, 1.0, 5.0, 5.0]] * 2), torch.tensor([0, 3]), [2, 2])
    assert (low.rank, high.rank) == (1, 3)
    assert low.top_ids == (0, 2)


def test_extreme_logits_stay_finite():
    for found in token_logprobs(torch.tensor([[3e38, -3e38, 0.0]] * 3), torch.arange(3), [3] * 3):
        assert all(math.isfinite(x) for x in (found.logprob, *found.top_logprobs))
    assert token_logprobs(torch.tensor([[3e38, -3e38, 0.0]]), torch.tensor([0]), [0])[0].logprob == 0


def test_slices_of_rows_change_nothing(monkeypatch):
    whole = token_logprobs(LOGITS, TOKENS, list(range(12)))
    monkeypatch.setattr(logprobs, "SLICE_BYTES", 5 * 4 * 40)
    assert logprobs.rows_in_a_slice(40) == 5
    assert token_logprobs(LOGITS, TOKENS, list(range(12))) == whole
    assert logprobs.rows_in_a_slice(10**9) == 1
