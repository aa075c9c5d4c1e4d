"""A server that speaks OpenAI's protocol and says what a test told it to."""

import asyncio
import json

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse


class Scripted:
    """``script(number, body)`` gives the actions that answer a request, in order:

    ("text", t) · ("role",) · ("finish", reason) · ("usage", prompt, completion) · ("done",) · ("raw", bytes) ·
    ("wait", seconds) · ("cut",) closes the connection in mid-stream · ("status", code, text) instead of a stream.
    """

    def __init__(self, script):
        self.script = script
        self.bodies, self.keys, self.paths = [], [], []
        self.in_flight = self.most_in_flight = 0
        self.app = FastAPI()
        self.app.get("/v1/models")(lambda: {"data": [{"id": "scripted"}]})
        self.app.post("/v1/completions")(self.answer)
        self.app.post("/v1/chat/completions")(self.answer)

    async def answer(self, request: Request):
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.paths.append(request.url.path)
        actions = list(self.script(number, body))
        if actions[0][0] == "status":
            return JSONResponse({"error": {"message": actions[0][2]}}, actions[0][1])
        return StreamingResponse(self.stream(actions, "chat" in request.url.path), media_type="text/event-stream")

    async def stream(self, actions, chat):
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for kind, *given in actions:
                if kind == "wait":
                    await asyncio.sleep(given[0])
                elif kind == "cut":
                    raise ConnectionError("cut, as asked for")
                elif kind == "raw":
                    yield given[0]
                else:
                    yield b"data: " + (b"[DONE]" if kind == "done" else event(kind, given, chat)) + b"\n\n"
        finally:
            self.in_flight -= 1


def event(kind, given, chat):
    if kind == "usage":
        return json.dumps(
            {"choices": [], "usage": dict(zip(("prompt_tokens", "completion_tokens"), given, strict=True))}
        ).encode()
    choice = {"index": 0, "finish_reason": given[0] if kind == "finish" else None}
    text = given[0] if kind == "text" else ""
    if chat:
        choice["delta"] = {"role": "assistant", "content": ""} if kind == "role" else {"content": text}
    else:
        choice["text"] = text
    return json.dumps({"choices": [choice]}).encode()


def words(count, completion=None):
    """An answer of so many pieces, with a usage."""
    yield from [("text", "a ")] * count
    yield from [("finish", "length"), ("usage", 7, count if completion is None else completion), ("done",)]
