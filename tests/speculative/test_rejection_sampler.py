"""The check of drafted tokens: the law of what comes of it, by enumeration of tiny worlds, and each of its corners.

Error rates of the statistical tests: a right sampler is refused at one cell with the probability that
``refimpl.exercises.rounds.Z_LIMIT`` tells, 5e-7 at three degrees of freedom; a world here has 85 cells and a law of lengths,
and 11 worlds are played: under 1e-3 in all if every seed were new. Seeds are fixed, so a run is like all others.
"""

import math
from dataclasses import replace

import pytest
import torch
from verify_support import L, V, by_library, laws_by

from refimpl.exercises import ExerciseError
from refimpl.exercises.rounds import (
    Laws,
    certain_draft,
    chi_square_z,
    drawn_draft,
    hold_law,
    hold_lengths,
    length_law,
    num_texts,
    play,
    tokens_of,
)
from refimpl.exercises.wrong_verifiers import RIGHT, WRONG
from refimpl.kernels.philox import Purpose, uniform
from refimpl.outputs import BAD_LOGITS, NO_TOKEN, NOTHING_LEFT
from refimpl.sampling.sampler import draw
from refimpl.speculative.rejection_sampler import round_uniforms, verify, verify_coupled

NAN, INF = math.nan, math.inf


def random_case(S, K, vocab, seed=0, scale=2.0):
    """p, drafted tokens, q, and uniform numbers."""
    random = torch.Generator().manual_seed(seed)
    p = (scale * torch.randn(S, K + 1, vocab, generator=random)).softmax(-1)
    q = (scale * torch.randn(S, K, vocab, generator=random)).softmax(-1)
    ids = draw(q.flatten(0, 1), torch.rand(S * K, generator=random, dtype=torch.float64)).view(S, K)
    numbers = torch.rand(S, 2 * K + 1, generator=random, dtype=torch.float64)
    return p, ids, q, numbers[:, :K], numbers[:, K:]


def drafts_of(ids):
    return torch.full((len(ids),), ids.shape[1])


# ---------------------------------------------------------------------- the law, by enumeration

SETTINGS = {
    "T=1": {},
    "T=0.5": {"temperature": 0.5},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.8},
    "min_p, T=0.5": {"min_p": 0.1, "temperature": 0.5},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "all": {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "frequency_penalty": 0.5, "logit_bias": ((1, 1.5),)},
}


@pytest.mark.parametrize(("setting", "K"), [*((setting, 3) for setting in SETTINGS), ("T=1", 1), ("T=0.5", 2)])
def test_tokens_have_the_targets_law_and_rounds_their_lengths(setting, K):
    laws = laws_by(K, **SETTINGS[setting])
    rounds = play(laws, by_library, K, L)
    hold_law(rounds, laws)
    hold_lengths(rounds, laws)


def test_drafts_without_a_distribution_leave_the_law_too():
    """Of one-hot drafts, an n-gram's say, the accepted are as many as p(x) says."""
    laws = laws_by(3)
    rounds = play(laws, by_library, 3, L, draft=certain_draft)
    hold_law(rounds, laws)
    one_hot = torch.nn.functional.one_hot(laws.q.argmax(-1), V).float()
    hold_lengths(rounds, Laws(laws.p, one_hot))


def test_sequences_of_different_k_share_a_batch():
    """Padded, with rubbish behind: the law is each one's own, and so is every token."""
    laws, random = laws_by(3), torch.Generator().manual_seed(5)

    def verify_some(p, ids, q, accept, drawn):
        num_drafts = torch.randint(0, ids.shape[1] + 1, (len(ids),), generator=random)
        padding = torch.arange(ids.shape[1]) >= num_drafts[:, None]
        p, ids, q = p.clone(), ids.masked_fill(padding, 99), q.masked_fill(padding[..., None], NAN)
        p[:, 1:].masked_fill_(padding[..., None], INF)
        return verify(p, ids, q, num_drafts, accept, drawn).token_ids

    hold_law(play(laws, verify_some, 3, L), laws)


def test_one_hot_drafts_are_those_whose_q_is_one_hot():
    p, ids, _, accept, drawn = random_case(300, 4, 7)
    told = verify(p, ids, torch.nn.functional.one_hot(ids, 7).float(), drafts_of(ids), accept, drawn)
    plain = verify(p, ids, None, drafts_of(ids), accept, drawn)
    assert told.token_ids.tolist() == plain.token_ids.tolist()
    assert len(plain.num_accepted.unique()) > 3


@pytest.mark.parametrize("mistake", WRONG)
def test_a_planted_mistake_is_found_out(mistake):
    """By the law of the tokens or by that of the lengths, each of which the same check without the mistake passes."""
    wrong, draft = WRONG[mistake]
    laws = laws_by(3, temperature=0.8)
    rounds = play(laws, wrong, 3, L, draft=draft)
    with pytest.raises(ExerciseError, match=r"z = "):
        (hold_lengths if mistake == "no bonus" else hold_law)(rounds, laws)


def test_without_a_mistake_the_pieces_are_right():
    laws = laws_by(3, temperature=0.8)
    rounds = play(laws, RIGHT.verify, 3, L)
    hold_law(rounds, laws)
    hold_lengths(rounds, laws)
    assert len(WRONG) >= 12


def test_the_law_of_lengths_is_a_law_and_its_mean_the_sum_of_overlaps():
    laws = laws_by(3)
    lengths = length_law(laws, 3)
    assert lengths[0] == 0
    assert lengths.sum().item() == pytest.approx(1)
    first = torch.minimum(laws.p[0], laws.q[0]).sum().item()
    assert 1 - lengths[1].item() == pytest.approx(first, abs=1e-6)


def test_the_chi_square_sees_what_is_off_and_bears_rare_cells():
    law = torch.tensor([0.5, 0.3, 0.2, 1e-5])
    assert abs(chi_square_z(torch.tensor([5_000, 3_000, 2_000, 1]), law)) < 2
    assert chi_square_z(torch.tensor([5_600, 2_400, 2_000, 0]), law) > 12
    assert chi_square_z(torch.tensor([5_000, 3_000, 1_950, 50]), law) < 12  # no sign of a rare cell alone: it is merged
    assert chi_square_z(torch.tensor([1, 3]), torch.tensor([1.0, 0.0])) == INF
    assert tokens_of(num_texts(V, 3) - 1, V) == (3, 3)


# ---------------------------------------------------------------------- what is exact, draw by draw


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draft_that_is_the_target_is_accepted_always(dtype):
    p, ids, _, accept, drawn = random_case(2_000, 5, 50)
    p = p.to(dtype)
    accept = torch.where(torch.arange(5) == 2, 1 - 2**-33, accept)  # the largest of all uniform numbers
    ids = draw(p[:, :5].flatten(0, 1), accept.flatten()).view(-1, 5)
    verdict = verify(p, ids, p[:, :5].clone(), drafts_of(ids), accept, drawn)
    assert verdict.num_accepted.unique().tolist() == [5]
    assert verdict.token_ids[:, :5].tolist() == ids.tolist()
    assert verdict.token_ids[:, 5].tolist() == draw(p[:, 5], drawn[:, 5]).tolist()


@pytest.mark.parametrize("one_hot", [False, True])
def test_greedy_rows_are_the_argmax_whatever_is_drafted(one_hot):
    p, ids, q, accept, drawn = random_case(500, 4, 6)
    best = p.argmax(-1)
    ids[::3] = best[::3, :4]
    greedy = torch.nn.functional.one_hot(best, 6).float()
    verdict = verify(greedy, ids, None if one_hot else q, drafts_of(ids), accept, drawn)
    assert verdict.token_ids.tolist() == verify_coupled(best, ids, drafts_of(ids)).token_ids.tolist()
    assert verdict.num_accepted[::3].unique().tolist() == [4]


def test_no_draft_is_no_speculation():
    """The token is the sampler's, by the number that is the position's without speculation."""
    p, ids, q, _, _ = random_case(200, 3, 30)
    seeds, first = torch.arange(200), torch.arange(200) % 7 + 1
    numbers = round_uniforms(seeds, 0 * seeds, first, 3)
    plain = draw(p[:, 0], uniform(seeds, 0 * seeds, first, Purpose.TARGET))
    for kept in (0, 3):
        drafts, uniforms = (ids[:, :kept], q[:, :kept], 0 * seeds), (numbers.accept[:, :kept], numbers.draw[:, : kept + 1])
        verdict = verify(p[:, : kept + 1], *drafts, *uniforms)
        assert verdict.token_ids[:, 0].tolist() == plain.tolist()
        assert not verdict.num_accepted.any()
        assert (verdict.token_ids[:, 1:] == NO_TOKEN).all()


def test_each_position_and_purpose_has_a_number_of_its_own():
    one = torch.tensor([3])
    numbers = round_uniforms(one, one, torch.tensor([10]), 4)
    assert numbers.draw[0, 2].item() == uniform(one, one, torch.tensor([12]), Purpose.TARGET).item()
    assert numbers.accept[0, 2].item() == uniform(one, one, torch.tensor([12]), Purpose.ACCEPT).item()
    assert len({*numbers.draw.flatten().tolist(), *numbers.accept.flatten().tolist()}) == 9
    none = round_uniforms(one, one, torch.tensor([10]), 0)
    assert (none.accept.shape, none.draw[0, 0]) == ((1, 0), numbers.draw[0, 0])


@pytest.mark.parametrize("size", [1, 8])
def test_a_verdict_does_not_depend_on_its_batch(size):
    p, ids, q, accept, drawn = random_case(40, 3, 33)
    num_drafts = torch.arange(40) % 4
    together = verify(p, ids, q, num_drafts, accept, drawn)
    for start in range(0, 40, size):
        some = slice(start, start + size)
        alone = verify(p[some], ids[some], q[some], num_drafts[some], accept[some], drawn[some])
        assert alone.token_ids.tolist() == together.token_ids[some].tolist()
        assert alone.num_accepted.tolist() == together.num_accepted[some].tolist()


def test_the_arguments_are_not_changed():
    case = random_case(50, 3, 9)
    before = [tensor.clone() for tensor in case]
    verify(*case[:3], drafts_of(case[1]), *case[3:])
    assert all(map(torch.equal, case, before))


def test_laws_count_up_to_a_factor():
    """What filters leave need not sum to 1, on either side."""
    p, ids, q, accept, drawn = random_case(400, 3, 9)
    plain = verify(p, ids, q, drafts_of(ids), accept, drawn)
    scaled = verify(p * 0.25, ids, q * 0.5, drafts_of(ids), accept, drawn)
    assert scaled.token_ids.tolist() == plain.token_ids.tolist()


# ---------------------------------------------------------------------- corners

HALF = torch.tensor([[0.5]], dtype=torch.float64)


def one(p, draft, q, accept=HALF, u=0.5):
    """The verdict on one draft: its tokens."""
    p = torch.tensor([p, [0.0, 1.0, 0.0]])
    q = None if q is None else torch.tensor([[q]])
    numbers = torch.full((1, 2), u, dtype=torch.float64)
    return verify(p[None], torch.tensor([[draft]]), q, torch.tensor([1]), accept, numbers).token_ids[0].tolist()


@pytest.mark.parametrize(
    ("p", "draft", "q", "tokens"),
    [
        ([0.2, 0.3, 0.5], 0, [0.2, 0.3, 0.5], [0, 1]),
        ([0.0, 0.5, 0.5], 0, [0.0, 0.5, 0.5], [2, NO_TOKEN]),  # p = q = 0: no draft of q's; what is left of p − q is 0
        ([0.2, 0.3, 0.5], 0, [0.0, 0.5, 0.5], [0, 1]),  # q = 0 alone: p/q is infinite
        ([0.0, 1.0, 0.0], 0, [1.0, 0.0, 0.0], [1, NO_TOKEN]),
        ([0.0, 0.0, 1.0], 1, None, [2, NO_TOKEN]),
        ([0.0, 0.5, 0.5], 0, None, [2, NO_TOKEN]),
        ([0.0, 0.0, 0.4], 2, None, [2, 1]),
    ],
)
def test_zeros(p, draft, q, tokens):
    assert one(p, draft, q) == tokens


@pytest.mark.parametrize("q", [None, [0.5, 0.25, 0.25]])
def test_what_p_forbids_is_not_accepted_by_the_number_0(q):
    assert one([0.0, 0.5, 0.5], 0, q, accept=torch.zeros(1, 1, dtype=torch.float64)) == [2, NO_TOKEN]


def test_where_rounding_leaves_nothing_the_token_is_drawn_from_p():
    """A rejection with p − q nowhere above 0: here p is told as 0 where q is not, which no token can make good for."""
    p, q = [0.0, 1.0, 1e-45], [1e-20, 1.0, 1e-20]
    assert one(p, 0, q) == [1, NO_TOKEN]
    assert one(p, 0, q, u=1 - 2**-33) == [1, NO_TOKEN]


@pytest.mark.parametrize("bad", [[NAN, 0.5, 0.5], [INF, 0.0, 0.0], [0.0, 0.0, 0.0]], ids=str)
@pytest.mark.parametrize("draft", [0, 1])
def test_a_draft_of_no_distribution_is_none(bad, draft):
    """The token comes from p, and not from what is left of p − q."""
    for u, token in ((0.1, 0), (0.9, 2)):
        assert one([0.2, 0.3, 0.5], draft, bad, u=u) == [token, NO_TOKEN]


@pytest.mark.parametrize("draft", [-1, 3, 2**40])
@pytest.mark.parametrize("q", [None, [0.2, 0.3, 0.5]])
def test_a_draft_outside_the_vocabulary_is_none(draft, q):
    assert one([0.2, 0.3, 0.5], draft, q, u=0.9) == [2, NO_TOKEN]


@pytest.mark.parametrize(
    ("row", "code"), [([NAN, 1, 1], BAD_LOGITS), ([INF, 0, 0], BAD_LOGITS), ([0.0] * 3, NOTHING_LEFT)], ids=str
)
@pytest.mark.parametrize("q", [None, "q"])
def test_a_spoilt_row_fails_where_it_would_without_speculation(row, code, q):
    """Its own sequence, at its own position, after what was accepted; and not at all where the round ends before."""
    p, ids, law, accept, drawn = random_case(3, 2, 3)
    p[:] = torch.tensor([0.0, 1.0, 0.0])
    ids[:] = 1
    ids[2, 0] = 0
    p[1, 1] = p[2, 1] = torch.tensor(row)
    verdict = verify(p, ids, None if q is None else law, drafts_of(ids), accept, drawn)
    assert verdict.token_ids.tolist() == [[1, 1, 1], [1, code, NO_TOKEN], [1, NO_TOKEN, NO_TOKEN]]
    assert verdict.num_accepted.tolist() == [2, 1, 0]


# ---------------------------------------------------------------------- coupled


@pytest.mark.parametrize("K", [0, 1, 3])
def test_coupled_verdicts_are_the_tokens_without_speculation(K):
    """Of texts that grow by rounds of any K, with drafts drawn by the same numbers, each token is the one drawn alone."""
    laws, seeds = laws_by(3), torch.arange(300)

    def draw_at(law, text, position):
        return draw(law[text], uniform(seeds, 0 * seeds, torch.full_like(seeds, position), Purpose.TARGET))

    alone, text = [], 0 * seeds
    for position in range(L):
        alone.append(draw_at(laws.p, text, position))
        text = text * V + alone[-1] + 1
    wanted = torch.stack(alone, 1)
    accepted = 0
    for start in range(L):  # a round at each position of the text without speculation
        text = 0 * seeds
        for position in range(start):
            text = text * V + wanted[:, position] + 1
        targets, drafts = [draw_at(laws.p, text, start)], []
        for index in range(K):
            drafts.append(draw_at(laws.q, text, start + index))
            text = text * V + drafts[-1] + 1
            targets.append(draw_at(laws.p, text, start + index + 1))
        draft_ids = torch.stack(drafts, 1) if K else wanted[:, :0]
        verdict = verify_coupled(torch.stack(targets, 1), draft_ids, torch.full_like(seeds, K))
        width = min(K + 1, L - start)
        came = verdict.token_ids[:, :width]
        assert torch.equal(came, torch.where(came == NO_TOKEN, came, wanted[:, start : start + width]))
        assert ((verdict.token_ids != NO_TOKEN).sum(-1) == verdict.num_accepted + 1).all()
        accepted += int((verdict.num_accepted > 0).sum())
    assert accepted > 0 or K == 0


def test_coupled_rounds_end_at_failures_and_at_their_own_k():
    targets = torch.tensor([[4, BAD_LOGITS, 6], [4, 5, 6], [NOTHING_LEFT, 5, 6], [4, 5, 6]])
    drafts = torch.tensor([[4, BAD_LOGITS], [4, 5], [NOTHING_LEFT, 5], [4, 5]])
    verdict = verify_coupled(targets, drafts, torch.tensor([2, 2, 2, 1]))
    assert verdict.token_ids.tolist() == [[4, BAD_LOGITS, -1], [4, 5, 6], [NOTHING_LEFT, -1, -1], [4, 5, -1]]
    assert verdict.num_accepted.tolist() == [1, 2, 0, 1]


def test_coupling_accepts_less_than_the_exact_check():
    """Both have the target's law; the intervals of a token overlap by less than min(p, q)."""
    p, _, q, accept, drawn = random_case(20_000, 1, 8, scale=1.0)
    shared = draw(q[:, 0], drawn[:, 0])
    coupled = verify_coupled(torch.stack((draw(p[:, 0], drawn[:, 0]), shared), 1), shared[:, None], drafts_of(accept))
    own = draw(q[:, 0], drawn[:, 1])[:, None]
    exact = verify(p, own, q, drafts_of(own), accept, drawn)
    overlap = torch.minimum(p[:, 0], q[:, 0]).sum(-1).mean()
    assert exact.num_accepted.double().mean().item() == pytest.approx(overlap.item(), abs=0.02)
    assert coupled.num_accepted.sum() < 0.95 * exact.num_accepted.sum()


def test_a_guardless_check_is_what_the_guard_is_for():
    """Without it a redraw from nothing gives the last token, which p forbids."""
    p, q = torch.tensor([[[0.25, 0.75, 0.0]] * 2]), torch.tensor([[[0.25 + 3e-8, 0.75, 0.0]]])
    ids, just_under = torch.tensor([[0]]), torch.full((1, 2), 1 - 2**-33, dtype=torch.float64)
    guardless = replace(RIGHT, has_guard=False).verify(p, ids, q, just_under[:, :1], just_under)
    assert guardless[0, 0] == 2
    assert by_library(p, ids, q, just_under[:, :1], just_under)[0, 0] == 1
    assert drawn_draft(q[:, 0], just_under[:, 0])[0].item() == 1
