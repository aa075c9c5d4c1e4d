"""FP8: a checkpoint whose layers' matrices are in e4m3, with a float32 scale for each output channel.

Activations are quantised a token at a time when the model runs, so nothing is calibrated. Small models lose more by
rounding than one would like, and training gets some of that back (:mod:`refimpl.quantize.trained_fp8`).

The folder is in the form of compressed-tensors ("float-quantized", weights by channel, dynamic activations by token): vLLM
and transformers both read that one, while quant_method "fp8" means blocks of 128 × 128 to transformers and one scale a
matrix to vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from refimpl.executor.device import resolve_device
from refimpl.kernels import reference
from refimpl.quantize.calibration import calibration_windows
from refimpl.quantize.distil import Training
from refimpl.quantize.report import Written, written
from refimpl.quantize.source import Source
from refimpl.quantize.trained_fp8 import Fp8Matrix, trained_matrices
from refimpl.quantize.writer import SHARD_BYTES, ShardWriter, new_folder


@dataclass(frozen=True, kw_only=True)
class Fp8Options:
    """How a model is quantised to FP8. Without training, text, window, seed and device are not looked at."""

    training: Training | None = None
    """How the weights are trained together; None: they are rounded to nearest."""
    prompts: Sequence[Any] | None = field(default=None, repr=False)
    """To train on; None: texts that the model writes itself."""
    window: int = 512
    """Tokens of one text."""
    seed: int = 0
    device: str = "auto"
    shard_bytes: int = SHARD_BYTES
    overwrite: bool = False


def quantize_fp8(model: Any, out: Path | str, options: Fp8Options | None = None, show_progress: bool = False) -> Written:
    """Write ``model`` to the folder ``out`` with its layers' matrices in FP8. Ctrl-C leaves nothing behind.

    Args:
        model: as ``EngineArgs.model``: a folder, a GGUF file, ORG/NAME, "smollm2", an object.
        out: a folder that is made.
        options: see :class:`Fp8Options`.
        show_progress: draw a bar on stderr.

    Raises:
        ConfigError: ``out`` cannot be written, or there is no text to train on.
        ModelError: the model cannot be had, or not quantised.

    """
    options = options or Fp8Options()
    source = Source(model)
    matrices = set(source.matrices())
    with new_folder(Path(out), options.overwrite) as folder, torch.no_grad():
        trained = {} if options.training is None else _trained(source, options, options.training, show_progress)
        shards = ShardWriter(folder, options.shard_bytes)
        for name, tensor in tqdm(source.weights.items(), "tensors", disable=not show_progress):
            matrix = name.removesuffix(".weight")
            if matrix not in matrices or matrix == name:
                shards.add(name, source.narrowed(tensor, name))
                continue
            values, scales = trained[matrix] if trained else reference.quantise(tensor)
            shards.add(name, values.cpu())
            shards.add(f"{matrix}.weight_scale", scales.float().unsqueeze(1).cpu())
        shards.finish()
        source.write_beside(folder, quantization_config())
    return written(Path(out), source.checkpoint)


def _trained(source: Source, options: Fp8Options, training: Training, show_progress: bool) -> dict[str, Fp8Matrix]:
    windows = calibration_windows(
        source.checkpoint, options.prompts, training.tokens, options.window, options.seed, options.device, show_progress
    )
    return trained_matrices(source, windows, training, resolve_device(options.device), show_progress)


def quantization_config() -> dict[str, Any]:
    """What config.json says of it."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": numbers | {"strategy": "channel", "dynamic": False},
                "input_activations": numbers | {"strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
