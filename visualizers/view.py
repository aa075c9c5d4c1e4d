"""View: the anywidget behind every live widget. It sends frames and takes the messages of buttons, keys and clicks.

The browser's half is hand-written (``static/``), put together here into one module: no bundler, nothing from a network.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import anywidget
import traitlets

from refimpl.errors import RefimplError
from refimpl.visualizers import static_html
from refimpl.visualizers.figure import Figure, plain
from refimpl.visualizers.frames import Sender
from refimpl.visualizers.player import Player
from refimpl.visualizers.source import player_for

log = logging.getLogger(__name__)


@cache
def script(names: tuple[str, ...]) -> str:
    """The module of a view with these figures."""
    folder = files("refimpl.visualizers").joinpath("static")
    parts = ["common.js", *(f"{name}.js" for name in names), "shell.js"]
    return "\n".join(folder.joinpath(part).read_text(encoding="utf-8") for part in parts)


@cache
def style(names: tuple[str, ...]) -> str:
    """Its style sheet."""
    folder = files("refimpl.visualizers").joinpath("static")
    sheets = [folder.joinpath(part) for part in ("base.css", *(f"{name}.css" for name in names))]
    return "\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets if sheet.is_file())


class View(anywidget.AnyWidget):
    """Figures of one log, with or without a transport. Subclasses name the figures.

    Args:
        source: an LLM, an Engine, an EventLog, or the path of a saved log.

    Raises:
        RefimplError: the source has no log.

    """

    figures: Sequence[Figure] = ()
    with_transport = True
    names = traitlets.List(traitlets.Unicode()).tag(sync=True)
    heading = traitlets.Unicode("").tag(sync=True)
    transport_shown = traitlets.Bool(True).tag(sync=True)
    _esm = "export default { render() {} }"

    def __init__(self, source: Any, **options: Any) -> None:
        names = tuple(figure.name for figure in self.figures)
        self.player: Player = player_for(source)
        self._sender = Sender(self.figures)
        self._sending = threading.Lock()
        self._wanted_whole = True
        super().__init__(
            names=list(names),
            heading=_heading(self.player),
            transport_shown=self.with_transport,
            _esm=script(names),
            _css=style(names),
            **options,
        )
        self.on_msg(self._on_message)
        self._stop_listening = self.player.listen(self._draw)

    # ------------------------------------------------------------------ to the browser

    def _draw(self) -> None:
        """Send a frame, if a browser said that it is there."""
        if not self._wanted_whole:
            self._send_frame(whole=False)

    def _send_frame(self, whole: bool) -> None:
        with self._sending, self.player.locked():
            message, buffers = self._sender.frame(self.player, whole)
        self.send(message, buffers=buffers)

    # ------------------------------------------------------------------ from the browser

    def _on_message(self, _widget: Any, message: Any, _buffers: Any) -> None:
        """A button, a key, a click. What a browser sends is not trusted: anything else is ignored."""
        if not isinstance(message, dict):
            return
        action = _ACTIONS.get(message.get("type", ""))
        if action is None:
            return
        try:
            action(self, message)
        except RefimplError as error:
            self.send({"type": "said", "text": str(error)})
        except Exception as error:
            log.warning("a message of a widget could not be followed: %r", message, exc_info=True)
            self.send({"type": "said", "text": f"that did not work: {error}"})

    def _hello(self, _message: dict[str, Any]) -> None:
        """A browser shows this view, for the first time or again after a reload."""
        self._wanted_whole = False
        with self.player.locked():
            self.player.catch_up()
        self._send_frame(whole=True)

    def _seek(self, message: dict[str, Any]) -> None:
        self.player.seek(int(message["position"]))

    def _step(self, message: dict[str, Any]) -> None:
        """A step on or back in the log; at its end, a step of the engine, if requests wait."""
        delta = int(message["delta"])
        player = self.player
        with player.locked():
            player.catch_up()
            at_the_end = player.position >= len(player.history) - 1
        if delta > 0 and at_the_end and player.engine is not None:
            self._engine_step({})
        else:
            player.step(delta)

    def _engine_step(self, _message: dict[str, Any]) -> None:
        """Let the engine take one step: the thread that drives it if it is held, else in this one."""
        engine = self.player.engine
        if engine is None:
            raise RefimplError("this is a saved log: no engine runs behind it")
        self.player.go_live()
        if engine.gate.num_waiting:
            engine.gate.allow(1)
        elif engine.has_unfinished_requests():
            engine.gate.allow(1)
            engine.keep_for_next_step(engine.step())
        else:
            raise RefimplError("no request waits or runs; add one with engine.add_request, or call generate")

    def _hold(self, message: dict[str, Any]) -> None:
        """Hold the engine before its next step, or let it go."""
        engine = self.player.engine
        if engine is None:
            raise RefimplError("this is a saved log: no engine runs behind it")
        (engine.gate.close if message["hold"] else engine.gate.open)()
        self.player.go_live()

    def _card(self, message: dict[str, Any]) -> None:
        """Somebody points at a block: all of it, which is not sent with each frame."""
        for figure in self.figures:
            if hasattr(figure, "card"):
                with self.player.locked():
                    card = figure.card(self.player.history, self.player.position, int(message["block"]))
                self.send({"type": "card", "figure": figure.name, "card": card})

    def close(self) -> None:
        """Take the widget off the page and let the log go."""
        self._stop_listening()
        super().close()  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ without a browser

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The live widget where there is one, and a picture beside it for where there is none."""
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None:
            data["text/html"] = self._repr_html_()
            data["text/plain"] = self._repr_text()
        return bundle

    def _repr_html_(self) -> str:
        """The pictures at hand as HTML without a script."""
        with self.player.locked():
            self.player.catch_up()
            return static_html.figures(self.figures, self.player.history, self.player.position)

    def _repr_text(self) -> str:
        with self.player.locked():
            self.player.catch_up()
            history, position = self.player.history, self.player.position
            return "\n".join(plain(figure.picture(history, position)["caption"]) for figure in self.figures)


def _heading(player: Player) -> str:
    config = player.history.config
    return (
        f"{config.get('model', 'an engine')}: {config['num_blocks']:,} blocks of {config['block_size']} tokens, "
        f"{config['max_num_batched_tokens']:,} tokens a step at most, {config['max_num_seqs']} slots"
    )


_ACTIONS = {
    "hello": View._hello,
    "seek": View._seek,
    "step": View._step,
    "engine_step": View._engine_step,
    "hold": View._hold,
    "card": View._card,
    "play": lambda view, _: view.player.play(),
    "pause": lambda view, _: view.player.pause(),
    "live": lambda view, _: view.player.go_live(),
    "speed": lambda view, message: view.player.set_speed(float(message["speed"])),
    "pin": lambda view, message: view.player.pin(message["request"]),
    "next_preemption": lambda view, _: _next_preemption(view),
}


def _next_preemption(view: View) -> None:
    if not view.player.next_preemption():
        raise RefimplError("nothing was preempted in this log")
