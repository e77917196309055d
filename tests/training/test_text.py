import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from nas.training.data import documents, text
from nas.training.data.text import Corpus, load_corpus
from nas.workload import Text


def split(corpus: Corpus) -> tuple[set[bytes], set[bytes]]:
    train, validation = (set(bytes(part).split(b"\0")[:-1]) for part in (corpus.train, corpus.validation))
    return train, validation


def test_files_are_split_whole_and_apart(text_folder: Path, tmp_path: Path) -> None:
    train, validation = split(load_corpus(Text(source=str(text_folder), holdout=0.2), tmp_path))
    written = {path.read_bytes() for path in text_folder.iterdir()}
    assert train | validation == written
    assert not train & validation
    assert 1 <= len(validation) <= 20


def test_the_split_does_not_depend_on_names_or_on_other_files(text_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in text_folder.iterdir():
        (other / f"renamed-{path.name}").write_bytes(path.read_bytes())
    (other / "more.txt").write_text("one more file")
    _, before = split(load_corpus(Text(source=str(text_folder), holdout=0.2), tmp_path))
    _, after = split(load_corpus(Text(source=str(other), holdout=0.2), tmp_path))
    assert before == after - {b"one more file"}


@pytest.mark.parametrize("holdout", [1e-6, 1 - 1e-6])
def test_two_documents_make_two_splits(tmp_path: Path, holdout: float) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"document {name}")
    train, validation = split(load_corpus(Text(source=str(tmp_path), holdout=holdout), tmp_path / "cache"))
    assert len(train) == len(validation) == 1


def test_jsonl_and_parquet_rows_are_documents(tmp_path: Path) -> None:
    rows = [f"row {index}" for index in range(8)]
    lines = "\n".join(json.dumps({"body": row}) for row in rows[:4])
    (tmp_path / "a.jsonl").write_text(lines + "\n\n")
    pyarrow.parquet.write_table(pyarrow.table({"body": rows[4:], "other": range(4)}), tmp_path / "b.parquet")
    train, validation = split(load_corpus(Text(source=str(tmp_path), field="body"), tmp_path / "cache"))
    assert train | validation == {row.encode() for row in rows}


def test_a_hub_data_set_is_streamed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    def load_dataset(name: str, split: str, streaming: bool) -> datasets.IterableDataset:
        assert (name, split, streaming) == ("owner/name", "train", True)
        return datasets.Dataset.from_dict({"text": [f"document {i}" for i in range(50)]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(documents, "HUB_DOCUMENTS", 30)
    train, validation = split(load_corpus(Text(source="hub:owner/name"), tmp_path))
    assert len(train | validation) == 30


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.md", "text", "holds no text file"),
        ("one.txt", "text", "fewer than two different documents"),
        ("empty.txt", "", "fewer than two different documents"),
        ("bad.jsonl", "{", "bad.jsonl:1 is not JSON"),
        ("field.jsonl", '{"body": "x"}', "text.field='text' is no text in .*field.jsonl:1; its fields: body"),
    ],
)
def test_unusable_sources_are_refused_in_one_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_corpus(Text(source=str(tmp_path)), tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_missing_folders_and_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; allowed: 'python', hub:NAME"):
        load_corpus(Text(source=str(tmp_path / "none")), tmp_path)
    with pytest.raises(ValueError, match="tokenizer='bpe' is unknown; allowed: 'bytes'"):
        load_corpus(Text(tokenizer="bpe"), tmp_path)


def test_encoded_once_until_the_source_changes(tmp_path: Path) -> None:
    source, cache = tmp_path / "text", tmp_path / "cache"
    source.mkdir()
    for name in "ab":
        (source / f"{name}.txt").write_text(name * 100)

    def encoded() -> dict[str, int]:
        text._load.cache_clear()  # what a new process would see
        load_corpus(Text(source=str(source)), cache)
        return {str(path): path.stat().st_mtime_ns for path in cache.rglob("*.bin")}

    first = encoded()
    assert len(first) == 2
    assert encoded() == first
    (source / "c.txt").write_text("c" * 100)
    assert len(encoded()) == 4
    assert not [path for path in (cache / "text").iterdir() if path.name.startswith(".")]


def test_the_standard_library_is_real_text_without_tests(tmp_path: Path) -> None:
    files = documents.open_documents(Text()).files
    assert len(files) > 300
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-4:-1]) for path in files)
    corpus = load_corpus(Text(), tmp_path)
    assert len(corpus.train) > 3_000_000
    assert 0.01 < len(corpus.validation) / len(corpus.train) < 0.2
    assert corpus.train.dtype == np.uint8


def test_windows_follow_the_generator_and_validation_is_fixed(text_folder: Path, tmp_path: Path) -> None:
    corpus = load_corpus(Text(source=str(text_folder), holdout=0.2), tmp_path)
    one, same, other = (corpus.batch(4, 16, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert one.shape == (4, 17)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    held_out = corpus.validation_batch(8, 16)
    assert torch.equal(held_out, corpus.validation_batch(8, 16))
    assert all(bytes(row.tolist()) in bytes(corpus.validation) for row in held_out)
    with pytest.raises(ValueError, match="sequence_length=100000 needs 100001"):
        corpus.validation_batch(1, 100_000)
