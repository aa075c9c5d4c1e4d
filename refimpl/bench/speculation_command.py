"""``refimpl bench speculation``. What needs torch is imported when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from refimpl.bench.app import AsJson, Save, bench
from refimpl.cli_checks import above_zero
from refimpl.cli_options import with_engine_options
from refimpl.errors import ConfigError


@bench.command()
@with_engine_options
def speculation(
    *,
    model_config: Annotated[
        str | None,
        typer.Option(
            help="Instead of a model, a shape with random weights, whose drafts are accepted by chance: llama-3-70b, or a "
            "folder with a config.json. With --quantization fp8 it fits one H200."
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            help="Which, by commas: ngram, drafter; of a shape draft_8b, draft_1b, adaptive_8b, adaptive_1b. Default: all."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Times that every number of drafts runs, in turn; one more goes before.")
    ] = 3,
    batch_sizes: Annotated[
        str, typer.Option(help="Of the adaptive rows, by commas, rising. With several, every number of drafts runs at each.")
    ] = "64",
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Of a shape: the probability that a draft is accepted.")
    ] = 0.75,
    rates: Annotated[str, typer.Option(help="The same of the adaptive rows, by commas.")] = "0.4,0.75",
    most_drafts: Annotated[int, typer.Option(min=1, help="Of a shape: most tokens drafted a round.")] = 8,
    scale: Annotated[
        float, typer.Option(callback=above_zero, help="Shrink output lengths by this, for a quick look.")
    ] = 1.0,
    max_minutes: Annotated[
        float | None, typer.Option(callback=above_zero, help="For everything; rows that have no time left say so.")
    ] = None,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """Speculative decoding beside none, measured and predicted: n-grams, a trained head, draft models of a shape."""
    from refimpl.bench.result import report_result
    from refimpl.bench.speculation import run

    try:
        sizes, chances = [int(size) for size in batch_sizes.split(",")], [float(rate) for rate in rates.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"batch_sizes is {batch_sizes!r} and rates {rates!r}; give whole numbers by commas, such as 1,16,64, and "
            "probabilities, such as 0.4,0.75"
        ) from error
    names = rows.split(",") if rows else None
    found = run(engine_options, model_config, names, repeats, sizes, acceptance, scale, max_minutes, chances, most_drafts)
    report_result(found, as_json, save)
