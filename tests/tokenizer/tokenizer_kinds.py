"""Texts and small tokenizers of the kinds that checkpoints have."""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from refimpl.tokenizer import byte_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces and a trailing one ",
    "line one\nline two\r\n\n\tindented",
    "def f(x: int) -> str:\n    return f'{x!r}'  # naïve\n",
    "你好，世界。今天天气怎么样？",
    "こんにちは ประเทศไทย مرحبا हिन्दी",
    "emoji 🙂👩‍👩‍👧‍👦🇩🇪 and é as e\u0301",
    "1234567890 3.14159 1,000,000",
    "a<|im_start|>user\nhi<|im_end|>b",
    "<s>not</s> <unk> <|end|><|user|>",
    "\u0000\u0001\ufffd\u200b",
    "x" * 500,
    "SELECT * FROM \"t\" WHERE a <> 'b';",
    "https://example.org/?q=a%20b&c=d#e",
]


def byte_level(tokens=("<s>", "</s>", "<unk>")):
    """GPT-2's and Llama 3's kind, with a few merges."""
    backend = byte_tokenizer(260).backend
    vocab = {token: i for token, i in backend.get_vocab().items() if i < 256}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("Ġ", "a"), ("i", "n")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(tokens))
    return made


def with_bos(backend):
    """A post-processor that adds <s>, as Llama 3's has."""
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def sentencepiece_like():
    """Llama 2's kind: spaces as ▁, bytes where there is no token."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for char in "▁abcdefghijklmnopqrstuvwxyz.,!?é":
        vocab[char] = len(vocab)
    merges = [("▁", "a"), ("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made
