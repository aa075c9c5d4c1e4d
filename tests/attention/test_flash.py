"""What the published FlashAttention kernels are asked: fakes record the arguments and answer by the definition."""

import math
import sys
from types import ModuleType

import pytest
import torch
from asserts import assert_close
from attention_case import Case

from refimpl.attention import Setting, choose_backend
from refimpl.attention.flash import INTERFACES, FlashAttention, find
from refimpl.errors import ConfigError
from refimpl.kernels import reference

H100, B200, A100, T4 = 90, 100, 80, 75
BOTH = ("flash_attn_with_kvcache", "flash_attn_varlen_func")


class Library(ModuleType):
    """A module with the functions of one of the published kernels."""

    def __init__(self, name, functions=BOTH, pair=False):
        super().__init__(name)
        self.calls, self.pair = [], pair
        for function in functions:
            setattr(self, function, self.recorder(function))

    def recorder(self, function):
        def record(q, k, v, **arguments):
            self.calls.append((function, arguments))
            table = arguments.get("block_table", arguments.get("page_table"))
            used = arguments.get("seqused_k", arguments.get("cache_seqlens"))
            if used is None:
                used = arguments["cu_seqlens_k"].diff()
            query = q.flatten(0, 1) if q.ndim == 4 else q
            ends = arguments.get("cu_seqlens_q")
            if ends is None:
                ends = torch.arange(len(q) + 1) * q.shape[1]
            attended = reference.paged_attention(query, k, v, table, ends, used, arguments["softmax_scale"])
            return (attended.view(q.shape), None) if self.pair else attended.view(q.shape)

        return record


@pytest.fixture
def installed(monkeypatch):
    """Makes fakes importable; of the real ones none is."""
    for interface in INTERFACES:
        monkeypatch.setitem(sys.modules, interface.module, None)

    def install(module, **options):
        library = Library(module, **options)
        monkeypatch.setitem(sys.modules, module, library)
        for package in ("vllm", "vllm.vllm_flash_attn", "flash_attn"):
            if module.startswith(f"{package}."):
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        return library

    return install


def attend(lens, capability, block_size):
    case = Case(lens, 4, 2, 16, block_size, torch.bfloat16)
    backend = FlashAttention(16, torch.bfloat16, block_size, capability)
    step = backend.begin_step(case.metadata)
    # What is stored does not matter here, only what is asked; the kernel that stores has its own tests.
    case.cache.k.nan_to_num_(0.5)
    case.cache.v.nan_to_num_(0.5)
    got = step.attend(case.cache, case.query)
    assert_close(got, case.expected(), 2**-7, 2**-7)
    return case.metadata


MIXED = [(1, 20), (5, 9), (3, 3)]


def test_flash_attention_3_takes_pages_and_uneven_queries_in_one_call(installed):
    library = installed("flash_attn_interface")
    step = attend(MIXED, H100, 16)
    [(function, arguments)] = library.calls
    assert function == "flash_attn_with_kvcache"
    assert set(arguments) == {
        "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal",
    }  # fmt: skip
    assert arguments["cache_seqlens"] is step.seqused_k
    assert arguments["page_table"] is step.block_table
    assert arguments["cu_seqlens_q"].tolist() == [0, 1, 6, 9]
    assert (arguments["max_seqlen_q"], arguments["causal"], arguments["softmax_scale"]) == (5, True, 0.25)


def test_flash_attention_3_as_vllm_ships_it(installed):
    library = installed("vllm.vllm_flash_attn.flash_attn_interface")
    step = attend(MIXED, H100, 32)
    [(function, arguments)] = library.calls
    assert function == "flash_attn_varlen_func"
    assert arguments["fa_version"] == 3
    assert (arguments["max_seqlen_q"], arguments["max_seqlen_k"]) == (5, 20)
    assert arguments["block_table"] is step.block_table
    assert arguments["seqused_k"].dtype == arguments["cu_seqlens_q"].dtype == torch.int32


def test_flash_attention_4_gives_the_log_sums_too(installed):
    library = installed("flash_attn.cute", pair=True)
    attend(MIXED, B200, 32)
    [(function, arguments)] = library.calls
    assert function == "flash_attn_varlen_func"
    assert set(arguments) == {"cu_seqlens_q", "seqused_k", "page_table", "softmax_scale", "causal"}


@pytest.mark.parametrize(
    ("lens", "function"),
    [
        ([(1, 20), (1, 9)], "flash_attn_with_kvcache"),
        ([(3, 20), (3, 300)], "flash_attn_with_kvcache"),
        (MIXED, "flash_attn_varlen_func"),
    ],
    ids=["decodes", "K + 1", "mixed"],
)
def test_flash_attention_2_splits_even_steps_and_takes_the_rest_packed(installed, lens, function):
    library = installed("flash_attn")
    attend(lens, A100, 256)
    [(called, arguments)] = library.calls
    assert called == function
    if called == "flash_attn_varlen_func":
        assert arguments["cu_seqlens_k"].tolist() == [0, 20, 29, 32]
        assert arguments["cu_seqlens_k"].dtype == torch.int32


def test_the_first_that_runs_on_the_device_is_taken(installed):
    third, second = installed("flash_attn_interface"), installed("flash_attn")
    attend(MIXED, H100, 16)
    attend(MIXED, B200, 256)  # not the third: it has no code for Blackwell
    assert (len(third.calls), len(second.calls)) == (1, 1)


def test_a_module_of_the_name_without_the_functions_is_passed_over(installed):
    installed("flash_attn_interface", functions=())
    with pytest.raises(ConfigError, match="no FlashAttention is installed; pip install flash-attn"):
        FlashAttention(64, torch.float16, 16, H100)


@pytest.mark.parametrize(
    ("module", "capability", "head_dim", "dtype", "block_size", "said"),
    [
        (None, H100, 64, torch.float16, 16, "no FlashAttention is installed; pip install flash-attn .*, or use"),
        ("flash_attn", T4, 64, torch.float16, 256, "FlashAttention-2 cannot run on sm_75"),
        ("flash_attn", A100, 64, torch.float16, 16, "multiples of 256 slots; block_size is 16: use block_size=256"),
        (
            "flash_attn_interface",
            H100,
            64,
            torch.float16,
            24,
            "multiples of 16 slots up to 32; block_size is 24: use block_size=16",
        ),
        ("flash_attn_interface", H100, 64, torch.float16, 128, "16 slots up to 32; block_size is 128: use block_size=16"),
        ("flash_attn.cute", B200, 64, torch.float16, 128, "16 slots up to 32; block_size is 128: use block_size=16"),
        (
            "flash_attn_interface",
            H100,
            64,
            torch.float32,
            16,
            "bfloat16 and float16, not float32; use attention_backend='torch",
        ),
        ("flash_attn_interface", H100, 260, torch.float16, 16, "multiples of 8 up to 256, not 260"),
    ],
)
def test_what_cannot_be_served_is_told_at_construction(installed, module, capability, head_dim, dtype, block_size, said):
    if module:
        installed(module)
    with pytest.raises(ConfigError, match=said):
        FlashAttention(head_dim, dtype, block_size, capability)


def test_a_cpu_is_told_to_use_torch():
    with pytest.raises(ConfigError, match="'flash_attn', which needs a GPU; the device is a CPU: use 'torch'"):
        choose_backend("flash_attn", Setting(64))


def installed_here():
    """Whether one of the published kernels runs on this machine's GPU."""
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    try:
        return bool(find(10 * major + minor))
    except ConfigError:
        return False


@pytest.mark.skipif(not installed_here(), reason="needs a GPU and a published FlashAttention")
@pytest.mark.parametrize("lens", [[(1, 1), (1, 15), (1, 700)], [(4, 20), (4, 300)], [*MIXED, (200, 777)]])
@pytest.mark.parametrize(("Hq", "Hkv"), [(8, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_the_published_kernel_is_the_definition_and_reads_nothing_stale(lens, Hq, Hkv, head_dim):
    major, minor = torch.cuda.get_device_capability()
    for block_size in (16, 32, 256):
        try:
            backend = FlashAttention(head_dim, torch.bfloat16, block_size, 10 * major + minor)
        except ConfigError:
            continue
        Case(lens, Hq, Hkv, head_dim, block_size, torch.bfloat16, filling=math.nan, device="cuda").check(backend)
