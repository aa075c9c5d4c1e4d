"""Every annotated shape and dtype holds at run time: the engine runs with jaxtyping's annotations checked by beartype.

In a process of its own, since checking makes everything several times slower.
"""

import subprocess
import sys

import pytest

CHECK = """
import jaxtyping
names = ["kernels", "layers", "quantization", "attention", "models", "sampling", "speculative", "executor"]
names += ["cache.kv_cache", "cache.block_moves", "cache.host_blocks", "cache.staged_blocks"]
jaxtyping.install_import_hook([f"refimpl.{name}" for name in names], "beartype.beartype")

import dataclasses
import torch
from refimpl import LLM, SamplingParams
from refimpl.kernels import reference
from refimpl.loading.dummy import ShapeCheckpoint
from refimpl.models.tiny import tiny

every = [
    SamplingParams(temperature=0, max_tokens=5),
    SamplingParams(temperature=1, n=2, max_tokens=5),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, max_tokens=5, logprobs=2, prompt_logprobs=0),
    SamplingParams(presence_penalty=1, logit_bias={1: 2}, bad_words=["a", "bcd"], min_tokens=2, max_tokens=5),
    SamplingParams(
        allowed_token_ids=[1, 2, 3], repetition_penalty=2, logits_hook=lambda ids, logits: logits + 1,
        prompt_logprobs=3, return_logits=[0, 2], return_hidden_states=[1, 4], max_tokens=5,
    ),
]
small = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 12, "block_size": 4}
swap = {"swap_space": 0.001, "preemption_mode": "swap"}
naive = {"enable_kv_cache": False, "max_num_batched_tokens": 64}
drafts = {"speculative_config": {"model": "tiny", "num_speculative_tokens": 2, "adaptive": False}}
fp8, awq = {"quantization": "fp8"}, {"quantization": "awq", "dtype": "bfloat16"}
config = dataclasses.replace(tiny().config, qkv_bias=True, mlp_bias=True, output_bias=True, qk_norm=True, windows=(None, 6))
others = {"model": ShapeCheckpoint("other families'", config), "load_format": "dummy"}
overlapped = {"async_scheduling": True}
for options in ({"dtype": "float64"}, {"dtype": "bfloat16"}, fp8, awq, naive, overlapped, swap, drafts, others):
    with LLM(**({"model": "tiny"} | small | options)) as llm:
        outputs = llm.generate([[1, 2, 3], [7] * 30, [5], [6, 7], [8, 9]], every, use_tqdm=False)
        assert [output.outputs[0].finish_reason in ("stop", "length") for output in outputs] == [True] * 5
try:
    reference.rms_norm(torch.zeros(3, 8), torch.zeros(7), 1e-5)
except jaxtyping.TypeCheckError:
    print("a wrong shape is seen")
"""


@pytest.mark.timeout(900)  # under half a minute alone; the machine may be shared
def test_annotated_shapes_hold_at_run_time():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "a wrong shape is seen"
