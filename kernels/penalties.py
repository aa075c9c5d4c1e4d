"""Penalties on tokens that a text holds already, in work that goes by the text's length and not by the vocabulary's.

::

    count      each place of a row's text adds to counts[row, token]: 1 in the output, a mark in the prompt
    penalise   each place takes the count out (exchanged for 0, so of a token that occurs often one place gets it)
               and changes that one logit

The exchange leaves ``counts`` all zero, so who keeps it clears it once. Nothing is known from one call to the next: counts
are made anew from the text. Two launches; a place of the text costs its token id and one access to
counts each time, and a distinct token one logit read and written. Which of a token's places gets the count does not matter,
since all know the same of it: results do not depend on the order of the atomic operations.

Sources: Keskar et al. 2019, "CTRL" (repetition); OpenAI's API (frequency, presence).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.launch import check_last_axis, check_same, device_of
from refimpl.kernels.spec import Case, Compile, KernelSpec, Shape, Tolerance

IN_PROMPT = tl.constexpr(1 << 30)
"""The mark of a token that the prompt holds; an output is shorter."""
BLOCK = 512
NUM_WARPS = 4


@triton.jit
def _text(
    token_ids: tl.tensor, num_tokens: tl.tensor, token_ids_stride: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Text ``program_id(0)``, its places ``program_id(1) · BLOCK …``, which of them are written, and their tokens."""
    text = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    written = place < tl.load(num_tokens + text)
    return text, place, written, tl.load(token_ids + text * token_ids_stride + place, mask=written, other=0)


@triton.jit(do_not_specialize=["token_ids_stride"])
def count_kernel(
    token_ids: tl.tensor,
    num_prompt_tokens: tl.tensor,
    num_tokens: tl.tensor,
    counts: tl.tensor,
    token_ids_stride: tl.tensor,
    counts_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Places ``program_id(1) · BLOCK …`` of text ``program_id(0)``."""
    text, place, written, token = _text(token_ids, num_tokens, token_ids_stride, BLOCK)
    cell = counts + text * counts_stride + token
    output = place >= tl.load(num_prompt_tokens + text)
    tl.atomic_add(cell, 1, mask=written & output)
    tl.atomic_or(cell, IN_PROMPT, mask=written & (place < tl.load(num_prompt_tokens + text)))


# The penalties are three columns of one table, and a text grows step by step: neither is worth another compilation.
@triton.jit(do_not_specialize=["token_ids_stride"], do_not_specialize_on_alignment=["presence", "frequency", "repetition"])
def penalise_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    token_ids: tl.tensor,
    num_tokens: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    repetition: tl.tensor,
    counts: tl.tensor,
    logits_stride: tl.tensor,
    token_ids_stride: tl.tensor,
    counts_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Places ``program_id(1) · BLOCK …`` of text ``program_id(0)``, which is of row ``rows[text]`` of the logits."""
    text, _, written, token = _text(token_ids, num_tokens, token_ids_stride, BLOCK)
    taken = tl.atomic_xchg(counts + text * counts_stride + token, 0, mask=written)  # [BLOCK]
    mine = written & (taken != 0)
    cell = logits + tl.load(rows + text).to(tl.int64) * logits_stride + token
    logit = tl.load(cell, mask=mine, other=0.0)  # [BLOCK]
    factor = tl.load(repetition + text)
    logit = tl.where(logit > 0, tl.div_rn(logit, factor), logit * factor)
    times = taken & (IN_PROMPT - 1)
    logit -= tl.load(frequency + text) * times.to(tl.float32)
    logit -= tl.where(times > 0, tl.load(presence + text), 0.0)
    tl.store(cell, logit, mask=mine)


def penalise(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    num_prompt_tokens: Tensor,
    num_tokens: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    counts: Tensor,
) -> Tensor:
    """:func:`reference.penalise`: change ``logits [R, V]`` float32 in place, in ``A`` rows; give them back.

    ``rows``, numbers of tokens: ``[A]`` int64; ``token_ids [A, L]`` int64, read up to ``num_tokens``; penalties ``[A]``
    float32. ``counts [A or more, V]`` int32 is all zero, and is so again afterwards. Mutates ``logits``.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    A, L = token_ids.shape
    check_last_axis(logits=logits, token_ids=token_ids, counts=counts)
    check_last_axis(rows=rows, num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens)
    check_last_axis(presence=presence, frequency=frequency, repetition=repetition)
    check_same("vocabularies", logits=logits.shape[1], counts=counts.shape[1])
    check_same("rows", rows=len(rows), token_ids=A, counts=min(A, len(counts)))
    if A and L:
        grid = (A, triton.cdiv(L, BLOCK))
        options = {"BLOCK": BLOCK, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
        strides = (token_ids.stride(0), counts.stride(0))
        with device_of(logits):
            count_kernel[grid](token_ids, num_prompt_tokens, num_tokens, counts, *strides, **options)
            penalise_kernel[grid](
                logits, rows, token_ids, num_tokens, presence, frequency, repetition, counts,
                logits.stride(0), *strides, **options,
            )  # fmt: skip
    return logits


# ---------------------------------------------------------------------- what is registered


def _case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    R, V, A, L = (shape[axis] for axis in ("R", "V", "A", "L"))
    random = cases.generator(seed)
    logits = cases.normal(R, V, dtype=dtype, device=device, random=random, scale=4.0, gap=shape.get("gap", 0))
    num_tokens = torch.randint(L // 2, L + 1, (A,), generator=random)
    num_prompt_tokens = (num_tokens * torch.rand(A, generator=random)).long()
    token_ids = torch.randint(0, min(V, L // 2 + 1), (A, L), generator=random)  # so that tokens occur several times
    token_ids[torch.arange(L) >= num_tokens.unsqueeze(-1)] = 2**40  # must not be read
    inputs = {
        "logits": logits,
        "rows": torch.randperm(R, generator=random)[:A],
        "token_ids": token_ids,
        "num_prompt_tokens": num_prompt_tokens,
        "num_tokens": num_tokens,
        "presence": torch.rand(A, generator=random) * 2 - 0.5,
        "frequency": torch.rand(A, generator=random) * 2 - 0.5,
        "repetition": torch.rand(A, generator=random) + 0.7,
    }
    counts = torch.zeros(A, V, dtype=torch.int32)
    return Case({name: value.to(device) for name, value in inputs.items()}, {"counts": counts.to(device)})


def _launch(counts: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    return penalise(counts=counts, **inputs), counts


def _twin(**inputs: Tensor) -> tuple[Tensor, Tensor]:
    logits, token_ids = inputs["logits"], inputs["token_ids"]
    return reference.penalise(**inputs), torch.zeros(
        len(token_ids), logits.shape[1], dtype=torch.int32, device=logits.device
    )


def _compiles(capability: int) -> tuple[Compile, ...]:
    types = dict.fromkeys(("logits", "presence", "frequency", "repetition"), "*fp32") | {"counts": "*i32"}
    types |= dict.fromkeys(("rows", "token_ids", "num_prompt_tokens", "num_tokens"), "*i64")

    def one(kernel: triton.JITFunction) -> Compile:
        signature = {name: types.get(name, "i32") for name in kernel.arg_names if name != "BLOCK"}
        label = kernel.__name__.removesuffix("_kernel")
        return Compile(kernel, signature, {"BLOCK": BLOCK}, NUM_WARPS, label=label, fp_fusion=False)

    return one(count_kernel), one(penalise_kernel)


SPECS = (
    KernelSpec(
        name="penalise",
        summary="presence, frequency and repetition",
        axes=("R", "V", "A", "L", "gap"),
        twin=_twin,
        launch=_launch,
        outputs=("logits", "counts"),
        make_case=_case,
        small_shapes=(
            {"R": 2, "V": 8, "A": 0, "L": 4},
            {"R": 1, "V": 1, "A": 1, "L": 1},
            {"R": 4, "V": 333, "A": 3, "L": 40, "gap": 3},
            {"R": 2, "V": 333, "A": 2, "L": BLOCK + 1},
        ),
        device_shapes=(
            {"R": 64, "V": 128_256, "A": 64, "L": 1024},
            {"R": 256, "V": 128_256, "A": 200, "L": 4096},
        ),
        tolerance={
            torch.float32: Tolerance(
                3e-7, 4e-6, "a quotient or product, and two differences of numbers up to 32 that may cancel"
            )
        },
        bytes_moved=lambda shape, dtype: shape["A"] * shape["L"] * (8 + 2 * 4),
        flops=lambda shape, dtype: 4 * shape["A"] * shape["L"],
        compiles=_compiles,
    ),
)
