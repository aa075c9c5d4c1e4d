"""View: the anywidget behind every live widget. It sends frames and takes the messages of buttons, keys and clicks.

The browser's half is hand-written (``static/``), put together here into one module: no bundler, nothing from a network.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import anywidget
import traitlets

from refimpl.errors import RefimplError
from refimpl.visualizers import static_html
from refimpl.visualizers.figure import WIDTH, Figure, Picture, plain
from refimpl.visualizers.frames import Sender
from refimpl.visualizers.page import heading, module, style
from refimpl.visualizers.pictured import Pictured
from refimpl.visualizers.player import Player
from refimpl.visualizers.source import player_for

log = logging.getLogger(__name__)

UNHEARD = 0.5
"""Seconds between frames for a page that has not said that it is there.

VS Code and Colab hand a page's messages to the kernel when the cell has run. What is shown while it runs must come unasked,
and whole, since nobody knows from when on it is seen.
"""


class View(Pictured, anywidget.AnyWidget):
    """Figures of one log, with or without a transport. Subclasses name the figures.

    Args:
        source: an LLM, an Engine, an EventLog, or the path of a saved log.

    Raises:
        RefimplError: the source has no log.

    """

    figures: Sequence[Figure] = ()
    with_transport = True
    shown = traitlets.List(traitlets.List(traitlets.Unicode())).tag(sync=True)
    """[name, title, question] of each figure."""
    heading = traitlets.Unicode("").tag(sync=True)
    transport_shown = traitlets.Bool(True).tag(sync=True)
    _esm = _css = ""
    _stop_listening: Callable[[], None] = staticmethod(lambda: None)
    """A view whose source is refused is closed too."""

    def __init_subclass__(cls, **options: Any) -> None:
        if "figures" in cls.__dict__:  # traitlets makes a further subclass for each widget
            names = tuple(figure.name for figure in cls.figures)
            cls._esm, cls._css = module(names), style(names)
        super().__init_subclass__(**options)

    def __init__(self, source: Any, **options: Any) -> None:
        self.player: Player = player_for(source)
        self._sender = Sender(self.figures)
        self._sending = threading.Lock()
        self._wanted_whole = True
        self._displayed, self._sent_unheard = False, 0.0
        super().__init__(
            shown=[[figure.name, figure.title, figure.question] for figure in self.figures],
            heading=heading(self.player.history.config),
            transport_shown=self.with_transport,
            **options,
        )
        _answer_where_asked(self.comm)
        self.on_msg(self._on_message)
        self._stop_listening = self.player.listen(self._draw)

    # ------------------------------------------------------------------ to the browser

    def _draw(self) -> None:
        """Send what changed, if a browser said that it is there; all of it, now and then, if one may be there."""
        if not self._wanted_whole:
            self._send_frame(whole=False)
        elif self._displayed and time.monotonic() - self._sent_unheard >= UNHEARD:
            self._sent_unheard = time.monotonic()
            self._send_frame(whole=True)

    def _send_frame(self, whole: bool) -> None:
        with self._sending:  # differences must arrive in the order in which they were taken
            with self.player.locked():
                message, buffers = self._sender.frame(self.player, whole)
            self.send(message, buffers=buffers)

    # ------------------------------------------------------------------ from the browser

    def _on_message(self, _widget: Any, message: Any, _buffers: Any) -> None:
        """A button, a key, a click. What a browser sends is not trusted: anything else is ignored."""
        kind = message.get("type") if isinstance(message, dict) else None
        action = _ACTIONS.get(kind) if isinstance(kind, str) else None
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

    def _width(self, message: dict[str, Any]) -> None:
        """A browser has so much room: a figure may show more, or must show less."""
        width = max(1, min(int(message["width"]), WIDTH))
        if width != self._sender.width:
            self._sender.width = width
            self._draw()

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
        engine.step_by_hand()
        self.player.go_live()

    def _hold(self, message: dict[str, Any]) -> None:
        """Hold the engine before its next step, or let it go."""
        engine = self.player.engine
        if engine is None:
            raise RefimplError("this is a saved log: no engine runs behind it")
        (engine.gate.close if message["hold"] else engine.gate.open)()
        self.player.go_live()

    def _pin(self, message: dict[str, Any]) -> None:
        request = message["request"]
        if request is None or isinstance(request, str):
            self.player.pin(request)

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
        super().close()

    # ------------------------------------------------------------------ without a browser

    def _repr_mimebundle_(self, **options: Any) -> Any:
        self._displayed = True
        return super()._repr_mimebundle_(**options)

    def _repr_html_(self) -> str:
        """The pictures at hand as HTML without a script."""
        with self.player.locked():
            self.player.catch_up()
            return static_html.figures(self.figures, self.player.history, self.player.position)

    def _repr_text(self) -> str:
        with self.player.locked():
            self.player.catch_up()
            history, position = self.player.history, self.player.position
            return "\n".join(_in_letters(figure, figure.picture(history, position)) for figure in self.figures)


_ACTIONS: dict[str, Callable[[View, dict[str, Any]], None]] = {
    "hello": View._hello,
    "seek": View._seek,
    "width": View._width,
    "step": View._step,
    "engine_step": View._engine_step,
    "hold": View._hold,
    "card": View._card,
    "play": lambda view, _: view.player.play(),
    "pause": lambda view, _: view.player.pause(),
    "live": lambda view, _: view.player.go_live(),
    "speed": lambda view, message: view.player.set_speed(float(message["speed"])),
    "pin": View._pin,
    "next_preemption": lambda view, _: _next_preemption(view),
}


def _answer_where_asked(comm: Any) -> None:
    """Have a comm's messages handled while a cell runs: in the subshell that the front end names, else between two steps.

    The mark is for :mod:`refimpl.comm_messages`. As for subshells, ipykernel 7.4 sends messages to the shell in which the
    comm was last spoken through instead. A cell opens it, and frames come from a thread that counts to that cell's shell: so
    every click would wait until the cell has run.
    """
    if comm is not None:
        comm.answers_between_steps = True
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda _data, asked: asked


def _in_letters(figure: Figure, picture: Picture) -> str:
    """A picture's caption, and under it the picture itself where letters can draw it."""
    caption = plain(picture["caption"])
    return f"{caption}\n{figure.text(picture)}".rstrip() if hasattr(figure, "text") else caption


def _next_preemption(view: View) -> None:
    if not view.player.next_preemption():
        raise RefimplError("nothing was preempted in this log")
