"""Recall tasks without torch: what a sequence holds, how long it is, and what chance scores.

A task is joined by its name to the generator that makes its sequences (`nas.training.data.recall`). Other packages add
tasks through the entry-point group `nas.tasks` (a subclass of `RecallTask`) and their generators through
`nas.task_generators`; CONTRIBUTING.md has an example.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetCoreSchemaHandler, PositiveInt, model_validator
from pydantic_core import CoreSchema, core_schema

from nas.architecture import Frozen
from nas.registry import described, load_entry

_log = logging.getLogger(__name__)

Weight = Annotated[float, Field(ge=0, le=1e6)]
"""A source's share of a batch, before the shares are scaled to 1."""


class RecallTask(Frozen, ABC):
    """Base of all recall tasks. A size is a number of pairs; a task trains on `pairs` and is scored on
    `evaluation_pairs`, each size by itself. A subclass sets `task` to a Literal, its name."""

    task: str
    weight: Weight = 1.0
    pairs: tuple[PositiveInt, ...] = Field(min_length=1)
    evaluation_pairs: tuple[PositiveInt, ...] = Field(min_length=1)

    @property
    @abstractmethod
    def special_tokens(self) -> int:
        """Special tokens <|r0|>, <|r1|>, ... that sequences are made of."""

    @property
    @abstractmethod
    def answers(self) -> int:
        """How many symbols an answer is one of; chance is its inverse."""

    @property
    @abstractmethod
    def min_length(self) -> int:
        """Tokens of the longest sequence that the task makes."""

    @property
    def alphabet(self) -> dict[str, tuple[int, int]]:
        """First and last special token of each kind of symbol, for people who look at a sample."""
        return {"symbols": (0, self.special_tokens - 1)}

    def shown(self, size: int) -> int:
        """Tokens before the first question: keys and values, each key followed by its value."""
        return 2 * size


class MQAR(RecallTask):
    """Multi-query associative recall (Arora et al., arXiv:2312.04927).

    A sequence shows `pairs` keys each followed by its value, then asks for every key again in random order; the
    answer to a key is the value shown with it. Training draws the number of pairs from `pairs` in equal parts;
    evaluation takes each of `evaluation_pairs`, of which those not in `pairs` are held out. Training repeats the
    queries, in new orders, to the end of the sequence; evaluation asks each once. Labels stand only at the
    answers. Chance is 1 / values.
    """

    task: Literal["mqar"] = "mqar"
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
        return self.values

    @property
    def min_length(self) -> int:
        return 4 * max(*self.pairs, *self.evaluation_pairs)  # pairs, then queries with answers

    @property
    def alphabet(self) -> dict[str, tuple[int, int]]:
        return {"keys": (0, self.keys - 1), "values": (self.keys, self.special_tokens - 1)}


@cache
def tasks() -> Mapping[str, type[RecallTask]]:
    """Every known recall task by name: ours, then those that installed packages add.

    An entry point that is none of these, or has not its task's name, or one already taken, is left out with a logged
    warning: this runs while modules are imported, where an error would end every command.
    """
    known: dict[str, type[RecallTask]] = {"mqar": MQAR}
    for entry in entry_points(group="nas.tasks"):
        task = load_entry(entry)
        if task is None:
            continue
        problem = None
        if not (isinstance(task, type) and issubclass(task, RecallTask)):
            problem = f"gives {task!r}; expected a subclass of nas.tasks.RecallTask"
        elif missing := ", ".join(sorted(task.__abstractmethods__)):
            problem = f"lacks {missing}"
        elif (name := task.model_fields["task"].default) != entry.name or name in known or name == "text":
            problem = f"gives the task {name!r}; allowed: its own name, not yet taken"
        elif not entry_points(group="nas.task_generators", name=entry.name):
            problem = f"has no generator; its package must give nas.task_generators:{entry.name}"
        if problem:
            _log.warning("%s %s; it is left out", described(entry), problem)
            continue
        known[entry.name] = task
    return known


class AnyTask:
    """Annotation of a field that holds any known recall task, chosen by its `task` (default mqar)."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.tagged_union_schema(
            {name: handler.generate_schema(task) for name, task in tasks().items()},
            discriminator=_name,
            custom_error_type="recall_task",
            custom_error_message=f"no such recall task; allowed: {', '.join(tasks())}",
        )


def _name(value: Any) -> Any:
    return value.get("task", "mqar") if isinstance(value, dict) else getattr(value, "task", None)
