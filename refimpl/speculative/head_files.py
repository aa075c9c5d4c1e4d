"""A head on disk: a folder with config.json and model.safetensors. It holds no weight of the target.

Matrices are kept in 8 bits, each row with a scale of its own in float32 (``NAME.scale``), all else in 16 bits. A file of
matrices in 16 bits is read too.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor

from refimpl.errors import CheckpointError, ConfigError
from refimpl.models.llama import LlamaForCausalLM
from refimpl.speculative.head_model import DraftHead, HeadConfig

log = logging.getLogger(__name__)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
VOCABULARY = "vocabulary"
SCALE = ".scale"
SHIPPED = Path(__file__).parent / "weights"
"""Heads that come with refimpl, a folder each by the target's name."""


def shipped_head(target_fingerprint: str) -> Path | None:
    """The folder of a head that comes with refimpl and was trained for exactly these weights, if there is one."""
    for folder in sorted(SHIPPED.glob("*/")) if SHIPPED.is_dir() else []:
        if (folder / CONFIG).is_file() and read_head_config(folder).target_fingerprint == target_fingerprint:
            return folder
    return None


def save_head(head: DraftHead, folder: Path) -> None:
    """Write a head, not packed, into a folder, which is made if need be. Overwrites the head that is there."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, weight in head.own_weights().items():
        if weight.dim() == 2:
            tensors[name], tensors[name + SCALE] = _in_8_bits(weight.detach().cpu())
        else:
            tensors[name] = weight.detach().to("cpu", torch.float16).contiguous()
    tensors[VOCABULARY] = head.vocabulary.to("cpu", torch.int32)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = msgspec.json.format(msgspec.json.encode(head.config), indent=2)
    (folder / CONFIG).write_bytes(config + b"\n")


@torch.no_grad()
def round_as_kept(head: DraftHead) -> None:
    """Give a head the weights that its file will hold, for who measures it before it is loaded. Mutates the head."""
    for weight in head.own_weights().values():
        kept = _widened(*_in_8_bits(weight)) if weight.dim() == 2 else weight.half()
        weight.copy_(kept)


def _in_8_bits(weight: Float[Tensor, "rows columns"]) -> tuple[Int8[Tensor, "rows columns"], Float32[Tensor, "rows"]]:
    """The nearest of 255 levels, symmetric about zero, and each row's step."""
    step = (weight.abs().amax(1) / 127).float().clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / step.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8), step


def _widened(levels: Int8[Tensor, "rows columns"], step: Float32[Tensor, "rows"]) -> Float32[Tensor, "rows columns"]:
    return levels.float() * step.unsqueeze(1)


def read_head_config(folder: Path) -> HeadConfig:
    """The numbers of a head on disk.

    Raises:
        CheckpointError: there is none, or it cannot be read.

    """
    path = folder / CONFIG
    try:
        return msgspec.json.decode(path.read_bytes(), type=HeadConfig)
    except OSError as error:
        raise CheckpointError(
            f"{folder} has no readable {CONFIG} ({error}); `refimpl speculate train` writes one"
        ) from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is no configuration of a draft head ({error}); train it again") from error


def load_head(folder: Path, target: LlamaForCausalLM, target_name: str, target_fingerprint: str) -> DraftHead:
    """The head of a folder, ready to draft for ``target``: in its dtype, on its device, packed for a CPU.

    A head that was trained on other weights of the same sizes is taken with a warning: what it drafts is checked by the
    target, so it costs acceptance and nothing else.

    Raises:
        CheckpointError: files are missing or damaged.
        ConfigError: the head is one of a target of other sizes.

    """
    config = read_head_config(folder)
    _check_sizes(config, target, target_name)
    if config.target_fingerprint != target_fingerprint:
        log.warning(
            "the draft head %s was trained for other weights (%s) than those of %s; few of its tokens may be accepted",
            folder, config.target, target_name,
        )  # fmt: skip
    tensors = _read_tensors(folder / WEIGHTS)
    for name in [name for name in tensors if name + SCALE in tensors]:
        tensors[name] = _widened(tensors[name], tensors.pop(name + SCALE))
    head = DraftHead(config, target, _checked_vocabulary(config, tensors.pop(VOCABULARY, None), folder))
    shares = {name: head.share_of_tensor(name, tensor) for name, tensor in tensors.items()}
    fill_head(head, shares, str(folder / WEIGHTS))
    head.pack_weights()
    return head


def fill_head(head: DraftHead, tensors: dict[str, Tensor], source: str) -> None:
    """Copy tensors to the head's own weights of the same names. Mutates the head.

    Raises:
        CheckpointError: they are not exactly the head's weights.

    """
    weights = head.own_weights()
    wrong = sorted(weights.keys() ^ tensors.keys())
    wrong += [name for name in weights.keys() & tensors.keys() if weights[name].shape != tensors[name].shape]
    if wrong:
        raise CheckpointError(
            f"{source} does not hold the weights that its {CONFIG} asks for: {', '.join(wrong[:4])} are missing, extra or "
            "misshapen; train the head again"
        )
    for name, weight in weights.items():
        weight.data.copy_(tensors[name])


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is missing, damaged or no safetensors file ({error}); train the head again"
        ) from error


def _check_sizes(config: HeadConfig, target: LlamaForCausalLM, target_name: str) -> None:
    for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        drafts_for, found = getattr(config, name), getattr(target.config, name)
        if drafts_for != found:
            raise ConfigError(
                f"the draft head was trained for {config.target} with {name} {drafts_for}; {target_name} has {found}. "
                "Train one for it: refimpl speculate train"
            )
    if any(layer is not None and layer >= target.config.num_hidden_layers for layer in config.attends):
        raise ConfigError(
            f"the draft head attends to layers {config.attends} of its target; {target_name} has "
            f"{target.config.num_hidden_layers}. Train one for it: refimpl speculate train"
        )


def _checked_vocabulary(config: HeadConfig, vocabulary: Tensor | None, folder: Path) -> Tensor:
    if vocabulary is None or vocabulary.shape != (config.draft_vocab_size,):
        raise CheckpointError(f"{folder / WEIGHTS} does not name {config.draft_vocab_size} tokens; train the head again")
    ids = vocabulary.long()
    if len(ids) == 0 or ids[0] < 0 or ids[-1] >= config.vocab_size or bool((ids.diff() <= 0).any()):
        raise CheckpointError(f"{folder / WEIGHTS} names tokens out of order or range; train the head again")
    return ids
