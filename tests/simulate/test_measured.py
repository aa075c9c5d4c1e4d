"""The sets that the simulator is held against are the sets that were measured."""

import pytest

from refimpl.bench import measured
from refimpl.bench.simulate import _against


def test_the_sets_are_those_that_were_measured():
    for name, prompts, outputs in (
        ("mixed-128", 71_274, 34_887),
        ("mixed-512", 280_538, 137_056),
        ("decode-64", 32_768, 16_384),
    ):
        listed = measured.requests(name)
        assert (sum(r.prompt for r in listed), sum(r.output for r in listed)) == (prompts, outputs)
    assert [len(measured.requests(f"poisson-{rate}")) for rate in (10, 20, 30)] == [196, 389, 580]
    assert {r.output for r in measured.requests("prefill-4")} == {1}


@pytest.mark.parametrize("workload", ["decode-1", "decode-8", "prefill-64"])
def test_runs_on_an_h200_come_out_as_measured(workload):
    [run] = [run for run in measured.RUNS if (run.model, run.dtype, run.workload) == ("llama-3-8b", "bfloat16", workload)]
    assert abs(_against(run)["error"]) < 0.06
