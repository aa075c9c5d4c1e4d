"""``refimpl chat``: a conversation in the terminal, or a line a turn through a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from refimpl.cli_options import with_engine_options, with_sampling_options
from refimpl.config import EngineArgs
from refimpl.errors import RefimplError, RequestError

COMMANDS = {
    "/help": "these commands",
    "/system TEXT": "set the system message (without TEXT: show it; /system - takes it away)",
    "/reset": "forget the conversation, but for the system message",
    "/save FILE": "write the messages as JSON",
    "/load FILE": "go on with the messages of a file",
    "/stats": "tokens, tokens found in the prefix cache, times",
    "/exit": "end (so does Ctrl-D); Ctrl-C stops an answer only",
}


class ChatTerminal:
    """Reads questions and commands line by line; answers go to ``out``, all else to ``notes``.

    Where both ends are a terminal there is a prompt, with the lines of before on the arrow keys (readline, where Python has
    it). Through a pipe ``out`` gets the answers and nothing else.
    """

    def __init__(self, chat: Any, source: TextIO, out: TextIO, notes: TextIO, verbose: bool = False) -> None:
        from rich.console import Console

        self.chat = chat
        self.verbose = verbose
        self.failed = False
        """Whether a turn was refused, or ended with an error."""
        self._source = source
        self._out = out
        self._console = Console(file=notes, highlight=False, markup=False, soft_wrap=True)
        self._at_terminal = source.isatty() and out.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/system": self._system,
            "/reset": self._reset,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
        }

    def run(self) -> None:
        """Take turns until /exit or the end of the input."""
        for line in self._lines():
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            try:
                if text.startswith("/") and not text.startswith("//"):
                    self._command(text)
                elif text:
                    self._turn(text.removeprefix("/") if text.startswith("//") else text)
            except RefimplError as error:
                self.failed = True
                self.note(str(error))

    def note(self, text: str) -> None:
        """A line that is no answer."""
        self._console.print(text, style="dim")

    def _lines(self) -> Iterator[str]:
        if not self._at_terminal:
            yield from self._source
            return
        with suppress(ImportError):  # not on every platform; then there is no history
            import readline  # noqa: F401 - importing it changes input()
        while True:
            try:
                yield input("> ")
            except EOFError:
                self._write("\n")
                return
            except KeyboardInterrupt:
                self._write("\n")
                self.note("Ctrl-D or /exit ends the chat")

    def _write(self, text: str) -> None:
        encoding = self._out.encoding or "utf-8"
        self._out.write(text.encode(encoding, "replace").decode(encoding))
        self._out.flush()

    def _turn(self, text: str) -> None:
        try:
            for piece in self.chat.answer(text):
                self._write(piece)
        except RequestError as error:
            raise RequestError(f"{error}\n/reset begins a new conversation, /save FILE keeps this one") from error
        self._write("\n")
        turn = self.chat.turns[-1]
        if turn.finish_reason is None:
            self.note("interrupted; what was said stays in the conversation")
        elif turn.finish_reason == "error":
            self.failed = True
            self.note(str(turn.stop_reason))
        elif turn.filled:
            most = self.chat.engine.scheduler.config.max_model_len
            self.note(f"the conversation fills the context of {most} tokens; /reset begins anew, /save FILE keeps it")
        elif turn.finish_reason == "length":
            self.note(f"cut after {turn.num_output_tokens} tokens (--max-tokens)")
        if self.verbose:
            self.note(str(turn))

    # ------------------------------------------------------------------ commands

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        if name not in self._commands:
            raise RefimplError(f"there is no command {name}; /help lists them, and //… sends a text that begins with /")
        self._commands[name](argument.strip())

    def _help(self, _argument: str) -> None:
        for command, meaning in COMMANDS.items():
            self.note(f"{command:14s} {meaning}")

    def _system(self, argument: str) -> None:
        if argument:
            self.chat.set_system("" if argument == "-" else argument)
        self.note(f"system message: {self.chat.system or 'none'}")

    def _reset(self, _argument: str) -> None:
        self.chat.reset()
        self.note("a new conversation")

    def _save(self, argument: str) -> None:
        path = _file(argument, "/save")
        self.chat.save(path)
        self.note(f"{len(self.chat.messages)} messages in {path}")

    def _load(self, argument: str) -> None:
        self.chat.load(_file(argument, "/load"))
        self.note(f"{len(self.chat.messages)} messages; the conversation goes on from there")

    def _stats(self, _argument: str) -> None:
        turns = self.chat.turns
        if not turns:
            self.note("nothing was asked yet")
            return
        prompt, cached = sum(t.num_prompt_tokens for t in turns), sum(t.num_cached_tokens for t in turns)
        self.note(f"last turn: {turns[-1]}")
        self.note(
            f"all {len(turns)} turns: {prompt} prompt tokens, {cached} of them cached; "
            f"{sum(t.num_output_tokens for t in turns)} tokens generated"
        )


def _file(argument: str, command: str) -> Path:
    if not argument:
        raise RefimplError(f"{command} needs the name of a file")
    return Path(os.path.expanduser(argument))  # Path's own raises for a user that is not there


@with_engine_options
@with_sampling_options(but=("logprobs", "prompt_logprobs"), max_tokens=1024, temperature=0.7, top_p=0.95)
def chat(
    *,
    named: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    load: Annotated[Path | None, typer.Option(help="Go on with the messages of this file (/save writes one).")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="After each answer, what it took.")] = False,
    sampling_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> None:
    """Talk with a model; answers come as they are drawn. /help lists the commands.

    Through a pipe each line is a turn, and standard output holds the answers alone.
    """
    from refimpl.sampling_params import SamplingParams

    if named is not None:
        engine_options["model"] = named
    params = SamplingParams(**sampling_options)
    args = EngineArgs.from_options(engine_options)  # wrong options fail before torch is imported
    from refimpl.chat import Chat, read_messages
    from refimpl.engine import Engine

    messages = read_messages(load) if load is not None else []
    engine = Engine(args)
    try:
        conversation = Chat(engine, params, messages)
        if system is not None:
            conversation.set_system(system)
        terminal = ChatTerminal(conversation, sys.stdin, sys.stdout, sys.stderr, verbose)
        if sys.stdin.isatty():
            terminal.note(f"{args.model}, {engine.memory_report().device}; /help lists the commands, Ctrl-D ends")
        terminal.run()
    finally:
        engine.close()
    if terminal.failed and not sys.stdin.isatty():
        raise typer.Exit(1)
