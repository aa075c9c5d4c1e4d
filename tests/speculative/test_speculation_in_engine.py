"""The law of what comes out of a whole engine with a draft model, by enumeration of a vocabulary of four tokens.

Target and draft are random Llamas, so p and q depend on the whole text. Requests of several temperatures, filters and
penalties share each batch; the cache is too small for all of them, so that sequences are preempted amid their rounds. The
error rates are those of test_rejection_sampler.py: here 4 · 85 cells and as many of first drafts, under 1e-3 in all by seed.
"""

from functools import cache

import pytest
import torch
from verify_support import text_rows

from refimpl import LLM, SamplingParams
from refimpl.engine import Engine, EngineArgs
from refimpl.exercises.rounds import Z_LIMIT, Laws, Rounds, chi_square_z, hold_law, num_texts, tokens_of
from refimpl.models.tiny import tiny
from refimpl.sampling.probabilities import probabilities
from refimpl.speculative.law import acceptance
from refimpl.speculative.proposer import Drafts, Proposer

V, L, K = 4, 5, 2
SIZES = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
TARGET, DRAFT = (tiny(seed=seed, head_dim=8, num_hidden_layers=1, **SIZES) for seed in (0, 1))
SPECULATION = {"model": DRAFT, "num_speculative_tokens": K, "adaptive": False}
TEXTS = [tokens_of(text, V) for text in range(num_texts(V, L))]
ASKED = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.2, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
]
"""What requests ask for, in turn."""


@cache
def logits_of(checkpoint):
    """A model's raw logits after every text behind the prompt [0]."""
    asked = [SamplingParams(max_tokens=1, return_logits=[len(text)]) for text in TEXTS]
    with LLM(checkpoint, dtype="float64") as llm:
        outputs = llm.generate([[0, *text] for text in TEXTS], asked, use_tqdm=False)
    logits = [output.outputs[0].logits or output.logits for output in outputs]
    return torch.stack([torch.as_tensor(of_text[len(text)]) for of_text, text in zip(logits, TEXTS, strict=True)])


@cache
def laws_of(number):
    """What a request of one kind is drawn by, and drafted by."""
    rows = text_rows(TEXTS, V, **ASKED[number])
    return Laws(probabilities(logits_of(TARGET), rows)[0], probabilities(logits_of(DRAFT), rows)[0])


def generate(count, speculative_config=SPECULATION, **options):
    """The output of each of ``count`` requests of all kinds in turn, the engine's records, and its preemptions."""
    engine = Engine(
        EngineArgs(model=TARGET, dtype="float64", speculative_config=speculative_config, event_log_size=10**6, **options)
    )
    for number in range(count):
        engine.add_request(str(number), [0], SamplingParams(max_tokens=L, seed=number, **ASKED[number % len(ASKED)]))
    outputs, preemptions = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[int(output.request_id)] = output.outputs[0].token_ids
                preemptions += output.metrics.num_preemptions
    records = list(engine.events.records)
    assert engine.audit() == []
    engine.close()
    return [outputs[number] for number in range(count)], records, preemptions


def checks_in(records):
    """Each check of drafts: (request, text before it, drafts, accepted ones, token behind them)."""
    texts, requests = {}, {}
    for record in records:
        for arrival in record.arrived:
            for sequence in arrival.sequence_ids:
                requests[sequence], texts[sequence] = int(arrival.request_id), 0
        for row, (sequence, token) in enumerate(zip(record.sequence_ids, record.token_ids, strict=True)):
            drafts = record.drafts[row] if record.drafts else ()
            accepted = record.num_accepted[row] if record.num_accepted else 0
            if drafts:
                yield requests[sequence], texts[sequence], drafts, accepted, token
            for taken in (*drafts[:accepted], token):
                texts[sequence] = texts[sequence] * V + taken + 1 if taken >= 0 else texts[sequence]


def hold_laws(outputs):
    """The tokens after each text must be the target's, for requests of each kind."""
    for kind in range(len(ASKED)):
        counts = torch.zeros(len(TEXTS), V, dtype=torch.int64)
        for tokens in outputs[kind :: len(ASKED)]:
            text = 0
            for token in tokens:
                counts[text, token] += 1
                text = text * V + token + 1
        hold_law(Rounds(counts, torch.zeros(0)), laws_of(kind))


def test_twenty_thousand_rounds_have_the_targets_law_and_the_drafts_acceptance():
    outputs, records, preemptions = generate(8_400, max_num_seqs=256, block_size=2, num_gpu_blocks_override=600)
    assert preemptions > 100
    hold_laws(outputs)
    judged = torch.zeros(len(ASKED), len(TEXTS), 2, dtype=torch.int64)
    rounds = 0
    for number, text, drafts, accepted, token in checks_in(records):
        assert token >= 0, "a round brings a token more than it accepts"
        assert accepted <= len(drafts) <= K
        judged[number % len(ASKED), text, int(accepted > 0)] += 1
        rounds += 1
    assert rounds >= 20_000
    for kind in range(len(ASKED)):
        alpha = acceptance(laws_of(kind).p, laws_of(kind).q)
        for text in judged[kind].sum(-1).nonzero().flatten().tolist():
            share = alpha[text].clamp(0, 1)
            assert chi_square_z(judged[kind, text], torch.stack((1 - share, share))) < Z_LIMIT


@pytest.mark.parametrize("sampler", ["rejection", "coupled"])
def test_tokens_depend_on_the_seed_and_not_on_the_batch(sampler):
    config = SPECULATION | {"sampler": sampler}
    together, _, _ = generate(24, config, max_num_seqs=24)
    for size in (1, 8):
        assert generate(24, config, max_num_seqs=size)[0] == together
    assert (together == generate(24, None)[0]) == (sampler == "coupled")


@pytest.mark.parametrize("most", [1, 3, 5])
def test_coupled_drafts_change_no_token_at_any_k(most):
    config = SPECULATION | {"sampler": "coupled", "num_speculative_tokens": most}
    tokens, records, preemptions = generate(60, config, max_num_seqs=32, block_size=2, num_gpu_blocks_override=70)
    assert tokens == generate(60, None)[0]
    assert preemptions > 0
    assert sum(accepted for *_, accepted, _ in checks_in(records)) > 5


def test_a_draft_that_is_the_target_is_accepted_always():
    config = SPECULATION | {"model": TARGET}
    _, records, _ = generate(60, config, max_num_seqs=32)
    found = list(checks_in(records))
    assert len(found) >= 60
    assert all(accepted == len(drafts) for _, _, drafts, accepted, _ in found)


class Guesses(Proposer):
    """Any token, each as probable as the others, and told so."""

    name = "guesses"

    def __init__(self):
        self.random = torch.Generator().manual_seed(0)

    def propose(self, rows):
        shape = (len(rows.planned), rows.most)
        guesses = torch.randint(0, V, shape, generator=self.random)
        return Drafts(guesses, torch.from_numpy(rows.planned), probs=torch.ones(*shape, V))


def test_a_proposer_of_ones_own_may_tell_its_law():
    config = {"method": Guesses(), "num_speculative_tokens": K, "adaptive": False}
    outputs, records, _ = generate(2_000, config, max_num_seqs=256)
    hold_laws(outputs)
    alpha = acceptance(laws_of(0).p, torch.ones(V))
    judged = [(text, accepted > 0) for number, text, _, accepted, _ in checks_in(records) if number % len(ASKED) == 0]
    expected = sum(alpha[text].item() for text, _ in judged)
    assert abs(sum(hit for _, hit in judged) - expected) < 6 * len(judged) ** 0.5 / 2


def test_synthetic_acceptance_is_what_was_asked_for():
    _, records, _ = generate(400, SPECULATION | {"synthetic_acceptance": 0.6}, max_num_seqs=64)
    found = list(checks_in(records))
    assert all(0 <= token < V for *_, token in found)
    hits = torch.tensor([sum(1 for *_, accepted, _ in found if (accepted > 0) is hit) for hit in (False, True)])
    assert chi_square_z(hits, torch.tensor([0.4, 0.6])) < Z_LIMIT
