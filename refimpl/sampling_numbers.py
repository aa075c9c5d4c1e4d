"""SamplingNumbers: what an executor must know of a request's SamplingParams, as numbers alone."""

from __future__ import annotations

import msgspec

from refimpl.sampling_params import SamplingParams


class SamplingNumbers(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """SamplingParams made ready for a device: texts are token ids, ids are checked, and every field travels as msgpack.

    Fields of the same name mean the same as in :class:`refimpl.sampling_params.SamplingParams`. One object serves all
    samples of a request.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias), each id once."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all are."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Each way to write a bad word: the last id of one is not drawn after its others."""
    min_tokens: int = 0
    ending_ids: tuple[int, ...] = ()
    """Ids that are not drawn before ``min_tokens`` output tokens: end-of-sequence and stop tokens."""
    logprobs: int | None = None
    """-1 and numbers beyond the vocabulary are the vocabulary's size here."""
    prompt_logprobs: int | None = None
    return_logits: tuple[int, ...] = ()
    return_hidden_states: tuple[int, ...] = ()
    hooked: bool = False
    """The request has a logits hook. The hook itself cannot travel: see :class:`refimpl.sampling_params.LogitsHooks`."""

    @property
    def adjusted(self) -> bool:
        """Whether something is done to the logits beyond temperature and filters."""
        ids = self.logit_bias or self.allowed_token_ids or self.bad_word_ids or (self.min_tokens and self.ending_ids)
        return bool(ids) or self.penalised or self.hooked

    @property
    def penalised(self) -> bool:
        """Whether a penalty is on."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


def plain_numbers(params: SamplingParams) -> SamplingNumbers:
    """The numbers that need no model and no tokenizer. :mod:`refimpl.sampling_intake` adds the others."""
    return SamplingNumbers(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        return_logits=params.return_logits,
        return_hidden_states=params.return_hidden_states,
        hooked=params.logits_hook is not None,
    )
