"""spice-tiny's own tokenizer: byte-level BPE with GPT-2's splitting, digits apart, a ChatML-like template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = range(3)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Tokens:
    """The vocabulary: special tokens, 256 bytes, merged pieces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, path: Path) -> Tokens:
        return cls(Tokenizer.from_str(path.read_text(encoding="utf-8")))

    def save(self, path: Path) -> None:
        path.write_text(self.tokenizer.to_str(), encoding="utf-8")

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> Tokens:
        """Learn `size` tokens from texts. Digits are kept apart while learning, so no merge contains one."""
        tokenizer = Tokenizer(models.BPE())
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), gpt2]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.pre_tokenizer = gpt2
        return cls(tokenizer)

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self.tokenizer.encode_batch(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def add_to(self, writer: GGUFWriter) -> None:
        """Write the tokenizer's keys and the chat template into a GGUF header."""
        model = json.loads(self.tokenizer.to_str())["model"]
        pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        kinds = [TokenType.CONTROL if p in SPECIAL else TokenType.NORMAL for p in pieces]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(pieces)
        writer.add_token_types([int(k) for k in kinds])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(END_OF_TEXT)
        writer.add_eos_token_id(IM_END)
        writer.add_eot_token_id(IM_END)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)
