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

log = logging.getLogger("refimpl.server")
NEEDED = ("fastapi", "uvicorn", "llguidance", "prometheus_client", "yaml")


def _take_config(context: typer.Context, file: Path | None) -> Path | None:
    if file is not None:
        context.default_map = {**(context.default_map or {}), **read_flags(file, context.command.params)}
    return file


@with_engine_options
@with_fields(Limits, "limit_options", "Limits of one request")
def serve(
    *,
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="As for --model.")] = None,
    model_option: Annotated[
        str | None,
        typer.Option("--model", help="A folder or GGUF file, ORG/NAME on the Hub, 'tiny', or 'smollm2' (the default)."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any that is free.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="A name that the model answers to, by default MODEL; may be given several times."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A file of these flags: .yaml, .toml or .json.", callback=_take_config, is_eager=True),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="REFIMPL_API_KEY",
            help="A key that clients must send; several times: clients of different keys share no cached prefix.",
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(help="A name that a Host header may have; by default any, or this machine's own on a loopback --host."),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(help="An origin of web pages that may ask, or '*'; by default the server's own alone."),
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="A certificate (PEM): serve https.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds in which answers may finish after SIGTERM or Ctrl-C.")
    ] = 30.0,
    stuck_after: Annotated[float, typer.Option(min=1, help="Seconds in one step after which /health says 503.")] = 60.0,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="Engines of this model on this machine, each with a cache of its own; a GPU each.")
    ] = 1,
    ui: Annotated[bool, typer.Option("--ui/--no-ui", help="Serve the page /ui.")] = True,
    vllm_metrics: Annotated[bool, typer.Option(help="Show figures at /metrics under vLLM's names too.")] = True,
    log_level: Annotated[str, typer.Option(help="debug, info (a line a request), warning or error.")] = "info",
    use_v2_block_manager: Annotated[bool, typer.Option(help="Of older vLLM; changes nothing.")] = False,
    limit_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> None:
    """Serve a model to OpenAI's clients, over HTTP on this machine alone unless --host says otherwise."""
    _check_packages()
    from refimpl.server.runner import Listening
    from refimpl.server.serving import Serving

    chosen = model or model_option or "smollm2"
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile go together; give both, or neither")
    if not all(api_key or ()):
        raise ConfigError("--api-key is empty; give a key, or leave it out")
    engine_options = {"max_num_queued_reqs": MOST_QUEUED, **engine_options, "model": chosen}
    args = EngineArgs.from_options(engine_options)  # wrong options fail before a model is loaded
    _log_to_stderr(log_level)
    for note in notes(args, use_v2_block_manager):
        log.info("%s", note)
    listening = Listening(
        host,
        port,
        None if ssl_certfile is None else str(ssl_certfile),
        None if ssl_keyfile is None else str(ssl_keyfile),
        shutdown_timeout,
    )
    Serving(
        listening=listening,
        limits=Limits(**limit_options),
        names=tuple(served_model_name or (chosen,)),
        api_keys=tuple(api_key or ()),
        hosts=tuple(allowed_hosts or ()),
        origins=tuple(allowed_origins or ()),
        stuck_after=stuck_after,
        ui=ui,
        vllm_metrics=vllm_metrics,
        data_parallel_size=data_parallel_size,
    ).run(args)


def _check_packages() -> None:
    import importlib.util

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"refimpl serve needs {', '.join(missing)}: pip install 'refimpl[server]'")


def _log_to_stderr(level: str) -> None:
    """Lines of the access log stand alone, as JSON; other lines say their level and who speaks."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"--log-level is {level!r}; it must be debug, info, warning or error")
    for name, form in (("refimpl", "%(levelname)s %(name)s: %(message)s"), ("refimpl.server.access", "%(message)s")):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(form))
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(number)
