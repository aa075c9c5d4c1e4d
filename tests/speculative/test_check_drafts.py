"""From logits to verdicts: the vectorised check, the papers' algorithm draft by draft, and the kernels say the same."""

import math

import pytest
import torch
from verify_support import text_rows

from refimpl.kernels import rejection_reference
from refimpl.kernels.philox import Purpose
from refimpl.outputs import NOTHING_LEFT
from refimpl.sampling.adjustments import adjust
from refimpl.speculative.check import check_drafts, draw_drafts

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

V = 40
SETTINGS = {
    "plain": {},
    "filtered": {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"frequency_penalty": 0.8, "repetition_penalty": 1.2, "logit_bias": ((3, 2.0),)},
    "greedy": {"temperature": 0.0},
}


def case(setting, S=300, K=3, same=False, hooks=None):
    """Logits of S · (K + 1) target rows, their parameters, and drafts drawn from another law, or from the same one."""
    random = torch.Generator().manual_seed(3)
    texts = torch.randint(0, V, (S, K + 2), generator=random).tolist()
    texts = [text[: 2 + place] for text in texts for place in range(K + 1)]
    rows = text_rows(texts, V, **SETTINGS[setting])
    rows.seed.copy_(torch.arange(len(texts)) // (K + 1))
    places = torch.arange(len(texts)).view(S, K + 1)
    target = 2 * torch.randn(S, K + 1, V, generator=random)
    draft = target[:, :K] if same else target[:, :K] + torch.randn(S, K, V, generator=random)
    ids, laws = zip(
        *(draw_drafts(draft[:, i], text_rows(texts[i :: K + 1], V, **SETTINGS[setting])) for i in range(K)), strict=True
    )
    num_drafts = torch.arange(S) % (K + 1) if not same else torch.full((S,), K)
    return target.flatten(0, 1), rows, places, torch.stack(ids, 1), torch.stack(laws, 1), num_drafts, draft


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_vectorised_check_is_the_papers_algorithm(setting):
    logits, rows, places, ids, laws, num_drafts, draft = case(setting)
    verdict, failures = check_drafts(logits, rows, places, ids, laws, num_drafts)
    adjusted, drafts = logits, draft
    if rows.adjustments is not None:
        adjusted = adjust(logits, rows.adjustments)[0]
        padded = torch.cat((draft, draft[:, :1]), 1).flatten(0, 1)  # of the last place nothing is drafted
        drafts = adjust(padded, rows.adjustments)[0].view(len(ids), -1, V)[:, :-1]
    filters = {} if setting != "filtered" else {name: getattr(rows, name) for name in ("top_k", "top_p", "min_p")}
    numbers = (rows.temperature, rows.seed, rows.path, rows.position)
    token_ids, num_accepted = rejection_reference.verify(
        adjusted.double(), places, ids, drafts.double(), num_drafts, *numbers, **filters
    )
    assert verdict.token_ids.tolist() == token_ids.tolist()
    assert verdict.num_accepted.tolist() == num_accepted.tolist()
    assert verdict.num_accepted.unique().tolist() == [0, 1, 2, 3]
    assert failures == {}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_draft_that_is_the_target_is_accepted_always(setting):
    logits, rows, places, ids, laws, num_drafts, _ = case(setting, same=True)
    verdict, _ = check_drafts(logits, rows, places, ids, laws, num_drafts)
    assert verdict.num_accepted.unique().tolist() == [3]
    assert verdict.token_ids[:, :3].tolist() == ids.tolist()


def test_a_failed_hook_ends_its_own_round():
    def hook(token_ids, logits):
        raise ValueError("no")

    logits, rows, places, ids, laws, num_drafts, _ = case("penalised", S=4, same=True)
    rows.adjustments.hooks[rows.adjustments.rows.index(5)] = (hook,)  # the second sequence's second row
    verdict, failures = check_drafts(logits, rows, places, ids, laws, num_drafts)
    assert list(failures) == [5]
    assert verdict.num_accepted.tolist() == [3, 1, 3, 3]
    assert verdict.token_ids[1].tolist() == [int(ids[1, 0]), NOTHING_LEFT, -1, -1]


def test_what_is_no_distribution_is_no_draft():
    logits, rows, places, _, _, num_drafts, draft = case("plain", S=3, same=True)
    spoilt = draft.clone()
    spoilt[1] = math.nan
    drawn, laws = zip(*(draw_drafts(spoilt[:, i], text_rows([[1]] * 3, V), Purpose.DRAFT) for i in range(3)), strict=True)
    verdict, _ = check_drafts(logits, rows, places, torch.stack(drawn, 1), torch.stack(laws, 1), num_drafts)
    assert verdict.num_accepted[1] == 0
    assert 0 <= verdict.token_ids[1, 0] < V


def moved(rows, device):
    """The same parameters on another device."""
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "path", "position"):
        object.__setattr__(rows, name, getattr(rows, name).to(device))
    return rows


@pytest.mark.parametrize("setting", ["plain", "filtered", "penalised"])
def test_kernels_say_the_same(setting, monkeypatch):
    """Drafts drawn by kernels, checked by kernels: the tokens are those of torch's way, from the same logits."""
    pytest.importorskip("triton")
    S = 200 if ON_GPU else 2
    logits, rows, places, ids, laws, num_drafts, draft = case(setting, S=S, K=1)
    expected, _ = check_drafts(logits, rows, places, ids, laws, num_drafts)
    if ON_GPU and setting == "penalised":
        pytest.skip("the adjustments of this test are on the host")
    monkeypatch.setattr("refimpl.speculative.check.by_triton", lambda x: True)
    texts = [[1] * 2] * S
    adjusted = draft
    if rows.adjustments is not None:
        adjusted = adjust(torch.cat((draft, draft[:, :1]), 1).flatten(0, 1), rows.adjustments)[0].view(S, 2, V)[:, :1]
    drawn, law = draw_drafts(adjusted[:, 0].to(DEVICE), moved(text_rows(texts, V, **SETTINGS[setting]), DEVICE))
    assert law.shape == (S, V)
    assert (drawn >= 0).all()
    on_device = [tensor.to(DEVICE) for tensor in (places, ids, adjusted.contiguous(), num_drafts)]
    verdict, failures = check_drafts(logits.to(DEVICE), moved(rows, DEVICE), *on_device)
    assert verdict.token_ids.tolist() == expected.token_ids.tolist()
    assert verdict.num_accepted.tolist() == expected.num_accepted.tolist()
    assert failures == {}
