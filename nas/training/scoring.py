"""The loss of a batch and the scores of a proxy: recall and text loss on fixed held-out data."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nas.training.data.mix import Batch, Mix
from nas.training.data.recall.mqar import IGNORED


class LanguageModel(Protocol):
    """What training needs of a model: a body whose output has `last_hidden_state` [B, T, D], and a head."""

    @property
    def model(self) -> Any: ...

    @property
    def lm_head(self) -> Any: ...


class Score(NamedTuple):
    """Means over labelled positions: negative log-likelihood in nats, and the share of right answers."""

    nll: float
    accuracy: float


def labelled_logits(model: LanguageModel, input_ids: Tensor, labelled: Tensor) -> Tensor:
    """Logits, float32 [N, V], at the N positions where `labelled` [B, T] is true; no others are computed."""
    hidden: Tensor = model.model(input_ids, use_cache=False).last_hidden_state
    logits: Tensor = model.lm_head(hidden[labelled])
    return logits.float()


def batch_loss(model: LanguageModel, batch: Batch) -> Tensor:
    """The training loss, a scalar: cross-entropy in nats averaged within each source, then over sources by weight."""
    labelled = batch.labels != IGNORED
    logits = labelled_logits(model, batch.input_ids, labelled)
    losses = cross_entropy(logits, batch.labels[labelled], reduction="none")
    return (losses * batch.weights[labelled]).sum()


@torch.no_grad()
def score(model: LanguageModel, input_ids: Tensor, labels: Tensor, rows: int) -> Score:
    """Scores [B, T] sequences, `rows` at a time."""
    nll, right, count = 0.0, 0.0, 0
    for ids, targets in zip(input_ids.split(rows), labels.split(rows), strict=True):
        labelled = targets != IGNORED
        logits, answers = labelled_logits(model, ids, labelled), targets[labelled]
        nll += cross_entropy(logits, answers, reduction="sum").item()
        right += (logits.argmax(-1) == answers).sum().item()
        count += len(answers)
    return Score(nll / count, right / count)


def recall_scores(model: LanguageModel, mix: Mix, sequences: int, rows: int) -> dict[str, float]:
    """`recall/<task>/<size>`, and over all tasks and sizes with equal weights `recall` and `recall_nll` (nats)."""
    scores = {
        f"recall/{task.task}/{size}": score(model, *mix.recall_evaluation(task, size, sequences), rows)
        for task in mix.workload.recall
        for size in task.evaluation_pairs
    }
    accuracies = {name: s.accuracy for name, s in scores.items()}
    return accuracies | {
        "recall": sum(accuracies.values()) / len(scores),
        "recall_nll": sum(s.nll for s in scores.values()) / len(scores),
    }


def text_scores(model: LanguageModel, mix: Mix, sequences: int, rows: int) -> dict[str, float]:
    """`loss` in nats per token and `bits_per_byte` on held-out text (a token is a byte); empty without text."""
    held_out = mix.text_evaluation(sequences)
    if held_out is None:
        return {}
    loss = score(model, *held_out, rows).nll
    return {"loss": loss, "bits_per_byte": loss / math.log(2)}
