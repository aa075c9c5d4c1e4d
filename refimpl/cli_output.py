"""``refimpl generate`` once its options are read: generates, and prints text as it comes, text when it is done, or JSON."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from refimpl.errors import RefimplError
from refimpl.sampling_params import SamplingParams

if TYPE_CHECKING:
    from refimpl.llm import LLM
    from refimpl.outputs import RequestOutput


@dataclass(frozen=True)
class GenerateCommand:
    """What to do with each prompt, and how to show it. Ctrl-C keeps what is printed, and prints what had finished."""

    llm: LLM
    params: SamplingParams
    chat: bool
    """Whether prompts are a user's messages; the answer is printed alone then, else after its prompt."""
    as_json: bool
    explain: bool

    def run(self, prompts: list[Any], drawing: AbstractContextManager[None] | None) -> bool:
        """Generate and print. False where a sample ended with an error, which is told on stderr.

        One sample alone is printed while it comes, unless something else is ``drawing``.
        """
        alone = len(prompts) == 1 and self.params.n == 1
        if alone and not self.as_json and drawing is None:
            return self._tell(self._print_stream(prompts[0]))
        from refimpl.interrupts import GenerationInterrupted

        try:
            with drawing or nullcontext():
                outputs = self._generate(prompts, show_bar=drawing is None)
        except GenerationInterrupted as interrupt:
            finished = [(o, prompt) for o, prompt in zip(interrupt.outputs, prompts, strict=True) if o is not None]
            for output, prompt in finished:
                self._print(output, prompt, alone)
            sys.stderr.write(f"refimpl: {len(finished)} of {len(prompts)} prompts had finished\n")
            raise
        fine = [self._print(output, prompt, alone) for prompt, output in zip(prompts, outputs, strict=True)]
        return all(fine)

    def _generate(self, prompts: list[Any], show_bar: bool) -> list[RequestOutput]:
        show_bar = show_bar and not self.as_json and len(prompts) > 1 and sys.stderr.isatty()
        if self.chat:
            return self.llm.chat([_conversation(prompt) for prompt in prompts], self.params, use_tqdm=show_bar)
        return self.llm.generate(prompts, self.params, use_tqdm=show_bar)

    def _print_stream(self, prompt: Any) -> RequestOutput:
        """Generate one sample, and print its text while it comes; returns the last output, which tells the end."""
        from refimpl.interrupts import interrupts_between_steps
        from refimpl.llm import unwrap

        engine, request_id, last = self.llm.engine, "generate", None
        asked = engine.tokenizer.apply_chat_template(_conversation(prompt)) if self.chat else unwrap(prompt)
        engine.add_request(request_id, asked, msgspec.structs.replace(self.params, output_kind="delta"))
        self._print_prompt(prompt)
        try:
            with interrupts_between_steps() as check_interrupt:
                while last is None or not last.finished:
                    check_interrupt()
                    for last in engine.step():
                        _write("".join(sample.text for sample in last.outputs))
        except KeyboardInterrupt:
            engine.abort(request_id)
            _write("\n")
            raise
        _write("\n")
        return last

    def _print(self, output: RequestOutput, prompt: Any, alone: bool) -> bool:
        """One prompt's samples when they are done: a JSON object, or texts, with titles unless there is one ``alone``."""
        if self.as_json:
            _write(json.dumps(_json_object(output, prompt), ensure_ascii=False) + "\n")
            return self._tell(output)
        from rich.console import Console
        from rich.text import Text

        for sample in output.outputs:
            if not alone:
                title = _text(prompt) or f"{len(output.prompt_token_ids)} token ids"
                title = title if len(output.outputs) == 1 else f"{title} — sample {sample.index}"
                Console(highlight=False, soft_wrap=True).rule(Text(title), align="left")
            self._print_prompt(prompt)
            _write(sample.text + "\n")
        return self._tell(output)

    def _print_prompt(self, prompt: Any) -> None:
        """Paler than the text that follows on the same line; through a pipe as it is."""
        text = "" if self.chat else _text(prompt)
        _write(f"\x1b[2m{text}\x1b[0m" if text and sys.stdout.isatty() else text)

    def _tell(self, output: RequestOutput) -> bool:
        """Errors, and the story if it is asked for, on stderr. False where there was an error."""
        errors = [sample.stop_reason for sample in output.outputs if sample.finish_reason == "error"]
        for error in errors:
            sys.stderr.write(f"refimpl: {error}\n")
        if self.explain:
            sys.stderr.write(self.llm.engine.explain(output.request_id) + "\n")
        return not errors


def _write(text: str) -> None:
    """To standard output, at once; characters that it cannot show become question marks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _text(prompt: Any) -> str:
    """The text of a prompt as given; token ids have none."""
    return prompt if isinstance(prompt, str) else str(prompt.get("prompt") or "")


def _conversation(prompt: Any) -> list[dict[str, str]]:
    if not _text(prompt):
        raise RefimplError("--chat puts texts through the chat template; a prompt of token ids has none")
    return [{"role": "user", "content": _text(prompt)}]


def _logprobs(tokens: Any, name: str = "logprobs", **beside: Any) -> dict[str, Any]:
    """The keys of log-probabilities, where they were asked for: for each token, by id."""
    return {} if tokens is None else {name: msgspec.to_builtins(tokens, str_keys=True), **beside}


def _json_object(output: Any, given: Any) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "prompt": output.prompt if output.prompt is not None else _text(given) or None,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {
                "index": sample.index,
                "text": sample.text,
                "token_ids": sample.token_ids,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                **_logprobs(sample.logprobs, cumulative_logprob=sample.cumulative_logprob),
            }
            for sample in output.outputs
        ],
        **_logprobs(output.prompt_logprobs, "prompt_logprobs"),
        "metrics": {
            "arrival_time": metrics.arrival_time,
            "first_scheduled_time": metrics.first_scheduled_time,
            "first_token_time": metrics.first_token_time,
            "finished_time": metrics.finished_time,
            "time_to_first_token": metrics.time_to_first_token,
            "inter_token_latencies": metrics.inter_token_latencies,
            "token_times": metrics.token_times,
            "num_preemptions": metrics.num_preemptions,
        },
    }
