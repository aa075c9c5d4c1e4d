"""AWQ: a checkpoint whose layers' matrices are in 4 bits, with scales found on calibration tokens (Lin et al. 2023).

For each layer, in order: look at what its matrices multiply, search the scales of each group of matrices, fold them into
what comes before (the layer then computes the same as ever), clip ranges, choose levels and fit steps to them, pack. The
folder is what AutoAWQ calls version "gemm", which transformers, vLLM and refimpl read: of each matrix ``qweight``
[in, out / 8] and ``qzeros`` [in / group, out / 8], eight values in an int32, and ``scales`` [in / group, out] in float16.
Embeddings, norms and the output head stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from refimpl.errors import ConfigError
from refimpl.executor.device import resolve_device
from refimpl.model_config import ModelConfig
from refimpl.quantization.awq_layout import pack_awq, quantise_groups
from refimpl.quantize.calibration import calibration_windows
from refimpl.quantize.distil import Training
from refimpl.quantize.groups import NORMS, Group, fold, groups_of
from refimpl.quantize.layerwise import LayerByLayer
from refimpl.quantize.refine import Levels, damping_for, refine
from refimpl.quantize.report import LayerReport, Written, written
from refimpl.quantize.search import ALPHAS, Statistics, clip, search_scales
from refimpl.quantize.source import Source
from refimpl.quantize.trained_levels import QuantisedLayer, trained_layers
from refimpl.quantize.writer import SHARD_BYTES, ShardWriter, new_folder

GROUP_SIZES = (128, 64, 32)
"""That other engines' kernels know as well; the largest that fits is the default."""
VALUES_IN_AN_INT32 = 8


@dataclass(frozen=True, kw_only=True)
class AwqOptions:
    """How a model is quantised to 4 bits."""

    group_size: int | None = None
    """Input channels that share a scale and a zero point; None: the largest of 128, 64 and 32 that divides every matrix."""
    search: bool = True
    """Off: round to nearest, without scales, clipping and calibration (a baseline, and another beginning for training)."""
    alphas: Sequence[float] = ALPHAS
    """Exponents of the scales that are tried."""
    clip: bool = True
    """Whether the ranges of groups are searched."""
    refine: bool = True
    """Whether levels are, which are the nearest ones otherwise, and scales with them; off is AWQ as it was published."""
    prompts: Sequence[Any] | None = field(default=None, repr=False)
    """To calibrate on; None: texts that the model writes itself."""
    calibration_tokens: int = 32_768
    training: Training | None = None
    """How scales and levels of all layers are trained together at the end; None: they are not."""
    window: int = 512
    """Tokens of one calibration text."""
    seed: int = 0
    device: str = "auto"
    shard_bytes: int = SHARD_BYTES
    overwrite: bool = False


def quantize_awq(model: Any, out: Path | str, options: AwqOptions | None = None, show_progress: bool = False) -> Written:
    """Write ``model`` to the folder ``out`` with its layers' matrices in 4 bits. Ctrl-C leaves nothing behind.

    Args:
        model: as ``EngineArgs.model``: a folder, a GGUF file, ORG/NAME, "smollm2", an object.
        out: a folder that is made.
        options: see :class:`AwqOptions`.
        show_progress: draw bars on stderr.

    Raises:
        ConfigError: an option does not fit the model, there is no calibration text, or ``out`` cannot be written.
        ModelError: the model cannot be had, or not quantised.

    """
    options = options or AwqOptions()
    source = Source(model)
    group_size = check_group_size(source.config, options.group_size)
    device = resolve_device(options.device)
    with new_folder(Path(out), options.overwrite) as folder, torch.no_grad():
        windows = _windows(source, options, show_progress) if options.search or options.training is not None else None
        searched = windows if options.search else None
        made: Iterable[QuantisedLayer] = _quantised(source, searched, group_size, options, device, show_progress)
        if windows is not None and options.training is not None:
            made = trained_layers(source, list(made), windows, options.training, device, show_progress)
        shards, reports = ShardWriter(folder, options.shard_bytes), []
        for number, layer in enumerate(made):
            reports.append(layer.report)
            for name, tensor in _stored(layer, source).items():
                shards.add(f"model.layers.{number}.{name}", tensor.cpu())
        for name, tensor in source.outside_layers():
            shards.add(name, source.narrowed(tensor, name))
        shards.finish()
        source.write_beside(folder, quantization_config(group_size))
    return written(Path(out), source.checkpoint, reports)


def _quantised(
    source: Source,
    windows: Int[Tensor, "N L"] | None,
    group_size: int,
    options: AwqOptions,
    device: torch.device,
    show_progress: bool,
) -> Iterator[QuantisedLayer]:
    """One layer after the other; without windows, rounded to nearest."""
    layers = None
    if windows is not None:
        apart = max(1, len(windows) * windows.shape[1] // options.calibration_tokens)
        layers = LayerByLayer(source, windows[::apart], device)
    for number in tqdm(range(source.config.num_hidden_layers), "layers", disable=not show_progress):
        statistics = None if layers is None else layers.advance()
        tensors = layer_tensors(source, number, device)
        yield quantised_layer(tensors, groups_of(source.config), statistics, group_size, options, source.kept)


def quantization_config(group_size: int) -> dict[str, Any]:
    """What config.json says of it."""
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}


def check_group_size(config: ModelConfig, asked: int | None) -> int:
    """The group size: the one that was asked for, or the largest of 128, 64 and 32 that divides every matrix' inputs.

    Raises:
        ConfigError: it divides them not, or there is none.

    """
    inputs = {
        name: inputs for name, (_, inputs) in zip(("q, k, v", "o", "gate, up", "down"), config.layer_matrices, strict=True)
    }
    legal = [size for size in GROUP_SIZES if all(count % size == 0 for count in inputs.values())]
    sizes = " or ".join(map(str, legal)) or f"none of {', '.join(map(str, GROUP_SIZES))}"
    outputs = {config.num_key_value_heads * config.head_dim, *(count for count, _ in config.layer_matrices)}
    if any(count % VALUES_IN_AN_INT32 for count in outputs):
        raise ConfigError(f"AWQ packs 8 output channels into an int32, and this model has matrices of {sorted(outputs)}")
    if asked is None and legal:
        return legal[0]
    if asked in legal:
        return legal[legal.index(asked)]
    raise ConfigError(
        f"group_size is {asked}, but this model's matrices have "
        f"{', '.join(f'{count} input channels ({name})' for name, count in inputs.items())}; {sizes} divides them all"
    )


def _windows(source: Source, options: AwqOptions, show_progress: bool) -> Int[Tensor, "N L"]:
    """Texts to calibrate on, and to train on: more of them where that is asked for."""
    tokens = max(
        options.calibration_tokens if options.search else 0, options.training.tokens if options.training is not None else 0
    )
    return calibration_windows(
        source.checkpoint, options.prompts, tokens, options.window, options.seed, options.device, show_progress
    )


def layer_tensors(source: Source, number: int, device: torch.device) -> dict[str, Tensor]:
    """A layer's tensors in float32, copies, by their names in it."""
    start = f"model.layers.{number}."
    found = {name: tensor for name, tensor in source.weights.items() if name.startswith(start)}
    return {name.removeprefix(start): tensor.to(device, torch.float32, copy=True) for name, tensor in found.items()}


def quantised_layer(
    tensors: dict[str, Tensor],
    groups: Sequence[Group],
    statistics: Sequence[Statistics] | None,
    group_size: int,
    options: AwqOptions,
    kept: torch.dtype,
) -> QuantisedLayer:
    """A layer in 4 bits. Mutates ``tensors``: scales are folded in, and norms fit ``kept``."""
    alphas, shares = [], []
    grams: list[Tensor | None] = [None] * len(groups)
    if statistics is not None:
        weights = [[tensors[f"{name}.weight"] for name in group.matrices] for group in groups]
        pairs = list(zip(groups, weights, statistics, strict=True))
        # The scales of all groups are searched before any is folded: V and up belong to two groups each.
        chosen = [search_scales(*pair, group_size, options.alphas) for pair in pairs]
        scales = [representable(tensors, group, one.scales, kept) for group, one in zip(groups, chosen, strict=True)]
        for group, folded in zip(groups, scales, strict=True):
            fold(tensors, group, folded)
        grams = [seen.scaled(group.spread(one)) for group, seen, one in zip(groups, statistics, scales, strict=True)]
        alphas, shares = [one.alpha for one in chosen], [one.error for one in chosen]
    found: dict[str, Levels] = {}
    tokens = 0 if statistics is None else statistics[0].tokens
    for group, gram in zip(groups, grams, strict=True):
        # Rows are quantised apart from each other, so those of all matrices of one input at once.
        weight = torch.cat([tensors[f"{name}.weight"] for name in group.matrices])
        sizes = [len(tensors[f"{name}.weight"]) for name in group.matrices]
        levels = _levels(weight, gram, tokens, group_size, options)
        found |= zip(group.matrices, levels.split(sizes), strict=True)
    return QuantisedLayer(LayerReport(alphas, shares), tensors, found)


def _stored(layer: QuantisedLayer, source: Source) -> dict[str, Tensor]:
    """A layer as it is written."""
    found: dict[str, Tensor] = {}
    for name, tensor in layer.tensors.items():
        matrix = name.removesuffix(".weight")
        found |= packed(matrix, layer.levels[matrix]) if matrix in layer.levels else {name: source.narrowed(tensor, name)}
    return found


def packed(name: str, levels: Levels) -> dict[str, Tensor]:
    """A matrix as it is stored."""
    words = {"qweight": pack_awq(levels.values), "qzeros": pack_awq(levels.zeros), "scales": levels.scales.contiguous()}
    return {f"{name}.{part}": tensor for part, tensor in words.items()}


def representable(
    tensors: dict[str, Tensor], group: Group, scales: Float[Tensor, "B"], kept: torch.dtype
) -> Float[Tensor, "B"]:
    """Nearly the scales, such that the norm's weights divided by them lose nothing in ``kept``: folding is then exact."""
    if group.before not in NORMS:
        return scales
    weight = tensors[f"{group.before}.weight"]
    divided = (weight / scales).to(kept).float()
    return torch.where((divided == 0) | ~divided.isfinite(), 1.0, weight / divided)


def _levels(weight: Float[Tensor, "O C"], gram: Tensor | None, tokens: int, group_size: int, options: AwqOptions) -> Levels:
    """A folded matrix in 4 bits; without E[x xᵀ] of its inputs, over so many tokens, rounded to nearest."""
    clipped = clip(weight, gram, group_size) if gram is not None and options.clip else weight
    nearest = Levels(*quantise_groups(clipped, group_size))
    if gram is None or not options.refine:
        return nearest
    return refine(weight, nearest, gram, damping=damping_for(len(gram), tokens))
