"""Real text as one array of token ids per split, encoded once and cached; batches are windows of it.

Documents are joined by one NUL byte. A document is held out as a whole, by the SHA-256 of its content, so equal
documents never stand on both sides. Windows may run over a document's end.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import platformdirs
import torch
from numpy.typing import NDArray
from torch import Tensor

from nas.training.data.documents import Documents, open_documents
from nas.training.data.tokenizer import ByteTokenizer
from nas.workload import Text

Tokens = NDArray[np.uint8]
SEPARATOR = b"\0"
_FORMAT = "1"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of both splits, memory-mapped: processes of one machine share their pages."""

    train: Tokens
    validation: Tokens

    def batch(self, sequences: int, length: int, generator: torch.Generator) -> Tensor:
        """[sequences, length + 1] ids: uniformly drawn windows of the training split.

        Raises:
            ValueError: the split is shorter than one window.
        """
        last = _last_start(self.train, length, "training")
        starts = torch.randint(last + 1, (sequences,), generator=generator)
        return _windows(self.train, starts, length)

    def validation_batch(self, sequences: int, length: int) -> Tensor:
        """[sequences, length + 1] ids: windows spread evenly over the held-out split, always the same.

        Raises:
            ValueError: the split is shorter than one window.
        """
        last = _last_start(self.validation, length, "held-out")
        return _windows(self.validation, torch.linspace(0, last, sequences, dtype=torch.float64).long(), length)


def _last_start(tokens: Tokens, length: int, split: str) -> int:
    if len(tokens) <= length:
        raise ValueError(f"the {split} text has {len(tokens)} tokens; sequence_length={length} needs {length + 1}")
    return len(tokens) - length - 1


def _windows(tokens: Tokens, starts: Tensor, length: int) -> Tensor:
    return torch.from_numpy(tokens[starts.numpy()[:, None] + np.arange(length + 1)].astype(np.int64))


def cache_folder() -> Path:
    """`NAS_CACHE_DIR`, or the user's cache folder."""
    return Path(os.environ.get("NAS_CACHE_DIR") or platformdirs.user_cache_path("nas"))


def load_corpus(text: Text, folder: Path | None = None) -> Corpus:
    """The encoded text, from the cache where it holds this very source (names, sizes and times of its files).

    Args:
        folder: where encoded texts are kept; `cache_folder()` by default.

    Raises:
        ValueError: no usable documents, fewer than two different ones, or a tokenizer that is not there.
    """
    return _load(text, folder or cache_folder())


@cache
def _load(text: Text, folder: Path) -> Corpus:
    if text.tokenizer != "bytes":
        raise ValueError(f"text.tokenizer={text.tokenizer!r} is unknown; allowed: 'bytes'")
    documents = open_documents(text)
    key = hashlib.sha256(repr((_FORMAT, text.canonical_json(), documents.fingerprint)).encode()).hexdigest()[:24]
    target = folder / "text" / key
    if not target.is_dir():
        _encode(documents, target)
    return Corpus(*(np.memmap(target / name, dtype=np.uint8, mode="r") for name in ("train.bin", "validation.bin")))


def _encode(documents: Documents, target: Path) -> None:
    """Writes both splits beside `target` and renames the folder; of several writers the first one wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        wanted = documents.text.holdout
        low, high = _write(documents, wanted, partial)
        if low >= high:
            raise ValueError(
                f"text.source={documents.text.source!r} holds fewer than two different documents; the held-out split "
                "is made of whole documents, so at least 2 are needed (a .txt file is one, a .jsonl line is one)"
            )
        # A small source may leave one side empty: then its first or last document by hash goes over.
        threshold = min(max(wanted, math.nextafter(low, 1)), high)
        if threshold != wanted:
            _write(documents, threshold, partial)
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(documents: Iterable[str], threshold: float, folder: Path) -> tuple[float, float]:
    """Writes the documents whose hash lies below `threshold` to validation.bin, the others to train.bin.

    Returns:
        The lowest and the highest hash seen, as fractions in [0, 1); (1, 0) without documents.
    """
    low, high = 1.0, 0.0
    with (folder / "train.bin").open("wb") as train, (folder / "validation.bin").open("wb") as validation:
        for document in documents:
            content = ByteTokenizer.encode_ordinary(document).tobytes()
            fraction = (int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 11) / 2**53
            low, high = min(low, fraction), max(high, fraction)
            (validation if fraction < threshold else train).write(content + SEPARATOR)
    return low, high
