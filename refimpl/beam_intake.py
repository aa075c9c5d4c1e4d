"""From BeamSearchParams to a search: what only the engine and the model can tell is checked and filled in here."""

from __future__ import annotations

from refimpl.beam_endings import StopStrings
from refimpl.beam_group import BeamGroup, StopIds, num_candidates
from refimpl.beam_params import BeamSearchParams
from refimpl.config import EngineArgs, ModelConfig
from refimpl.errors import SamplingParamsError
from refimpl.sampling_params import SamplingParams
from refimpl.tokenizer.text_stream import TextStream
from refimpl.tokenizer.tokenizer import Tokenizer


class BeamIntake:
    """Makes the searches of one engine."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig, args: EngineArgs) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._max_num_seqs, _ = args.step_limits()
        self._static = args.scheduler == "static"

    def drawing(self, request_id: str, params: BeamSearchParams) -> SamplingParams:
        """How the rows of a search are computed. What they draw is not used.

        Raises:
            SamplingParamsError: this engine cannot search so.

        """
        if self._static:
            raise SamplingParamsError(
                "scheduler='static' runs a batch of given sequences, and beams come and go; use scheduler='continuous'",
                request_id=request_id,
            )
        if params.beam_width > self._max_num_seqs:
            raise SamplingParamsError(
                f"beam_width is {params.beam_width}, but only max_num_seqs = {self._max_num_seqs} sequences run at once; "
                "lower the first or raise the second",
                request_id=request_id,
            )
        return SamplingParams(
            temperature=0,
            max_tokens=params.max_tokens,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            include_stop_str_in_output=params.include_stop_str_in_output,
            ignore_eos=params.ignore_eos,
            skip_special_tokens=params.skip_special_tokens,
            output_kind="final_only",
        )

    def num_proposals(self, params: BeamSearchParams) -> int:
        """Log-probabilities that a row of a search must send back."""
        return min(num_candidates(params.beam_width, self._stop_ids(params)), self._model.vocab_size)

    def group(
        self, params: BeamSearchParams, drawing: SamplingParams, prompt: list[int], max_tokens: int, first_sequence_id: int
    ) -> BeamGroup:
        """A search at its beginning; the arguments are those of the group, and what makes its text."""
        stop_ids = self._stop_ids(params)
        endings = StopStrings(stop_ids, TextStream(self._tokenizer, drawing, prompt)) if params.stop else StopIds(stop_ids)
        return BeamGroup(params, max_tokens, endings, first_sequence_id)

    def _stop_ids(self, params: BeamSearchParams) -> frozenset[int]:
        eos = () if params.ignore_eos else self._model.eos_token_ids
        return frozenset({*eos, *params.stop_token_ids})
