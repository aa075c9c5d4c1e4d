"""Checkpoint folders of random numbers in a model's shape, in shards with an index, to see how fast they are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from refimpl.config import GIB, ModelConfig
from refimpl.errors import ConfigError
from refimpl.loading.folder import INDEX, FolderCheckpoint
from refimpl.loading.hf_config import write_config
from refimpl.models.registry import build_model

SHARD_BYTES = 4_900_000_000
"""At most so many bytes in a file, as in Llama-3-70B's; and always four files or more."""
NOISE_BYTES = 2**24
MADE_OF = "made_of.json"

Outlines = list[tuple[str, torch.Size]]


def cut_to(shape: ModelConfig, num_bytes: int, dtype: torch.dtype) -> ModelConfig:
    """The shape with as many layers as so many bytes hold.

    Raises:
        ConfigError: not even one fits.

    """
    one, two = (replace(shape, num_hidden_layers=layers).num_parameters for layers in (1, 2))
    layers = min(shape.num_hidden_layers, (num_bytes // dtype.itemsize - one) // (two - one) + 1)
    if layers < 1:
        least = one * dtype.itemsize / GIB
        raise ConfigError(f"gib is {num_bytes / GIB:g}, and one layer with the embeddings takes {least:.3g}; raise gib")
    return replace(shape, num_hidden_layers=layers)


def written_shards(folder: Path, config: ModelConfig, dtype: torch.dtype) -> FolderCheckpoint:
    """The checkpoint in a folder; it is written first, unless the same was written there before.

    Raises:
        ConfigError: the folder holds something else, which is left alone.

    """
    shards = _division(config, dtype)
    wanted = json.dumps([str(dtype), repr(config), shards])
    made_of = folder / MADE_OF
    if made_of.exists() and made_of.read_text() == wanted:
        return FolderCheckpoint(folder)
    if folder.exists() and any(folder.iterdir()) and not made_of.exists():
        raise ConfigError(f"folder is {folder}, which holds something else; give one that is empty or not there")
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.safetensors*"), made_of):
        old.unlink(missing_ok=True)
    write_config(config, folder)
    _write(folder, shards, dtype)
    made_of.write_text(wanted)
    return FolderCheckpoint(folder)


def _division(config: ModelConfig, dtype: torch.dtype) -> list[Outlines]:
    """Which tensors go into which file, in their order."""
    views = build_model(config, torch.float32, torch.device("meta")).checkpoint_views()
    most = min(SHARD_BYTES, config.num_parameters * dtype.itemsize // 4)
    shards: list[Outlines] = []
    filled = most
    for name, view in views.items():
        size = view.shape.numel() * dtype.itemsize
        if filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append((name, view.shape))
        filled += size
    return shards


def _write(folder: Path, shards: list[Outlines], dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    drawn = torch.randn(NOISE_BYTES // dtype.itemsize, generator=torch.Generator().manual_seed(0)) * 0.02
    noise = drawn.to(dtype).view(torch.uint8)
    index: dict[str, str] = {}
    for number, shard in enumerate(tqdm(shards, desc="writing shards", leave=False, disable=None), start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _noisy(shape, noise.roll(64 * (len(index) + at)), dtype) for at, (name, shape) in enumerate(shard)}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _noisy(shape: torch.Size, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the same numbers again and again: drawing them anew takes longer than anything else here."""
    made = torch.empty(shape.numel() * dtype.itemsize, dtype=torch.uint8)
    for piece in made.split(len(noise)):
        piece.copy_(noise[: len(piece)])
    return made.view(dtype).view(shape)
