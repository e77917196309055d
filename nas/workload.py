"""What a proxy is trained on and scored by: a mix of text and recall tasks, and the rungs it is compared at."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from nas.architecture import Frozen
from nas.tasks import MQAR, AnyTask, RecallTask, Weight

BYTES = 256
"""The tokenizer's first 256 ids are the bytes; special tokens <|r0|>, <|r1|>, ... follow (design.md 11)."""


class Text(Frozen):
    """Next-token prediction on real text.

    `source`: "python" (the running Python's standard library, nothing to download), a folder or file of .txt, .jsonl
    or .parquet, or `hub:NAME` for a Hugging Face data set with a `text` column. A `holdout` share of the files,
    never of windows, is kept for validation.
    """

    weight: Weight = 1.0
    source: str = "python"
    field: str = "text"
    tokenizer: str = "bytes"
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.05


class Workload(Frozen):
    """The training mix and its evaluation; `weight`s are shares of the sequences of a batch."""

    text: Text = Text()
    recall: tuple[Annotated[RecallTask, AnyTask], ...] = Field(default=(MQAR(),), min_length=1)
    evaluation_sequences: Annotated[int, Field(gt=0, le=2**20)] = 128
    """Sequences per evaluation size, and text windows of the validation loss."""
    report_every: Annotated[int, Field(gt=0, le=10**8)] = 10

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [task.task for task in self.recall]
        if len(set(names)) < len(names):
            raise ValueError(f"recall: {names} names a task twice; give one entry with all its sizes")
        if not any(task.weight for task in self.recall):
            raise ValueError("recall: every weight is 0; at least one task must have a weight above 0")
        return self

    @property
    def vocab_size(self) -> int:
        """Ids of the byte tokenizer and the special tokens of the tasks, padded to a multiple of 32."""
        return -(-(BYTES + max(task.special_tokens for task in self.recall)) // 32) * 32

    @property
    def chance(self) -> float:
        """Recall of a model that knows the answers' alphabet and nothing else: the mean over tasks of 1 / answers."""
        return sum(1 / task.answers for task in self.recall) / len(self.recall)

    def batch_counts(self, batch_size: int) -> dict[str, int]:
        """Sequences of a batch by source ("text", then each task's name), by largest remainder."""
        weights: dict[str, float] = {"text": self.text.weight, **{task.task: task.weight for task in self.recall}}
        total = sum(weights.values())
        exact = {name: batch_size * weight / total for name, weight in weights.items()}
        counts = {name: int(share) for name, share in exact.items()}
        for name in sorted(exact, key=lambda name: counts[name] - exact[name])[: batch_size - sum(counts.values())]:
            counts[name] += 1
        return counts
