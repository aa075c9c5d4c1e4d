"""Serving: from options to a server that runs until it is told to end."""

from __future__ import annotations

import dataclasses
import gc
import logging
import sys
from dataclasses import dataclass

from fastapi import FastAPI

from refimpl.config import EngineArgs
from refimpl.errors import RefimplError
from refimpl.server.app import make_app
from refimpl.server.client import LocalClient
from refimpl.server.door import LOOPBACK_NAMES, DoorRules
from refimpl.server.limits import Limits
from refimpl.server.metrics import ServerMetrics
from refimpl.server.observing import observe
from refimpl.server.router import Replicas
from refimpl.server.runner import Listening, Runner
from refimpl.server.serve_options import ServeOptions
from refimpl.server.service import Service

log = logging.getLogger("refimpl.server")


@dataclass(frozen=True)
class Serving:
    """All that a server is told, but for its engine."""

    options: ServeOptions
    limits: Limits
    names: tuple[str, ...]

    @property
    def listening(self) -> Listening:
        """Where and how it listens."""
        options = self.options
        return Listening(options.host, options.port, options.ssl_certfile, options.ssl_keyfile, options.shutdown_timeout)

    def run(self, args: EngineArgs) -> None:
        """Load the model, and serve it until a signal ends this.

        Raises:
            RefimplError: the address cannot be had, the certificate, or the model.

        """
        listening = self.listening
        listening.check_certificate()
        with listening.bind() as bound:
            options = {one.name: getattr(args, one.name) for one in dataclasses.fields(args)}
            with Replicas(**options, data_parallel_size=self.options.data_parallel_size) as llm:
                service = Service(LocalClient(llm, llm.engines, self.options.stuck_after), self.names, self.limits)
                app = make_app(service, self.rules())
                metrics = self.observe(app, service, llm)
                _warm_up(llm)
                ready = f"refimpl serves {self.names[0]} at {listening.url(bound)}/v1"
                Runner(app, service, listening, lambda: _say(ready)).run([bound])
                metrics.close()
            log.info("the server has ended")

    def observe(self, app: FastAPI, service: Service, llm: Replicas) -> ServerMetrics:
        """Show figures and pictures of the engines. Pictures are made of their logs, where they keep one."""
        ui = self.options.ui and llm.engine.args.event_log_size > 0
        if self.options.ui and not ui:
            log.info("there is no /ui: with --event-log-size 0 nothing is recorded")
        return observe(
            app,
            llm.engines,
            self.names[0],
            api_keys=self.options.api_key or (),
            ui=ui,
            vllm_names=self.options.vllm_metrics,
            ending=lambda: service.in_flight.closed,
        )

    def rules(self) -> DoorRules:
        """Who may come in. A server for this machine alone answers to this machine's names."""
        options = self.options
        own = LOOPBACK_NAMES if options.host in LOOPBACK_NAMES else ()
        hosts = tuple(options.allowed_hosts or own)
        return DoorRules(tuple(options.api_key or ()), hosts, tuple(options.allowed_origins or ()))


def _say(line: str) -> None:
    """On standard output, where nothing else is."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _warm_up(llm: Replicas) -> None:
    """What the first request would wait for: transformers, which renders chats. What is there now is never garbage."""
    tokenizer = llm.get_tokenizer()
    if tokenizer.has_chat_template:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
        except RefimplError as error:
            log.warning("the model's chat template does not work: %s", error)
    gc.collect()
    gc.freeze()
