"""From BeamSearchParams to a search: what only the engine and the model can tell is checked and filled in here."""

from __future__ import annotations

from refimpl.beam_group import BeamGroup
from refimpl.beam_params import BeamSearchParams
from refimpl.config import EngineArgs, ModelConfig
from refimpl.errors import SamplingParamsError
from refimpl.sampling_params import SamplingParams


class BeamIntake:
    """Makes the searches of one engine."""

    def __init__(self, model: ModelConfig, args: EngineArgs) -> None:
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
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            skip_special_tokens=params.skip_special_tokens,
            output_kind="final_only",
        )

    def num_proposals(self, params: BeamSearchParams) -> int:
        """Log-probabilities that a row of a search must send back."""
        return min(self.group(params, params.max_tokens, 0).num_candidates, self._model.vocab_size)

    def group(self, params: BeamSearchParams, max_tokens: int, first_sequence_id: int) -> BeamGroup:
        """A search at its beginning."""
        eos = () if params.ignore_eos else self._model.eos_token_ids
        return BeamGroup(params, max_tokens, len({*eos, *params.stop_token_ids}), first_sequence_id)
