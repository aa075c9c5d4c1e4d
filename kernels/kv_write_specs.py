"""The kernels that write keys and values as the registry knows them: inputs, tolerance, bounds, and what is compiled."""

from __future__ import annotations

import torch

from refimpl.kernels import cases, reference
from refimpl.kernels.kv_write import turn_and_write_kv, turn_and_write_kv_kernel, write_kv, write_kv_kernel
from refimpl.kernels.launch import dtypes_for, pointer, power_of_two
from refimpl.kernels.overlap import OVERLAPS_FROM
from refimpl.kernels.rotary import HEADS, NUM_WARPS, tables, turning_tolerance
from refimpl.kernels.spec import EXACT, Case, Compile, KernelSpec, Shape


def _write_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    """Keys and values are slices of one row, as a fused projection leaves them; one token in five is a padded row."""
    T, Hq, Hkv, D, B = (shape[axis] for axis in ("T", "Hq", "Hkv", "D", "B"))
    random = cases.generator(seed)
    blocks = shape.get("blocks", -(-max(T, 1) // B) + 2)
    heads = cases.normal(T, Hq + 2 * Hkv, D, dtype=dtype, device=device, random=random, gap=shape.get("gap", 0))
    query, key, value = heads.split((Hq, Hkv, Hkv), dim=1)
    slots = torch.randperm(blocks * B, generator=random)[:T]
    if T:
        slots[-1] = blocks * B - 1  # the very last slot is written
        slots = torch.where((slots == slots[-1]) & (torch.arange(T) < T - 1), -1, slots)
        slots[: T - 1 : 5] = -1
    pools = {
        name: cases.poisoned_pool(blocks, B, Hkv, D, dtype, device, shape.get("block_gap", 0))
        for name in ("k_cache", "v_cache")
    }
    if "block_gap" in shape:
        slots = slots.int()  # whose product with a stride would not fit 32 bits
    return Case({"query": query, "key": key, "value": value, "slot_mapping": slots.to(device)} | pools)


def _plain_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    case = _write_case(shape, dtype, device, seed)
    return Case({name: value for name, value in case.inputs.items() if name != "query"})


def _turned_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    random = cases.generator(seed + 1)
    case = _write_case(shape, dtype, device, seed)
    positions = torch.randint(0, 64, (shape["T"],), generator=random).to(device)
    out = cases.poisoned(*case.inputs["query"].shape, dtype=dtype, device=device)
    return Case(case.inputs | {"positions": positions} | tables(64, shape["D"], dtype, device, random), {"turned": out})


def _compiles(capability: int, turning: bool) -> tuple[Compile, ...]:
    kernel = turn_and_write_kv_kernel if turning else write_kv_kernel
    tensors = {"query", "key", "value", "cos", "sin", "k_cache", "v_cache", "turned"}
    element = pointer(dtypes_for(capability)[0])
    found = []
    for D in (80, 128) if turning else (128,):
        tiles = {"HEADS": HEADS, "OVERLAP": capability >= OVERLAPS_FROM}
        tiles |= {"HALF": power_of_two(D // 2)} if turning else {"WIDTH": power_of_two(D)}
        signature = {
            name: element if name in tensors else "*i64" if name in ("positions", "slot_mapping") else "i32"
            for name in kernel.arg_names
            if name not in tiles
        }
        odd = frozenset({"num_heads", "num_kv_heads"} | ({"half"} if D == 80 else set()))
        for num_warps in (NUM_WARPS, 1):
            label = f"D={D} {num_warps} warps {element[1:]}"
            found.append(Compile(kernel, signature, tiles, num_warps, unaligned=odd, label=label))
    return tuple(found)


FAR = 2**30
"""Elements between blocks, so that block 3 lies beyond what 32 bits can say."""
SMALL: tuple[Shape, ...] = (
    {"T": 0, "Hq": 2, "Hkv": 1, "D": 8, "B": 4},
    {"T": 1, "Hq": 1, "Hkv": 1, "D": 2, "B": 1},
    {"T": 5, "Hq": 9, "Hkv": 3, "D": 80, "B": 8, "gap": 3},
    {"T": 3, "Hq": 7, "Hkv": 1, "D": 64, "B": 16},
    {"T": 3, "Hq": 17, "Hkv": 17, "D": 16, "B": 8},
    {"T": 4, "Hq": 2, "Hkv": 2, "D": 16, "B": 2, "blocks": 4, "block_gap": FAR},
)
SERVED: tuple[Shape, ...] = (
    {"T": 1, "Hq": 32, "Hkv": 8, "D": 128, "B": 16},
    {"T": 64, "Hq": 32, "Hkv": 8, "D": 128, "B": 16},
    {"T": 8192, "Hq": 32, "Hkv": 8, "D": 128, "B": 16},
    {"T": 4096, "Hq": 9, "Hkv": 3, "D": 64, "B": 32},
    {"T": 256, "Hq": 64, "Hkv": 8, "D": 96, "B": 16},
)


def _elements(shape: Shape, kinds: int) -> int:
    """Elements of a step's queries (``kinds`` counts them 0 or 1 times), and of the keys and values that have a slot."""
    T = shape["T"]
    return (kinds * T * shape["Hq"] + 2 * (T - len(range(0, T - 1, 5))) * shape["Hkv"]) * shape["D"]


SPECS = (
    KernelSpec(
        name="write_kv",
        summary="keys and values into their slots",
        axes=("T", "Hq", "Hkv", "D", "B", "blocks", "gap", "block_gap"),
        twin=reference.write_kv,
        launch=write_kv,
        outputs=("k_cache", "v_cache"),
        make_case=_plain_case,
        small_shapes=SMALL,
        device_shapes=SERVED,
        tolerance=dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), EXACT),
        bytes_moved=lambda shape, dtype: 2 * _elements(shape, 0) * dtype.itemsize,
        flops=lambda shape, dtype: 0,
        compiles=lambda capability: _compiles(capability, turning=False),
    ),
    KernelSpec(
        name="turn_and_write_kv",
        summary="queries and keys turned, keys and values into their slots",
        axes=("T", "Hq", "Hkv", "D", "B", "blocks", "gap", "block_gap"),
        twin=reference.turn_and_write_kv,
        launch=turn_and_write_kv,
        outputs=("turned", "k_cache", "v_cache"),
        make_case=_turned_case,
        small_shapes=SMALL,
        device_shapes=SERVED,
        tolerance=turning_tolerance(),
        bytes_moved=lambda shape, dtype: 2 * _elements(shape, 1) * dtype.itemsize,
        flops=lambda shape, dtype: 3 * shape["T"] * (shape["Hq"] + shape["Hkv"]) * shape["D"],
        compiles=lambda capability: _compiles(capability, turning=True),
    ),
)
