"""Reading: from the bytes of a body to a request, or to a refusal that names the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from refimpl.server.errors import bad_request
from refimpl.server.exchange import Exchange

T = TypeVar("T", bound=msgspec.Struct)

UNSUPPORTED: dict[str, str] = {
    "suffix": "text between a prompt and a suffix (fill-in-the-middle) is not supported",
    "tools": "tools are not supported; ask for JSON with response_format, and call them yourself",
    "functions": "functions are not supported; ask for JSON with response_format, and call them yourself",
    "function_call": "functions are not supported",
    "chat_template": "this server renders the model's own chat template alone, since a template is a program",
    "documents": "documents are not supported; put their texts into messages",
    "modalities": "this server answers with text alone",
    "audio": "audio is not supported",
    "web_search_options": "web search is not supported",
    "prompt_embeds": "prompts are texts or token ids",
    "use_beam_search": "beam search is not served; use LLM.beam_search",
    "logits_processors": "logits processors are programs, and are not taken from clients",
    "mm_processor_kwargs": "this server reads text alone",
    "lora_request": "LoRA adapters are not supported",
    "continue_final_message": "the answer is always a new message",
    "thinking_token_budget": "thinking is not counted apart",
    "watermark": "watermarks are not supported",
}
"""Fields that would change the answer: refused unless null, false or empty."""
EMPTY: tuple[Any, ...] = (None, False, "", 0, [], {})
HARMLESS: dict[str, Any] = {"function_call": "none", "modalities": ["text"]}
LONGEST_NAME = 128
"""Characters of a field's name that a header tells: twenty of them fit what proxies take."""
_AT = re.compile(r" - at `\$\.?([^`]*)`$")


def read(exchange: Exchange, kind: type[T]) -> T:
    """The body as a request. Fields that are ignored go into the header ``X-Ignored-Fields``.

    Raises:
        ApiError: it is no JSON object, a field is of the wrong kind, or it asks for what this server has not.

    """
    try:
        request = msgspec.json.decode(exchange.body, type=kind)
        given = msgspec.json.decode(exchange.body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        message, where = str(error), _AT.search(str(error))
        field = where[1] if where else None
        plain = _AT.sub("", message)
        raise bad_request(f"{field}: {plain}" if field else plain, _top(field), "invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is no JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested deeper than this server reads", code="limit_exceeded") from None
    unknown = [name for name in given if name not in kind.__struct_fields__]
    for name in unknown:
        _check_supported(name, given[name])
    if names := [_shown(name) for name in unknown if name not in UNSUPPORTED]:
        exchange.headers["X-Ignored-Fields"] = ", ".join(names[:20])
    return request


def _shown(name: str) -> str:
    """A client's name as a header bears it: other characters than letters, digits and ``_.-~`` are percent-encoded."""
    shown = quote(name[:LONGEST_NAME], safe="", errors="surrogatepass")
    whole = name and len(name) <= LONGEST_NAME and len(shown) <= LONGEST_NAME
    return shown if whole else f"{shown[:LONGEST_NAME]}..."


def _top(field: str | None) -> str | None:
    """The field of the request that a path like ``messages[0].content`` begins with."""
    return re.split(r"[.\[]", field)[0] if field else None


def _check_supported(name: str, raw: msgspec.Raw) -> None:
    if name not in UNSUPPORTED:
        return
    value = _plain(raw)
    if value not in EMPTY and value != HARMLESS.get(name):
        raise bad_request(f"{name}: {UNSUPPORTED[name]}", name, "unsupported")


def _plain(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return ...
