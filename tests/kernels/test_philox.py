"""Random numbers without state: the published vectors, the independence from the batch, and the law."""

import itertools

import pytest
import torch
from asserts import ERROR_RATE, chi_square_p

from refimpl.kernels.philox import FEW, ROOT_PATH, Purpose, branch, mix_seed, philox, uniform

ONES = 0xFFFFFFFF

# Random123's kat_vectors file, philox4x32-10: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def rows(*values):
    return torch.tensor(values, dtype=torch.int64)


def numbers(seed, path=ROOT_PATH, position=0, purpose=Purpose.TARGET):
    """Uniform numbers for lists or single values of seed, path and position."""
    seed, path, position = torch.broadcast_tensors(*(torch.as_tensor(x, dtype=torch.int64) for x in (seed, path, position)))
    return uniform(*(x.reshape(-1).contiguous() for x in (seed, path, position)), purpose)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    words = philox(tuple(rows(word) for word in counter), tuple(rows(word) for word in key))
    assert [hex(int(word)) for word in words] == [hex(word) for word in expected]


def test_known_answers_in_one_batch():
    counter = tuple(rows(*column) for column in zip(*(answer[0] for answer in KNOWN_ANSWERS), strict=True))
    key = tuple(rows(*column) for column in zip(*(answer[1] for answer in KNOWN_ANSWERS), strict=True))
    words = torch.stack(philox(counter, key), dim=1)
    assert words.tolist() == [list(answer[2]) for answer in KNOWN_ANSWERS]


def test_arguments_are_not_changed():
    counter, key = tuple(rows(i) for i in range(4)), (rows(7), rows(8))
    philox(counter, key)
    assert [int(word) for word in (*counter, *key)] == [0, 1, 2, 3, 7, 8]


def test_few_numbers_and_many_are_the_same():
    seed, path, position = torch.randint(-(2**63), 2**63 - 1, (3, 2 * FEW))
    position = position.abs()
    many = numbers(seed, path, position)
    for start in (0, FEW):
        some = slice(start, start + FEW)
        assert torch.equal(numbers(seed[some], path[some], position[some]), many[some])


def test_a_uniform_number_is_the_first_word_of_its_counter():
    seed, path, position = 0x299F31D0_A4093822, 0x03707344_13198A2E, 0x243F6A88
    [word] = philox(
        (rows(position), rows(Purpose.ACCEPT), rows(path & ONES), rows(path >> 32)), (rows(seed & ONES), rows(seed >> 32))
    )[0].tolist()
    assert numbers(seed, path, position, Purpose.ACCEPT).tolist() == [(word + 0.5) / 2**32]


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63 - 1, -123456789])
def test_strictly_between_0_and_1(seed):
    u = numbers(seed, position=torch.arange(10_000))
    assert u.dtype == torch.float64
    assert u.min() > 0
    assert u.max() < 1
    assert len(set(u.tolist())) > 9_990


def test_the_extreme_words_stay_inside():
    assert 0 < (0 + 0.5) * 2.0**-32
    assert (ONES + 0.5) * 2.0**-32 < 1


def test_a_number_does_not_depend_on_its_batch():
    seeds, paths = torch.arange(-50, 50), torch.tensor([branch(0, i) for i in range(100)])
    positions = torch.arange(100) * 37
    together = numbers(seeds, paths, positions)
    alone = [float(numbers(int(s), int(p), int(t))) for s, p, t in zip(seeds, paths, positions, strict=True)]
    assert together.tolist() == alone
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    assert numbers(seeds[order], paths[order], positions[order]).tolist() == together[order].tolist()


def test_each_of_the_four_matters():
    seeds = [0, 1, -1, 2**32, -(2**63)]  # 2**32 differs from 0 in the key's high word alone
    paths = [0, 1, -1, 2**32, branch(0, 0)]
    positions = [0, 1, 2, 2**31]
    drawn = {
        (seed, path, position, purpose): float(numbers(seed, path, position, purpose))
        for seed, path, position, purpose in itertools.product(seeds, paths, positions, Purpose)
    }
    assert len(set(drawn.values())) == len(drawn)


def test_branches_are_distinct():
    children = [branch(parent, i) for parent in (ROOT_PATH, 1, -1, -(2**63), 2**63 - 1) for i in range(1000)]
    assert len(set(children)) == len(children)
    assert all(-(2**63) <= path < 2**63 for path in children)
    assert branch(branch(0, 1), 2) != branch(branch(0, 2), 1)


def test_mixed_seeds_are_distinct_and_any_integer_will_do():
    seeds = [mix_seed(seed, arrival) for seed in (0, 1, -1, 2**63, 10**30) for arrival in range(1000)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert mix_seed(0, 3) == mix_seed(0, 3)


@pytest.mark.parametrize("axis", ["seed", "path", "position"])
def test_uniform_along_each_axis(axis):
    """Neighbouring seeds, paths or positions give independent uniform numbers (chi-square; error rate ``ERROR_RATE``)."""
    count, cells = 200_000, 400
    u = numbers(**{"seed": 11, axis: torch.arange(count)})
    counts = torch.histc(u, cells, 0, 1)
    assert chi_square_p(counts, torch.full((cells,), count / cells)) > ERROR_RATE
    # Pairs of neighbours fill the square evenly.
    cell = (u[:-1] * 20).long() * 20 + (u[1:] * 20).long()
    pairs = torch.bincount(cell[::2], minlength=400)
    assert chi_square_p(pairs, torch.full((400,), len(cell[::2]) / 400)) > ERROR_RATE


def test_purposes_are_independent():
    a, b = (numbers(5, position=torch.arange(100_000), purpose=p) for p in (Purpose.TARGET, Purpose.ACCEPT))
    assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 5 / 100_000**0.5
