"""Batches of a workload: text windows and recall sequences in the proportions it gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nas.architecture import derive_seed
from nas.tasks import RecallTask
from nas.training.data.recall import generator_of
from nas.training.data.recall.mqar import IGNORED
from nas.training.data.text import Corpus, load_corpus
from nas.workload import Workload

# The first part of every seed: no training batch can draw what an evaluation draws.
_TRAINING, _EVALUATION = 0, 1


@dataclass(frozen=True, eq=False)
class Batch:
    """input_ids and labels, int64 [B, T]; labels[b, t] is the target of the prediction made at position t, or -100.

    `weights`, float32 [B, T], says what each labelled position counts in the loss: sources are averaged each over
    its own positions and combined by the workload's weights. They sum to 1 and are 0 where there is no label.
    """

    input_ids: Tensor
    labels: Tensor
    weights: Tensor


class Mix:
    """The training batches and the fixed evaluation batches of one workload at one sequence length."""

    def __init__(
        self,
        workload: Workload,
        batch_size: int,
        length: int,
        seed: int,
        device: torch.device | str = "cpu",
        cache: Path | None = None,
    ) -> None:
        self.workload = workload
        self.length = length
        self.seed = seed
        self.device = torch.device(device)
        self.counts = workload.batch_counts(batch_size)
        self.corpus: Corpus | None = load_corpus(workload.text, cache) if workload.text.weight else None

    def batch(self, step: int) -> Batch:
        """The training batch of a step: [B, T], a pure function of (seed, step)."""
        parts: list[tuple[float, Tensor, Tensor]] = []
        if self.corpus and self.counts["text"]:
            windows = self.corpus.batch(self.counts["text"], self.length, _generator("cpu", _TRAINING, self.seed, step))
            parts.append((self.workload.text.weight, *_shift(windows.to(self.device))))
        for index, task in enumerate(self.workload.recall, start=1):
            if self.counts[task.task]:
                generator = _generator(self.device, _TRAINING, self.seed, step, index)
                parts.append((task.weight, *self._recall(task, step, generator)))
        total = sum(weight for weight, _, _ in parts)
        weights = [(labels != IGNORED) * (weight / total) for weight, _, labels in parts]
        return Batch(
            input_ids=torch.cat([ids for _, ids, _ in parts]),
            labels=torch.cat([labels for _, _, labels in parts]),
            weights=torch.cat([w / (w > 0).sum() for w in weights]),
        )

    def _recall(self, task: RecallTask, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The step's sequences of a task; its sizes take turns, so that over steps each has an equal part."""
        count, sizes = self.counts[task.task], task.pairs
        turns = [(step * count + row) % len(sizes) for row in range(count)]
        made = [
            generator_of(task.task)(task, size, turns.count(turn), self.length, generator, repeat=True)
            for turn, size in enumerate(sizes)
        ]
        return torch.cat([ids for ids, _ in made]), torch.cat([labels for _, labels in made])

    def recall_evaluation(self, task: RecallTask, size: int, sequences: int) -> tuple[Tensor, Tensor]:
        """Held-out sequences of one size, [sequences, T], each query once: the same for every trial of every study."""
        generator = _generator(self.device, _EVALUATION, size)
        return generator_of(task.task)(task, size, sequences, self.length, generator, repeat=False)

    def text_evaluation(self, sequences: int) -> tuple[Tensor, Tensor] | None:
        """Held-out text windows [sequences, T]; None where the workload has no text."""
        if self.corpus is None:
            return None
        return _shift(self.corpus.validation_batch(sequences, self.length).to(self.device))


def _shift(windows: Tensor) -> tuple[Tensor, Tensor]:
    return windows[:, :-1], windows[:, 1:]


def _generator(device: torch.device | str, *parts: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(derive_seed(*parts))
