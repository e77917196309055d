"""Documents of a text source: the standard library, local .txt, .jsonl and .parquet files, or a data set of the hub."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nas.workload import Text

SUFFIXES = (".txt", ".jsonl", ".parquet")
HUB_DOCUMENTS = 20_000
"""Documents streamed from a hub data set: some 80 MB of web text, more than any proxy reads."""
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Documents:
    """A re-iterable source. `fingerprint` changes with the source's files; iterating yields non-empty documents, a
    file each for .py and .txt, a row each for .jsonl, .parquet and the hub."""

    text: Text
    fingerprint: tuple[str, ...]
    files: tuple[Path, ...] = ()

    def __iter__(self) -> Iterator[str]:
        rows = self._hub() if _is_hub(self.text) else self._local()
        return (document for document in rows if document.strip())

    def _local(self) -> Iterator[str]:
        for path in self.files:
            if path.suffix == ".jsonl":
                yield from _jsonl(path, self.text.field)
            elif path.suffix == ".parquet":
                yield from _parquet(path, self.text.field)
            else:
                yield path.read_text(encoding="utf-8", errors="replace")

    def _hub(self) -> Iterator[str]:
        from datasets import load_dataset

        name = self.text.source.removeprefix("hub:")
        for row in load_dataset(name, split="train", streaming=True).take(HUB_DOCUMENTS):
            yield _text_field(row, self.text.field, self.text.source)


def open_documents(text: Text) -> Documents:
    """The documents of `text.source`, in an order that only depends on the files' names.

    Raises:
        ValueError: the source does not exist or holds no file that we read.
    """
    if _is_hub(text):
        return Documents(text, (text.source, str(HUB_DOCUMENTS)))
    files = _standard_library() if text.source == "python" else _local_files(text.source)
    stats = [(path, path.stat()) for path in files]
    fingerprint = tuple(f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats)
    return Documents(text, fingerprint, tuple(files))


def _is_hub(text: Text) -> bool:
    return text.source.startswith("hub:")


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if not _SKIPPED.intersection(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _local_files(source: str) -> list[Path]:
    root = Path(source).expanduser()
    if root.is_file() and root.suffix in SUFFIXES:
        return [root]
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not files:
        found = "holds no text file" if root.is_dir() else "is no such file" if root.is_file() else "does not exist"
        raise ValueError(
            f"text.source={source!r} {found}; allowed: 'python', hub:NAME, or a file or folder of {', '.join(SUFFIXES)}"
        )
    return files


def _jsonl(path: Path, field: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number} is not JSON: {error.msg}") from error
            yield _text_field(row, field, f"{path}:{number}")


def _parquet(path: Path, field: str) -> Iterator[str]:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    if field not in file.schema_arrow.names:
        raise ValueError(f"text.field={field!r} is no column of {path}; allowed: {', '.join(file.schema_arrow.names)}")
    for batch in file.iter_batches(columns=[field]):
        yield from (str(value) for value in batch.column(0).to_pylist() if value is not None)


def _text_field(row: object, field: str, place: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        names = ", ".join(row) if isinstance(row, dict) else "none, the row is no object"
        raise ValueError(f"text.field={field!r} is no text in {place}; its fields: {names}")
    return str(row[field])
