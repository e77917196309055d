"""The tokenizer of design.md 11: 256 bytes, then the special tokens <|r0|>, <|r1|>, ... of the recall tasks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nas.workload import BYTES, Workload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPECIAL = re.compile(r"<\|r(0|[1-9][0-9]*)\|>")


class ByteTokenizer:
    """Token ids 0..255 are the bytes of the UTF-8 text; ids from 256 on are the special tokens."""

    def __init__(self, special_tokens: int) -> None:
        self.special_tokens = special_tokens

    @classmethod
    def of(cls, workload: Workload) -> ByteTokenizer:
        """The tokenizer with as many special tokens as the workload's largest task."""
        return cls(max(task.special_tokens for task in workload.recall))

    def __len__(self) -> int:
        return BYTES + self.special_tokens

    @property
    def special(self) -> list[str]:
        return [f"<|r{index}|>" for index in range(self.special_tokens)]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; `<|r3|>` in it becomes one id. Names of special tokens that do not exist stay bytes."""
        ids: list[int] = []
        start = 0
        for match in _SPECIAL.finditer(text):
            if (index := int(match[1])) < self.special_tokens:
                ids += text[start : match.start()].encode()
                ids.append(BYTES + index)
                start = match.end()
        return ids + list(text[start:].encode())

    @staticmethod
    def encode_ordinary(text: str) -> NDArray[np.uint8]:
        """The bytes of `text`, special tokens spelled out: no document can contain a recall token."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        parts = []
        for is_byte, group in groupby(ids, key=lambda index: index < BYTES):
            run = list(group)
            if min(run) < 0 or max(run) >= len(self):
                raise ValueError(f"ids={run} holds an id outside the vocabulary; allowed: 0 to {len(self) - 1}")
            parts.append(bytes(run).decode(errors="replace") if is_byte else "".join(f"<|r{i - BYTES}|>" for i in run))
        return "".join(parts)

    def to_hugging_face(self) -> PreTrainedTokenizerFast:
        """The same mapping as a Hugging Face tokenizer, whose saved folder AutoTokenizer loads without our code.

        A byte-level BPE without merges. The recall tokens are ordinary added tokens, so `skip_special_tokens` keeps
        them in decoded answers. There is no end or padding token: every id is taken.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        model = models.BPE(vocab={char: byte for byte, char in enumerate(_byte_characters())}, merges=[])
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in self.special])
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (Radford et al., 2019): printable Latin-1
    stands for itself, the rest is numbered from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]
