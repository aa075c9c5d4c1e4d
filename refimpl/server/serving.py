"""Serving: from options to a server that runs until it is told to end."""

from __future__ import annotations

import dataclasses
import gc
import logging
import sys
from dataclasses import dataclass, field

from refimpl.async_llm import AsyncLLM
from refimpl.config import EngineArgs
from refimpl.errors import RefimplError
from refimpl.server.app import make_app
from refimpl.server.client import STUCK_AFTER, LocalClient
from refimpl.server.door import LOOPBACK_NAMES, DoorRules
from refimpl.server.limits import Limits
from refimpl.server.runner import Listening, Runner
from refimpl.server.service import Service

log = logging.getLogger("refimpl.server")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """All that a server is told, but for its engine."""

    listening: Listening = Listening()
    limits: Limits = field(default_factory=Limits)
    names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    stuck_after: float = STUCK_AFTER
    ui: bool = True

    def run(self, args: EngineArgs) -> None:
        """Load the model, and serve it until a signal ends this.

        Raises:
            RefimplError: the address cannot be had, or the model.

        """
        listening = self.listening
        with listening.bind() as bound:
            options = {one.name: getattr(args, one.name) for one in dataclasses.fields(args)}
            with AsyncLLM(**options) as llm:
                service = Service(LocalClient(llm, self.stuck_after), self.names, self.limits)
                app = make_app(service, self.rules())
                _warm_up(llm)
                ready = f"refimpl serves {self.names[0]} at {listening.url(bound)}/v1"
                Runner(app, service, listening, lambda: _say(ready)).run([bound])
            log.info("the server has ended")

    def rules(self) -> DoorRules:
        """Who may come in. A server for this machine alone answers to this machine's names."""
        hosts = self.hosts
        if not hosts and self.listening.host in LOOPBACK_NAMES:
            hosts = LOOPBACK_NAMES
        return DoorRules(self.api_keys, hosts, self.origins)


def _say(line: str) -> None:
    """On standard output, where nothing else is."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _warm_up(llm: AsyncLLM) -> None:
    """What the first request would wait for: transformers, which renders chats. What is there now is never garbage."""
    tokenizer = llm.get_tokenizer()
    if tokenizer.has_chat_template:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
        except RefimplError as error:
            log.warning("the model's chat template does not work: %s", error)
    gc.collect()
    gc.freeze()
