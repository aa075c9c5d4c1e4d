"""Text to token ids and back."""

from refimpl.tokenizer.detokenizer import Detokenizer, make_detokenizer
from refimpl.tokenizer.tokenizer import Tokenizer, byte_tokenizer, letter_tokenizer

__all__ = ["Detokenizer", "Tokenizer", "byte_tokenizer", "letter_tokenizer", "make_detokenizer"]
