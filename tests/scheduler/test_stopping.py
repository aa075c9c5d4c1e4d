"""What ends a sequence, and how a stop string in its text is told."""

import pytest
from scheduler_support import make_request, make_scheduler, run_all

from refimpl.decision_texts import describe


class Text:
    """Finds a stop string with the given number of output tokens, or only when a sequence ends."""

    def __init__(self, at=None, at_the_end=None):
        self.at, self.at_the_end, self.calls = at, at_the_end, []

    def append(self, sequence, token_id, silent):
        self.calls.append((sequence.sequence_id, token_id, silent))
        return "END" if len(sequence.output_token_ids) == self.at else None

    def finish(self, sequence):
        self.calls.append((sequence.sequence_id, "end"))
        return self.at_the_end or ("END" if len(sequence.output_token_ids) == self.at else None)


def run(text, depth=0, num_blocks=100, stop_at=None, **request):
    """A request with a stop string, of which ``text`` says whether it is there."""
    scheduler = make_scheduler(num_blocks=num_blocks, max_model_len=400, eos=(2,))
    scheduler._text = text
    made = make_request(0, 5, stop=["END"], **request)
    scheduler.add(made)
    outputs = run_all(scheduler, depth, stop_at=stop_at)
    assert scheduler.kv.num_free_blocks == num_blocks
    [sequence] = made.sequences
    return sequence, outputs


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_string_ends_a_sequence_before_and_with_its_last_token(depth):
    for at in (1, 3, 4):
        sequence, outputs = run(Text(at), depth, max_tokens=4)
        assert (len(sequence.output_token_ids), sequence.finish_reason, sequence.stop_reason) == (at, "stop", "END")
        told = [describe(decision) for decision in sequence.decisions][-2:]
        assert told == ["holds the stop string 'END' in its text", f"ends after {at} output tokens: stop"]
        assert len(sequence.token_times) == at
        assert len(outputs) >= at


def test_text_is_asked_once_a_token_and_once_at_the_end():
    text = Text()
    sequence, _ = run(text, depth=1, max_tokens=4)
    assert text.calls == [*((0, token, False) for token in sequence.output_token_ids), (0, "end")]


@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_token_that_stops_by_its_id_is_left_out_unless_stop_strings_stay(include):
    text = Text()
    sequence, _ = run(text, max_tokens=9, stop_at=7, include_stop_str_in_output=include)
    assert sequence.finish_reason == "stop"
    assert [silent for _, _, silent in text.calls[:-1]] == [False, False, not include]


def test_a_stop_string_that_only_the_end_shows_makes_a_stop_of_a_length():
    sequence, _ = run(Text(at_the_end="END"), max_tokens=4)
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "END")
    sequence, outputs = run(Text(at_the_end="END"), num_blocks=2, max_tokens=40)
    [finish] = [finish for output in outputs for finish in output.exhausted]
    assert (finish.reason, sequence.finish_reason, sequence.stop_reason) == ("stop", "stop", "END")
    sequence, outputs = run(Text(), num_blocks=2, max_tokens=40)
    assert (sequence.finish_reason, sequence.stop_reason) == ("length", "the KV cache of 2 blocks is full")


def test_text_that_can_end_nothing_is_not_asked_about():
    """It is made when somebody reads it, also where an id stops the sequence."""
    scheduler = make_scheduler(num_blocks=100, max_model_len=400, eos=(2,))
    scheduler._text = text = Text()
    made = [make_request(number, 5, max_tokens=4 + number) for number in range(3)]
    for request in made:
        scheduler.add(request)
    run_all(scheduler, stop_at=7)
    assert all(request.finished for request in made)
    assert text.calls == []
