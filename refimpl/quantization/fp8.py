"""Fp8: weights in e4m3 with a float32 scale for each output channel; activations quantised a token at a time, on the fly.

Half the bytes of 16-bit weights, and twice the rate of tensor cores. No scale is learnt, measured on samples, or kept from
one step to the next: an output channel's is its largest weight over 448, a token's its largest activation over 448, so
nothing overflows whatever comes. Each output channel is scaled alone, so matrices that are fused (Q, K and V; gate and up)
are quantised part by part as they come from a checkpoint, and no more than one matrix is there in 16 bits at a time. A
checkpoint that is in FP8 already is taken over as it is.

Who multiplies: on a GPU, :mod:`refimpl.kernels.fp8_gemm` for few tokens and torch's ``_scaled_mm`` for more; elsewhere plain
torch, with the weights widened for each product: the same numbers, slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from refimpl.kernels import reference
from refimpl.kernels.by_triton import by_triton
from refimpl.kernels.transfer import pieces_on
from refimpl.layers.activation import silu_mul
from refimpl.layers.norm import RMSNorm
from refimpl.quantization.method import Destination, Matrix, Quantised, Rows, fill
from refimpl.quantization.stored import StoredTensor, check_finite
from refimpl.quantization_config import QuantizationConfig

SCALES = (torch.float32, torch.bfloat16, torch.float16)
"""What a checkpoint may hold scales in."""
SCALED_MM_MULTIPLE = 16
"""Sizes of a matrix that torch's FP8 product takes are multiples of it."""


class Fp8Linear(nn.Module):
    """A matrix ``[out_features, in_features]`` in e4m3."""

    arrivals: Tensor | None

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype = dtype
        """Of what comes out."""
        values = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn, device=device)
        self.weight = nn.Parameter(values, requires_grad=False)
        scales = torch.empty(out_features, dtype=torch.float32, device=device)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.register_buffer("arrivals", _arrivals(self.weight), persistent=False)
        """Zeros by which the programs of a kernel find out who is the last."""

    def parts(self, *sizes: int) -> Sequence[Destination]:
        """The matrix in pieces of so many outputs each; without sizes, in one."""
        rows = list(sizes) or [len(self.weight)]
        pieces = zip(self.weight.split(rows), self.scales.split(rows), strict=True)
        return [QuantisedPart(values, scales, self.dtype) for values, scales in pieces]

    def forward(self, x: Rows) -> Float[Tensor, "T out_features"]:
        """``x Wᵀ``; rows that are not quantised yet are."""
        rows = x if isinstance(x, Quantised) else quantise(x)
        if self.by_kernels(rows):
            return self._by_kernels(rows)
        weight = (self.weight, self.scales.to(rows.scales.dtype))
        return reference.fp8_linear(*rows, *weight).to(self.dtype)

    def by_kernels(self, x: Rows) -> bool:
        """Whether products with these rows are a GPU's."""
        return self.dtype != torch.float64 and by_triton(x.values if isinstance(x, Quantised) else x)

    def _by_kernels(self, rows: Quantised) -> Float[Tensor, "T out_features"]:
        from refimpl.kernels.fp8_gemm import MOST_IN_A_TILE, fp8_linear, serves

        num_tokens, (out_features, in_features) = len(rows.values), self.weight.shape
        odd = out_features % SCALED_MM_MULTIPLE or in_features % SCALED_MM_MULTIPLE
        if odd or serves(num_tokens, out_features):
            result = rows.scales.new_empty(num_tokens, out_features, dtype=self.dtype)
            arrivals = self.arrivals if num_tokens <= MOST_IN_A_TILE else None
            return fp8_linear(*rows, self.weight, self.scales, result, arrivals)
        if self.dtype == torch.bfloat16:
            return self._scaled_mm(rows.values, rows.scales.unsqueeze(1), self.scales.unsqueeze(0), self.dtype)
        # Scales by row come with results in bfloat16 alone.
        one = rows.scales.new_ones(())
        product = self._scaled_mm(rows.values, one, one, torch.float32)
        return product.mul_(rows.scales.unsqueeze(1)).mul_(self.scales).to(self.dtype)

    def _scaled_mm(self, values: Tensor, scales: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
        product: Tensor = torch._scaled_mm(
            values, self.weight.t(), scale_a=scales, scale_b=weight_scales, out_dtype=dtype, use_fast_accum=True
        )
        return product


class QuantisedPart:
    """Some output channels of an FP8 matrix: a :class:`Destination` that quantises what it is given."""

    def __init__(self, values: Float[Tensor, "R C"], scales: Float[Tensor, "R"], dtype: torch.dtype) -> None:
        self._values, self._scales, self._dtype = values, scales, dtype

    @property
    def shape(self) -> torch.Size:
        """Of the matrix that fills it."""
        return self._values.shape

    @property
    def device(self) -> torch.device:
        """Where it is held."""
        return self._values.device

    def copy_(self, source: Float[Tensor, "R C"], /) -> None:
        """Quantise a matrix, from the dtype that it has; what that takes beside is a piece in float32, twice."""
        for rows, piece in pieces_on(source, self.device):
            values, scales = reference.quantise(piece)
            self._values[rows].copy_(values)
            self._scales[rows].copy_(scales)

    def normal_(self, mean: float, std: float, /, *, generator: torch.Generator | None = None) -> None:
        """Quantise random numbers: those that a matrix in the model's dtype would be filled with."""
        drawn = torch.empty(self.shape, dtype=self._dtype, device=self.device)
        self.copy_(drawn.normal_(mean, std, generator=generator))

    def stored(self, config: QuantizationConfig, name: str) -> dict[str, StoredTensor]:
        """The tensors of a checkpoint in FP8: values, and a scale for each output, or one for all of them.

        A scale for all is written to each output's, so parts of a fused matrix may have different ones. A scale that was
        found for activations is passed over: they are scaled a token at a time here.
        """
        (rows, columns), device = self.shape, self.device
        shapes, along = ((rows, 1), (rows,), (1,), ()), (0, 1)
        scales = StoredTensor(shapes, SCALES, device, partial(self._take_scales, name), outputs=along)
        values = StoredTensor(
            ((rows, columns),), (torch.float8_e4m3fn,), device, self._take_values, outputs=along, inputs=(1, 1)
        )
        unused = StoredTensor(((1,), (), (1, 1)), SCALES, device, lambda scale: None, optional=True)
        return {"weight": values, "weight_scale": scales, "input_scale": unused, "input_scale_ub": unused}

    def _take_values(self, source: Tensor) -> None:
        fill(self._values, source)

    def _take_scales(self, name: str, source: Tensor) -> None:
        check_finite(f"{name}.weight_scale", source)
        self._scales.copy_(source.flatten())


def _arrivals(weight: Tensor) -> Tensor | None:
    if not by_triton(weight):
        return None
    from refimpl.kernels.fp8_gemm import num_arrivals

    return weight.new_zeros(num_arrivals(len(weight)), dtype=torch.int32)


def quantise(x: Float[Tensor, "T C"]) -> Quantised:
    """Rows in e4m3, with a scale each."""
    if by_triton(x):
        from refimpl.kernels import fp8_quantise as kernels

        return Quantised(*kernels.quantise(x))
    return Quantised(*reference.quantise(x))


class Fp8:
    """What stands between two matrices is quantised by the kernel that makes it: norms, and SwiGLU's product."""

    name = "fp8"

    def linear(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> Fp8Linear:
        """An empty matrix."""
        return Fp8Linear(in_features, out_features, dtype, device)

    def normed(
        self, norm: RMSNorm, x: Float[Tensor, "T H"], residual: Float[Tensor, "T H"] | None
    ) -> tuple[Rows, Float[Tensor, "T H"]]:
        """``norm(x, residual)``, the first of the two quantised."""
        if not by_triton(x):
            normed, summed = norm(x, residual)
            return quantise(normed), summed
        from refimpl.kernels import fp8_quantise as kernels

        if residual is None:
            return Quantised(*kernels.rms_norm_quantise(x, norm.weight, norm.eps)), x
        values, scales, summed = kernels.add_rms_norm_quantise(x, residual, norm.weight, norm.eps)
        return Quantised(values, scales), summed

    def gated(self, gate_up: Matrix, x: Rows) -> Rows:
        """SwiGLU's product, quantised; of a few tokens it is made by the same launch as what goes into it."""
        assert isinstance(gate_up, Fp8Linear)
        if not gate_up.by_kernels(x):
            return silu_mul(gate_up(x))
        from refimpl.kernels import fp8_gemm, fp8_quantise

        rows = x if isinstance(x, Quantised) else quantise(x)
        num_tokens = len(rows.values)
        if not fp8_gemm.serves(num_tokens, len(gate_up.weight)):
            return Quantised(*fp8_quantise.silu_mul_quantise(gate_up(rows)))
        result = rows.scales.new_empty(num_tokens, len(gate_up.weight) // 2, dtype=gate_up.dtype)
        weight = gate_up.weight, gate_up.scales
        return fp8_gemm.fp8_gated_linear(*rows, *weight, result, gate_up.arrivals)

    def weight_bytes(self, in_features: int, out_features: int, bytes_per_value: int) -> int:
        """A byte a weight, and a float32 an output channel."""
        return self.bytes_of_any_dtype(in_features, out_features)

    def bytes_of_any_dtype(self, in_features: int, out_features: int) -> int:
        """All of it."""
        return (in_features + torch.float32.itemsize) * out_features
