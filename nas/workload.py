"""What a proxy is trained on and scored by: a mix of text and recall tasks, and the rungs it is compared at."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from nas.architecture import Frozen

BYTES = 256
"""The tokenizer's first 256 ids are the bytes; special tokens <|r0|>, <|r1|>, ... follow (design.md 11)."""

Weight = Annotated[float, Field(ge=0, le=1e6)]


class MQAR(Frozen):
    """Multi-query associative recall (Arora et al., arXiv:2312.04927).

    A sequence shows `pairs` keys each followed by its value, then asks for every key again in random order; the
    answer to a key is the value shown with it. Training draws the number of pairs from `pairs` in equal parts;
    evaluation takes each of `evaluation_pairs`, of which those not in `pairs` are held out. Training repeats the
    queries, in new orders, to the end of the sequence; evaluation asks each once. Labels stand only at the
    answers. Chance is 1 / values.
    """

    task: Literal["mqar"] = "mqar"
    weight: Weight = 1.0
    keys: Annotated[int, Field(ge=2, le=2**16)] = 16
    values: Annotated[int, Field(ge=2, le=2**16)] = 16
    pairs: tuple[PositiveInt, ...] = Field(default=(2, 5, 10), min_length=1)
    evaluation_pairs: tuple[PositiveInt, ...] = Field(default=(5, 10, 13), min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        largest = max(*self.pairs, *self.evaluation_pairs)
        if largest > self.keys:
            raise ValueError(f"pairs={largest} needs as many different keys; keys={self.keys}")
        return self

    @property
    def special_tokens(self) -> int:
        return self.keys + self.values

    @property
    def answers(self) -> int:
        """How many symbols an answer is one of; chance is its inverse."""
        return self.values

    @property
    def min_length(self) -> int:
        """Tokens of the longest sequence the task makes: pairs (2 each), then queries with answers (2 each)."""
        return 4 * max(*self.pairs, *self.evaluation_pairs)


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
    recall: tuple[MQAR, ...] = Field(default=(MQAR(),), min_length=1)
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
