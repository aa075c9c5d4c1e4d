"""What a server shows of its engines: figures at /metrics, pictures at /ui."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI, Response

from refimpl.server.metrics import ServerMetrics
from refimpl.server.ui import make_router

if TYPE_CHECKING:
    from refimpl.engine import Engine


def observe(
    app: FastAPI,
    engines: Sequence[Engine],
    model_name: str,
    *,
    api_keys: Sequence[str] = (),
    ui: bool = True,
    vllm_names: bool = False,
    ending: Callable[[], bool] = lambda: False,
) -> ServerMetrics:
    """Add the routes to an app. Close what is returned when the app ends.

    Args:
        app: the app.
        engines: the replicas, in their order; in metrics and addresses they go by their number.
        model_name: the name that the model is served by.
        api_keys: whoever has one may read texts at /ui (:func:`refimpl.server.ui.may_read`). The door must let /ui through
            without a key, since a browser sends none with an address.
        ui: whether there is a page /ui.
        vllm_names: expose metrics under vLLM's names too.
        ending: whether the server is about to end; then the streams of /ui end, which nobody would wait for.

    Raises:
        RefimplError: ``ui`` is asked for, but an engine keeps no log.

    """
    metrics = ServerMetrics(model_name, vllm_names)
    for number, engine in enumerate(engines):
        metrics.watch(engine, str(number))

    @app.get("/metrics", summary="Figures of the engine, for Prometheus.")
    def render() -> Response:
        return Response(metrics.render(), media_type=metrics.content_type)

    if ui:
        app.include_router(make_router(engines, api_keys, ending))
    return metrics
