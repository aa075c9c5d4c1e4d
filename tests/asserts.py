"""Comparisons that say where they fail, and the test of a law."""

import torch

ERROR_RATE = 1e-6
"""A correct law fails a chi-square test once in a million seeds; the seeds are fixed, so it passes always or never."""


def assert_close(got, expected, rtol, atol, what="values"):
    """``|got - expected| <= atol + rtol · |expected|`` everywhere; a failure prints the first bad indices and values."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    good = torch.isclose(got, expected, rtol=rtol, atol=atol, equal_nan=False)
    if good.all():
        return
    bad = (~good).nonzero()
    shown = "\n".join(
        f"  {index}: got {got[tuple(index)].item():.9g}, expected {expected[tuple(index)].item():.9g}"
        for index in bad[:8].tolist()
    )
    worst = (got - expected).abs().nan_to_num(nan=float("inf")).max().item()
    raise AssertionError(
        f"{what}: {len(bad)} of {got.numel()} differ by more than {atol:g} + {rtol:g}·|x| (worst {worst:g})\n{shown}"
    )


def assert_same(got, expected, what="values"):
    """Equal bit for bit (signs of zero apart)."""
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    assert_close(got, expected, rtol=0, atol=0, what=what)


def chi_square_p(counts, expected):
    """The probability that a fair draw lies further from ``expected`` counts than ``counts`` do.

    Cells that expect under 5 are merged into one; a count where 0 is expected is an error at once.
    """
    counts, expected = counts.double(), expected.double()
    assert not ((expected == 0) & (counts > 0)).any(), "something of probability 0 was drawn"
    small = expected < 5
    if small.any():
        counts = torch.cat((counts[~small], counts[small].sum()[None]))
        expected = torch.cat((expected[~small], expected[small].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))
