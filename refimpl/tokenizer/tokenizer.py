"""Tokenizer: a Hugging Face tokenizer (the tokenizers library), with a chat template that transformers renders.

transformers is imported only where a checkpoint's tokenizer is read or a chat template is rendered, so the tiny model is
ready without it.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from refimpl.errors import CheckpointError, PromptError, RequestError

Message = dict[str, Any]
"""One message of a chat: at least ``role`` and ``content``."""


class Tokenizer:
    """Encodes as the tokenizer's own configuration says: special tokens are added once, where it adds them."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        renderer: Any = None,
    ) -> None:
        # A tokenizer.json may carry the truncation that its model was trained with; a prompt is never cut.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._chat_template = chat_template
        self._special_tokens = special_tokens or {}
        self._renderer = renderer
        self.token_text = functools.lru_cache(maxsize=65_536)(self._token_text)
        self.token_bytes = functools.lru_cache(maxsize=None)(self._token_bytes)  # at most one entry an id
        self.whole_text = functools.lru_cache(maxsize=None)(self._whole_text)

    @classmethod
    def from_pretrained(cls, folder: Path, gguf_file: str | None = None) -> Tokenizer:
        """Read a checkpoint's tokenizer, from its folder or from inside a GGUF file.

        transformers reads it, except where its generic class would take tokenizer.json as it is: then so do we, and save
        the seconds of importing it.

        Raises:
            CheckpointError: the files are missing or unreadable.

        """
        where = folder / gguf_file if gguf_file else folder
        try:
            if gguf_file is None and (settings := _generic_settings(folder)) is not None:
                backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
                special_tokens = _special_tokens(settings)
                added = {token.content for token in backend.get_added_tokens_decoder().values()}
                if added.issuperset(special_tokens.values()):  # else transformers adds them
                    return cls(backend, _chat_template(folder, settings), special_tokens)
            loaded = _read_with_transformers(folder, gguf_file)
            return cls(loaded.backend_tokenizer, chat_template=loaded.chat_template, renderer=loaded)
        except Exception as error:  # the parsers raise whatever they like
            raise CheckpointError(
                f"the tokenizer of {where} cannot be read ({type(error).__name__}: {_first_line(error)}); "
                + ("use another GGUF file" if gguf_file else "a checkpoint folder needs a tokenizer.json")
            ) from error

    def save(self, folder: Path) -> None:
        """Write the files that :meth:`from_pretrained` reads."""
        if self._renderer is not None:
            self._renderer.save_pretrained(str(folder))
            return
        self.backend.save(str(folder / "tokenizer.json"))
        template = {} if self._chat_template is None else {"chat_template": self._chat_template}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | self._special_tokens | template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens counted."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out when it skips special tokens."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @functools.cached_property
    def is_byte_level(self) -> bool:
        """Whether the text of tokens is their bytes, joined (GPT-2's decoder); :meth:`token_bytes` gives them."""
        return isinstance(self.backend.decoder, tokenizers.decoders.ByteLevel)

    @functools.cached_property
    def joins_bytes(self) -> bool:
        """Whether decoding joins the bytes of tokens somewhere, so that a character may stand over several tokens."""
        decoder = self.backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @functools.cached_property
    def byte_token_ids(self) -> frozenset[int]:
        """The tokens that stand for a byte where there is none for a character (``<0x00>`` to ``<0xFF>``)."""
        ids = (self.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token_id for token_id in ids if token_id is not None)

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`apply_chat_template` can work."""
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            PromptError: it is no text, or holds half a surrogate pair, which stands for no character.

        """
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError) as error:
            shown = repr(text) if len(repr(text)) <= 60 else f"{repr(text)[:60]}…"
            raise PromptError(f"{shown} cannot be encoded: it must be a str of valid Unicode") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Ids that the tokenizer does not know have no text."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _token_text(self, token_id: int) -> str:
        """One token on its own, for people to look at: special tokens by name, parts of a character as U+FFFD."""
        return str(self.backend.decode([token_id], skip_special_tokens=False))

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes of a byte-level token; none for an id that is not known. An added token may be plain text."""
        token = self.backend.id_to_token(token_id) or ""
        values = [_byte_values().get(char) for char in token]
        return token.encode() if None in values else bytes(value for value in values if value is not None)

    def _whole_text(self, token_id: int) -> str | None:
        """The text of a byte-level token whose bytes are whole characters; None of others."""
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat, ready for the assistant's turn. The template writes all special tokens itself.

        Rendered by transformers, in its sandbox. ``options`` are variables that the template may ask for
        (``enable_thinking``).

        Raises:
            RequestError: the model has no chat template, or the messages do not fit it; or an option is no such variable.

        """
        if self._chat_template is None:
            raise RequestError("this model has no chat template; use generate() with a prompt of your own")
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or "role" not in message or "content" not in message:
                raise RequestError(f"message {number} of the chat is {message!r}; it must be a dict with role and content")
        if not messages:
            raise RequestError("the chat has no messages; give at least one with role and content")
        if self._renderer is None:
            from transformers import PreTrainedTokenizerFast

            self._renderer = PreTrainedTokenizerFast(
                tokenizer_object=self.backend, chat_template=self._chat_template, **self._special_tokens
            )
        taken = inspect.signature(self._renderer.apply_chat_template).parameters if options else {}
        for name in options or {}:
            if name in taken or name.endswith("_token") or not name.isidentifier():
                raise RequestError(f"{name!r} is no variable of the chat template; give others, as enable_thinking")
        try:
            text = self._renderer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **(options or {})
            )
        except Exception as error:  # a template may raise whatever it likes
            raise RequestError(f"the chat template refused the messages: {_first_line(error)}") from error
        return self.encode(text, add_special_tokens=False)


GENERIC_CLASSES = {"TokenizersBackend", "PreTrainedTokenizerFast"}
"""transformers' classes that add nothing to what tokenizer.json says."""
HARMLESS_SETTINGS = {
    "tokenizer_class",
    "backend",
    "is_local",
    "local_files_only",
    "model_max_length",
    "model_input_names",
    "padding_side",
    "truncation_side",
    "clean_up_tokenization_spaces",
    "chat_template",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "add_bos_token",  # these two count only without a tokenizer.json: its post-processor says what is added
    "add_eos_token",
}
"""Keys of tokenizer_config.json that do not change how a text is encoded."""
LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")
"""They can add to tokenizer.json and tokenizer_config.json; transformers knows how."""


def _generic_settings(folder: Path) -> dict[str, Any] | None:
    """tokenizer_config.json, if nothing in it, or beside it, changes how tokenizer.json encodes."""
    config, tokenizer = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not config.is_file() or not tokenizer.is_file() or any((folder / name).exists() for name in LEGACY_FILES):
        return None
    settings: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") not in GENERIC_CLASSES or settings.keys() - HARMLESS_SETTINGS:
        return None
    return settings if isinstance(settings.get("chat_template", ""), str) else None  # else there are several, by name


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """The special tokens by role; each is a string, or an object with its content."""
    tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")


def _read_with_transformers(folder: Path, gguf_file: str | None) -> Any:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        source = {} if gguf_file is None else {"gguf_file": gguf_file}
        # Without trust_remote_code=False transformers asks on the terminal whether to run a checkpoint's own code.
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **source)
    finally:
        logging.set_verbosity(level)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BYTE_VOCABULARY = 256 + len(SPECIAL_TOKENS)
"""Tokens that a byte tokenizer needs at least."""


def stand_in_tokenizer(vocab_size: int) -> Tokenizer:
    """For a model that has none: bytes where the vocabulary has room for them, else letters."""
    return byte_tokenizer(vocab_size) if vocab_size >= BYTE_VOCABULARY else letter_tokenizer(vocab_size)


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A token for each byte (ids 0 to 255), then ``<|end|>`` (256) and the chat roles, then fillers up to ``vocab_size``.

    No text becomes a filler, but a filler has a text, its number: what random weights draw can be streamed token by token.
    """
    fillers = [f"<{i}>" for i in range(BYTE_VOCABULARY, vocab_size)]
    words = [*_byte_alphabet(), *SPECIAL_TOKENS, *fillers]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([*SPECIAL_TOKENS])
    return Tokenizer(backend, chat_template=CHAT_TEMPLATE, special_tokens={"eos_token": SPECIAL_TOKENS[0]})


def letter_tokenizer(vocab_size: int) -> Tokenizer:
    """For vocabularies too small for bytes: the words ``a``, ``b``, … stand for ids 0, 1, …, separated by spaces."""
    words = {chr(ord("a") + i) if vocab_size <= 26 else f"t{i}": i for i in range(vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=words, unk_token=next(iter(words))))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend)


@functools.cache
def _byte_values() -> dict[str, int]:
    """The byte that each character of :func:`_byte_alphabet` stands for."""
    return {char: byte for byte, char in enumerate(_byte_alphabet())}


def _byte_alphabet() -> list[str]:
    """The printable character that the byte-level pre-tokenizer writes for each byte, by byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [chars[byte] for byte in range(256)]
