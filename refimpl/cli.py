"""The command line: ``refimpl generate | chat | serve | pull | lab | doctor | simulate | bench | speculate``.

Importing this file, and ``refimpl --help``, import no torch: each command loads what it needs when it runs.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from refimpl.bench.commands import bench
from refimpl.chat_command import chat as chat_command
from refimpl.cli_options import with_engine_options, with_sampling_options
from refimpl.cli_output import GenerateCommand
from refimpl.cli_prompts import read_prompts
from refimpl.cli_simulate import NOT_SIMULATED, simulate
from refimpl.config import EngineArgs
from refimpl.doctor.command import doctor
from refimpl.errors import RefimplError
from refimpl.server.command import serve
from refimpl.speculate.commands import speculate

app = typer.Typer(
    name="refimpl",
    help="LLM inference, written to be read and to be used.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(speculate, name="speculate")
app.command("chat")(chat_command)
app.command("serve")(serve)
app.command("doctor")(doctor)
app.command("simulate")(with_engine_options(simulate, but=NOT_SIMULATED))


_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""click's, or the copy of click that newer versions of typer carry."""


def main() -> None:
    """The ``refimpl`` command: what went wrong in one or two lines on stderr, and exit code 2 (130 after Ctrl-C)."""
    try:
        code = app(standalone_mode=False)
    except _UsageError as error:
        _fail_usage(error)
    except RefimplError as error:
        _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # whoever read the output has enough; what is still to be flushed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    if code == 130:
        _fail("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail_usage(error: Any) -> NoReturn:
    """An option or command that does not exist, or a value of the wrong kind. Its message is empty where help was shown."""
    command = error.ctx.command_path if error.ctx is not None else "refimpl"
    message = " ".join(error.format_message().split()).rstrip(".")
    if not message:
        sys.exit(2)
    _fail(f"{message} (see {command} --help)", 2)


def _fail(message: str, code: int) -> NoReturn:
    print(f"refimpl: {message}", file=sys.stderr)
    sys.exit(code)


@app.command()
@with_engine_options
@with_sampling_options(max_tokens=64, temperature=0.0)
def generate(
    *,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT…", help="One or more prompts; without any, standard input is one.")
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help='JSON lines, each {"prompt": …}, {"prompt_token_ids": […]} or a string; "-" is standard input.'),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt as a user's message through the chat template.")
    ] = False,
    n: Annotated[int, typer.Option(help="Samples of each prompt.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt on stdout, and nothing else.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Tell each request's story on stderr.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Draw blocks and batches on stderr while they change.")] = False,
    sampling_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> None:
    """Generate text for prompts, batched through the engine.

    The seed (--seed) fixes what is drawn at a temperature above 0.
    """
    from refimpl.sampling_params import SamplingParams

    listed = _all_prompts(prompts, prompts_file)
    params = SamplingParams(n=n, **sampling_options)
    if not as_json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise RefimplError("--logprobs and --prompt-logprobs are printed with --json; add it, or leave them out")
    EngineArgs.from_options(engine_options)  # wrong options fail before torch is imported
    from refimpl.llm import LLM

    with LLM(**engine_options) as llm:
        command = GenerateCommand(llm, params, chat=chat, as_json=as_json, explain=explain)
        if not command.run(listed, _watched(llm) if watch else None):
            raise typer.Exit(1)


def _watched(llm: Any) -> AbstractContextManager[None]:
    from refimpl.visualizers.watch import watch

    return watch(llm.engine.events)


def _all_prompts(prompts: list[str] | None, prompts_file: Path | None) -> list[Any]:
    """Those of the command line, then those of the file; without any, standard input is one."""
    listed: list[Any] = [*(prompts or []), *(read_prompts(prompts_file) if prompts_file else [])]
    if not listed and not sys.stdin.isatty() and (piped := sys.stdin.read().strip()):
        listed = [piped]
    if not listed:
        raise RefimplError("there is no prompt; give one or more, pipe one in, or --prompts-file FILE.jsonl")
    return listed


@app.command()
def pull(
    model: Annotated[
        str | None, typer.Argument(metavar="[ORG/NAME]", help="A model on the Hub; default: the embedded one.")
    ] = None,
) -> None:
    """Download a model ahead of its first use, and print the folder it is in."""
    from refimpl.loading.hub import hub_checkpoint_folder
    from refimpl.loading.pull import EMBEDDED_MODEL, embedded_checkpoint_folder

    if model in (None, EMBEDDED_MODEL):
        print(embedded_checkpoint_folder())
    else:
        print(hub_checkpoint_folder(str(model)))


@app.command()
def lab(
    folder: Annotated[Path, typer.Argument(help="Where the notebooks are copied to.")] = Path("refimpl-notebooks"),
    *,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that were changed.")] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Open no browser; print the address.")] = False,
    port: Annotated[int | None, typer.Option(help="JupyterLab's port.")] = None,
) -> None:
    """Copy the notebooks into a folder of your own, and open JupyterLab there."""
    from refimpl.lab import copy_notebooks, open_lab

    copied = copy_notebooks(folder, force)
    print(f"{folder}: {len(copied.written)} file(s) written, {len(copied.same)} up to date", file=sys.stderr)
    if copied.kept:
        print(f"kept, since they differ from ours: {', '.join(copied.kept)} (--force overwrites)", file=sys.stderr)
    raise typer.Exit(open_lab(folder, browser=not no_browser, port=port))
