"""vLLM in an environment of its own: run by that environment's Python, it imports nothing of refimpl.

``python peer_vllm.py OPTIONS``, a JSON object; then a line of requests on stdin, a line of what became of them on stdout.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

MARK = "refimpl-peer "
"""Begins the lines that are answers: what else is printed is the engine's own."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def main(options: dict[str, Any]) -> None:
    """Serve lines of requests until stdin ends."""
    # Python puts a script's folder first, where files of ours would be taken for packages of the same names.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    import torch
    import vllm  # type: ignore[import-not-found,unused-ignore]  # that environment's, not ours

    torch.set_num_threads(options.pop("threads"))
    llm = vllm.LLM(**options, skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=False)
    answer({"version": vllm.__version__, "torch": torch.__version__, "torch_threads": torch.get_num_threads()})
    for line in sys.stdin:
        answer(serve(llm.llm_engine, json.loads(line), vllm))


def serve(engine: Any, requests: list[Any], vllm: Any) -> dict[str, Any]:
    """Queue all requests, step until none is left."""
    started = time.perf_counter()
    for number, (prompt, output) in enumerate(requests):
        params = vllm.SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    answers: dict[str, list[int]] = {}
    first = None
    while engine.has_unfinished_requests():
        answers |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
        if first is None and len(answers) == len(requests):
            first = time.perf_counter() - started
    total = time.perf_counter() - started
    ids = [answers[number] for number in sorted(answers, key=lambda request_id: int(request_id.split("-")[0]))]
    return {"first_tokens": first or total, "total": total, "token_ids": ids}


def answer(record: dict[str, Any]) -> None:
    """Print an answer."""
    print(MARK + json.dumps(record), flush=True)  # noqa: T201 - this is the protocol


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
