"""The OpenAI-compatible server: HTTP in front of :class:`refimpl.AsyncLLM`. Needs the extra ``server``.

::

    uvicorn ─► door (request id, limits, key, log) ─► app (routes) ─► completions, chat ─► EngineClient ─► AsyncLLM
                                                                           │
    client ◄── one JSON body, or server-sent events (sse) ◄── choices, logprobs, usage

Nothing here touches the engine but through :class:`refimpl.server.client.EngineClient`.
"""
