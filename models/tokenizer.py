"""A small vocabulary of our own (512 tokens) that spells every UTF-8 text, and a ChatML-like template.

It is llama.cpp's `llama` (SentencePiece) kind: 256 byte tokens catch whatever the pieces do not cover.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf import GGUFWriter, TokenType

BOS, EOS, UNKNOWN = 1, 2, 0
VOCABULARY_SIZE = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
_WORDS = """
    the and ing ion of to in is it that for you was with on as are this but his they at be from have or by one
    had not what all were when we there can an your which their said if do will each about how up out them
    then she many some so these would other into has more her two like him see time could no make than first
"""


@dataclass(frozen=True)
class Token:
    text: str
    score: float
    kind: TokenType


def _merges() -> list[str]:
    """Pieces of two characters and more, each reachable by adding one character to a shorter piece."""
    seen: dict[str, None] = {}
    for word in _WORDS.split():
        for start in ("\u2581" + word, word):
            for end in range(2, len(start) + 1):
                seen.setdefault(start[:end])
    return list(seen)


def vocabulary() -> list[Token]:
    """The 512 tokens in id order: special, bytes 0..255, single characters, merged pieces."""
    tokens = [Token(text, 0.0, TokenType.CONTROL) for text in _SPECIAL]
    tokens[UNKNOWN] = Token(_SPECIAL[UNKNOWN], 0.0, TokenType.UNKNOWN)
    tokens += [Token(f"<0x{b:02X}>", 0.0, TokenType.BYTE) for b in range(256)]
    pieces = ["\u2581", *map(chr, range(0x21, 0x7F))]
    pieces += _merges()
    pieces = pieces[: VOCABULARY_SIZE - len(tokens)]
    tokens += [Token(p, -float(rank), TokenType.NORMAL) for rank, p in enumerate(pieces)]
    if len(tokens) != VOCABULARY_SIZE:
        raise AssertionError(f"the vocabulary has {len(tokens)} tokens, not {VOCABULARY_SIZE}")
    return tokens


def add_to(writer: GGUFWriter) -> None:
    """Write the tokenizer's keys and the chat template into a GGUF header."""
    tokens = vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([t.text.encode() for t in tokens])
    writer.add_token_scores([t.score for t in tokens])
    writer.add_token_types([int(t.kind) for t in tokens])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)
