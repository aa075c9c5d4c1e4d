"""``refimpl serve``: the server on the command line. Imports what it needs when it runs."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from refimpl.cli_options import with_engine_options, with_fields
from refimpl.config import EngineArgs
from refimpl.errors import ConfigError
from refimpl.server.config_file import read_flags
from refimpl.server.known_flags import MOST_QUEUED, notes
from refimpl.server.limits import Limits
from refimpl.server.serve_options import ServeOptions

log = logging.getLogger("refimpl.server")
NEEDED = ("fastapi", "uvicorn", "llguidance", "prometheus_client", "yaml")


def _take_config(context: typer.Context, file: Path | None) -> Path | None:
    if file is not None:
        context.default_map = {**(context.default_map or {}), **read_flags(file, context.command.params)}
    return file


@with_engine_options
@with_fields(Limits, "limit_options", "Limits of one request")
@with_fields(ServeOptions, "serve_options", "Server")
def serve(
    *,
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="As for --model.")] = None,
    model_option: Annotated[
        str | None,
        typer.Option("--model", help="A folder or GGUF file, ORG/NAME on the Hub, 'tiny', or 'smollm2' (the default)."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A file of these flags: .yaml, .toml or .json.", callback=_take_config, is_eager=True),
    ] = None,
    serve_options: dict[str, Any],
    limit_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> None:
    """Serve a model to OpenAI's clients, over HTTP on this machine alone unless --host says otherwise."""
    _check_packages()
    from refimpl.server.serving import Serving

    chosen = model or model_option or "smollm2"
    # Wrong options fail before a model is loaded.
    options, limits = ServeOptions(**serve_options), Limits(**limit_options)
    args = EngineArgs.from_options({"max_num_queued_reqs": MOST_QUEUED, **engine_options, "model": chosen})
    _log_to_stderr(options.log_level)
    for note in notes(args, options.use_v2_block_manager):
        log.info("%s", note)
    Serving(options, limits, tuple(options.served_model_name or (chosen,))).run(args)


def _check_packages() -> None:
    import importlib.util

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"refimpl serve needs {', '.join(missing)}: pip install 'refimpl[server]'")


def _log_to_stderr(level: str) -> None:
    """Lines of the access log stand alone, as JSON; other lines say their level and who speaks."""
    for name, form in (("refimpl", "%(levelname)s %(name)s: %(message)s"), ("refimpl.server.access", "%(message)s")):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(form))
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
