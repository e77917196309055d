"""A sample of a workload's data that a person can read: `nas data show`."""

from __future__ import annotations

import torch

from nas.architecture import derive_seed
from nas.registry import did_you_mean
from nas.tasks import RecallTask
from nas.training.data.recall import generator_of
from nas.training.data.recall.mqar import IGNORED
from nas.training.data.text import load_corpus
from nas.training.data.tokenizer import ByteTokenizer
from nas.workload import Workload


def sample_text(name: str, workload: Workload, seed: int, length: int = 512) -> str:
    """One sample of "text" (a window of `length` tokens) or of a recall task, with what is in it and the chance level.

    Raises:
        ValueError: the workload has no data of that name.
    """
    tasks = {task.task: task for task in workload.recall}
    if name in tasks:
        return _recall(tasks[name], ByteTokenizer.of(workload), seed)
    if name == "text":
        return _text(workload, seed, length)
    raise ValueError(f"data {name!r} is unknown; {did_you_mean(name, ('text', *tasks))}")


def _recall(task: RecallTask, tokenizer: ByteTokenizer, seed: int) -> str:
    size = task.pairs[len(task.pairs) // 2]
    generator = torch.Generator().manual_seed(derive_seed(seed))
    length = task.min_length
    made = generator_of(task.task)(task, size, 1, length, generator, repeat=False)
    input_ids, labels = (x[0].tolist() for x in made)
    tokens = [tokenizer.decode([token]) for token in input_ids]
    asked = [position for position, label in enumerate(labels) if label != IGNORED]
    shown = ", ".join(f"{tokens[i]} -> {tokens[i + 1]}" for i in range(0, task.shown(size), 2))
    questions = ", ".join(f"{tokens[i]} -> [{tokens[i + 1]}]" for i in asked)
    answers = {position + 1 for position in asked}
    marked = "".join(f"[{token}]" if i in answers else token for i, token in enumerate(tokens))
    alphabet = (f"{kind} {tokenizer.special[a]} to {tokenizer.special[b]}" for kind, (a, b) in task.alphabet.items())
    return "\n".join(
        (
            f"{task.task}: {size} pairs; trained on {_list(task.pairs)}, evaluated on {_list(task.evaluation_pairs)}",
            ", ".join(alphabet),
            f"chance: 1 of {task.answers} answers = {1 / task.answers:.4f}",
            f"shown: {shown}",
            f"asked: {questions}",
            f"the sequence, {length} tokens, answers in brackets; in training queries replace the newlines:",
            marked.replace("\n", "\\n"),
        )
    )


def _text(workload: Workload, seed: int, length: int) -> str:
    text = workload.text
    corpus = load_corpus(text)
    length = min(length, len(corpus.train) - 1)
    window = corpus.batch(1, length, torch.Generator().manual_seed(derive_seed(seed)))[0, :length]
    return "\n".join(
        (
            f"text: source {text.source}, tokenizer {text.tokenizer}, split by document",
            f"{len(corpus.train):,} training tokens, {len(corpus.validation):,} held out",
            f"a training window of {length} tokens:",
            ByteTokenizer.of(workload).decode(window.tolist()),
        )
    )


def _list(sizes: tuple[int, ...]) -> str:
    return "/".join(map(str, sizes))
