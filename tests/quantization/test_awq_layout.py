"""AWQ's and GPTQ's layouts, number by number, and the form that the kernels read."""

import pytest
import torch

from refimpl.errors import CheckpointError
from refimpl.kernels import awq_reference
from refimpl.quantization import awq_layout
from refimpl.quantization.awq import AwqLinear
from refimpl.quantization_config import QuantizationConfig

CPU = torch.device("cpu")
EVEN_FIRST = [0, 2, 4, 6, 1, 3, 5, 7]
"""As AutoAWQ's packer has it, said here once more."""


def nibble(word, place):
    """Four bits of a word that may be negative."""
    return (int(word) % 2**32) >> (4 * place) & 15


def numbers(*shape, seed=0):
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def matrix(group_size, inputs, outputs, seed=0):
    """Values, asymmetric zero points, and scales that are different everywhere."""
    groups = inputs // group_size
    scales = torch.rand(groups, outputs, generator=torch.Generator().manual_seed(seed)) + 0.01
    return numbers(inputs, outputs, seed=seed), numbers(groups, outputs, seed=seed + 1), scales.to(torch.float16)


def held(config, tensors, inputs, outputs, kernel_group):
    """A matrix filled from the tensors of a checkpoint, and its weights by the kernels' own definition."""
    linear = AwqLinear(inputs, outputs, kernel_group, torch.float32, CPU, widens=False)
    [part] = linear.parts()
    places = part.stored(config, "layer")
    for name, tensor in tensors.items():
        places[name].copy_(tensor)
    return awq_reference.dequantise(linear.words, linear.scales, linear.zeros, kernel_group, inputs)


def test_awq_packs_even_outputs_first_in_weights_and_zero_points():
    values = numbers(3, 16)
    words = awq_layout.pack_awq(values)
    assert words.dtype == torch.int32
    assert words.shape == (3, 2)
    for row in range(3):
        for column in range(16):
            place = EVEN_FIRST.index(column % 8)
            assert nibble(words[row, column // 8], place) == values[row, column]
    assert int(awq_layout.pack_awq(torch.tensor([[1, 0, 0, 0, 0, 0, 0, 15]], dtype=torch.uint8))) == (15 << 28 | 1) - 2**32
    assert torch.equal(awq_layout.unpack_awq(words), values)
    in_order = awq_layout.pack_in_order(values)
    assert nibble(in_order[1, 0], 3) == values[1, 3]
    assert torch.equal(awq_layout.unpack_in_order(in_order), values)
    with pytest.raises(CheckpointError, match="12 numbers of 4 bits do not fill words of 8"):
        awq_layout.pack_awq(numbers(1, 12))


def test_an_asymmetric_tensor_is_its_plain_unpacking_bit_by_bit():
    values, zeros, scales = matrix(64, inputs=128, outputs=64)
    qweight, qzeros = awq_layout.pack_awq(values), awq_layout.pack_awq(zeros)
    expected = torch.empty(64, 128)
    for o in range(64):
        place = EVEN_FIRST.index(o % 8)
        for i in range(128):
            whole = nibble(qweight[i, o // 8], place) - nibble(qzeros[i // 64, o // 8], place)
            expected[o, i] = whole * scales[i // 64, o].float()
    config = QuantizationConfig("awq", "awq", group_size=64)
    got = held(config, {"qzeros": qzeros, "scales": scales, "qweight": qweight}, 128, 64, 64)
    assert torch.equal(got, expected)
    wrong = awq_layout.pack_in_order(zeros)
    assert not torch.equal(held(config, {"qzeros": wrong, "scales": scales, "qweight": qweight}, 128, 64, 64), expected)


@pytest.mark.parametrize("less_one", [True, False])
def test_gptq_packs_inputs_in_order_and_its_zero_points_one_too_small(less_one):
    values, zeros, scales = matrix(32, inputs=96, outputs=16)
    qweight = torch.zeros(12, 16, dtype=torch.int64)
    for i in range(96):
        qweight[i // 8] |= values[i].long() << (4 * (i % 8))
    packed = torch.zeros(3, 2, dtype=torch.int64)
    for o in range(16):
        packed[:, o // 8] |= ((zeros[:, o].long() - int(less_one)) % 16) << (4 * (o % 8))
    tensors = {"qweight": qweight, "qzeros": packed}
    tensors = {name: (tensor - (tensor >= 2**31) * 2**32).to(torch.int32) for name, tensor in tensors.items()}
    tensors |= {"scales": scales, "g_idx": (torch.arange(96) // 32).to(torch.int32)}
    expected = ((values.float() - zeros.float().repeat_interleave(32, 0)) * scales.float().repeat_interleave(32, 0)).T
    config = QuantizationConfig("gptq", "gptq", group_size=32, zeros_less_one=less_one)
    assert torch.equal(held(config, tensors, 96, 16, 32), expected)
    with pytest.raises(CheckpointError, match=r"layer\.g_idx puts the inputs of a group all over the matrix \(act-order\)"):
        held(config, tensors | {"g_idx": tensors["g_idx"].flip(0)}, 96, 16, 32)


def test_one_group_of_all_inputs_is_held_in_groups_of_the_kernels():
    values, zeros, scales = matrix(320, inputs=320, outputs=8)
    tensors = {"qweight": awq_layout.pack_awq(values), "qzeros": awq_layout.pack_awq(zeros), "scales": scales}
    expected = ((values.float() - zeros.float()) * scales.float()).T
    assert torch.equal(held(QuantizationConfig("awq", "awq", group_size=-1), tensors, 320, 8, 64), expected)


def test_without_zero_points_a_number_is_taken_from_8():
    values, _, scales = matrix(64, inputs=64, outputs=8)
    tensors = {"qweight": awq_layout.pack_awq(values), "scales": scales}
    expected = ((values.float() - 8) * scales.float()).T
    assert torch.equal(held(QuantizationConfig("awq", "awq", 64, zero_point=False), tensors, 64, 8, 64), expected)


@pytest.mark.parametrize(
    ("group_size", "outputs", "inputs"),
    [(32, 3, 32), (32, 33, 288), (64, 70, 256), (128, 32, 640), (64, 97, 576), (32, 0, 96)],
)
def test_the_kernels_words_hold_every_number_where_it_is_said_to_be(group_size, outputs, inputs):
    values = numbers(outputs, inputs)
    words = awq_reference.pack_words(values, group_size)
    assert words.shape == awq_reference.words_shape(outputs, inputs, group_size)
    assert torch.equal(awq_reference.unpack_words(words, group_size, outputs, inputs), values)
    order = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]
    for o in range(0, outputs, 11):
        for i in range(0, inputs, 7):
            chunk, rest = divmod(i, 4 * group_size)
            group, within = divmod(rest, group_size)
            piece, c = divmod(within // 2, 16)
            word = words[o // 32, chunk, piece, o % 32, order.index(c)]
            assert nibble(word, group + 4 * (within % 2)) == values[o, i]
    assert not words[-1:].permute(0, 3, 1, 2, 4).flatten(0, 1)[outputs % 32 or 32 :].any()


def test_rows_are_put_into_tiles_wherever_they_begin():
    values = numbers(90, 96)
    words = awq_reference.pack_words(torch.zeros_like(values), 32)
    for first, last in ((20, 53), (0, 20), (53, 90)):
        awq_reference.put_rows(words, first, awq_reference.row_words(values[first:last], 32))
    assert torch.equal(words, awq_reference.pack_words(values, 32))


def test_zero_points_and_scales_of_a_chunk_lie_together():
    zeros = numbers(8, 7)
    packed = awq_reference.pack_zeros(zeros)
    assert nibble(packed[1, 5], 3) == zeros[7, 5]
    assert torch.equal(awq_reference.unpack_zeros(packed), zeros)
    scales = torch.rand(8, 7)
    together = awq_reference.pack_scales(scales)
    assert together[1, 5].tolist() == scales[4:, 5].tolist()
    assert torch.equal(awq_reference.unpack_scales(together), scales)


@pytest.mark.parametrize("zero_point", [True, False])
def test_rounding_is_to_the_nearest_and_within_half_a_step(zero_point):
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(2)) + 0.3
    weight[3] = 0
    weight[4] = weight[4].abs() + 5  # all on one side of 0
    values, zeros, scales = awq_layout.quantise_groups(weight, 64, zero_point)
    assert (values.shape, zeros.shape, scales.shape) == ((128, 24), (2, 24), (2, 24))
    assert (values.dtype, zeros.dtype, scales.dtype) == (torch.uint8, torch.uint8, torch.float16)
    each = (one.float().repeat_interleave(64, 0) for one in (zeros, scales))
    wide_zeros, wide_scales = each
    off = (((values.float() - wide_zeros) * wide_scales).T - weight).abs()
    assert (off <= 0.51 * wide_scales.T + 1e-3 * weight.abs()).all()
    assert off[3].max() == 0
    assert set(zeros.flatten().tolist()) == {8} if not zero_point else zeros.float().std() > 0
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        awq_layout.quantise_groups(weight / 0, 64)


def test_groups_that_do_not_lie_whole_on_a_rank_are_refused_with_the_layer_and_what_is_legal():
    awq_layout.check_groups("model.layers.0.mlp.down_proj", 384, 128, ranks=3)
    awq_layout.check_groups("any", 384, -1, ranks=2)
    wanted = (
        r"model\.layers\.0\.mlp\.down_proj has 384 inputs, 192 on each of 2 ranks, .* groups of 128, .*"
        r"group sizes that would do: 64, 32; tensor_parallel_size with this one: 1$"
    )
    with pytest.raises(CheckpointError, match=wanted):
        awq_layout.check_groups("model.layers.0.mlp.down_proj", 384, 128, ranks=2)
    with pytest.raises(CheckpointError, match=r"q_proj has 96 inputs, and .* of 128, .*; group sizes that would do: 32$"):
        awq_layout.check_groups("q_proj", 96, 128)
    with pytest.raises(CheckpointError, match=r"has 100 inputs, 33\.3333 on each of 3 ranks, .* no group size would do"):
        awq_layout.check_groups("q_proj", 100, 32, ranks=3)
    with pytest.raises(CheckpointError, match="no group size would do"):
        awq_layout.check_groups("q_proj", 100, 0)


def test_a_part_of_a_matrix_takes_its_share_of_whole_tensors():
    """As where several ranks hold a model: outputs of some matrices, inputs of others."""
    values, zeros, scales = matrix(32, inputs=256, outputs=32)
    tensors = {"qweight": awq_layout.pack_awq(values), "qzeros": awq_layout.pack_awq(zeros), "scales": scales}
    config = QuantizationConfig("awq", "awq", group_size=32)
    whole = held(config, tensors, 256, 32, 32)
    for dim, rows, columns in ((0, slice(8, 24), slice(0, 256)), (1, slice(0, 32), slice(128, 256))):
        start, full = ((rows.start, 32), (columns.start, 256))[dim]
        linear = AwqLinear(columns.stop - columns.start, rows.stop - rows.start, 32, torch.float32, CPU, widens=False)
        [part] = linear.parts()
        for name, place in part.stored(config, "layer").items():
            wide = place.of_whole(dim, start, full)
            assert wide.shape == tensors[name].shape
            wide.copy_(tensors[name])
        got = awq_reference.dequantise(linear.words, linear.scales, linear.zeros, 32, linear.in_features)
        assert torch.equal(got, whole[rows, columns])
    with pytest.raises(CheckpointError, match="begins at 16 of 256 inputs, which go by 32"):
        part.stored(config, "layer")["scales"].of_whole(1, 16, 256)
