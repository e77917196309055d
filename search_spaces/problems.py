"""What is wrong with a space, in one line of a bounded length."""

from __future__ import annotations

import reprlib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nas.registry import did_you_mean
from nas.tasks import tasks

_LINE = 500
_VALUE = 80

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _VALUE

_BRANCHES = ("LogRange", "str", "constrained-float", "float")
"""What pydantic calls the branches of the schema's unions, beside those that end in a bracket."""


def shown(value: object) -> str:
    """`value` as an error shows it: at most about 80 characters of its repr, however deep or long it is."""
    found = _short.repr(value)
    return found if len(found) <= _VALUE else f"{found[: _VALUE - 3]}..."


def clip(line: str) -> str:
    """One line of at most 500 characters."""
    line = " ".join(line.split())
    return line if len(line) <= _LINE else f"{line[: _LINE - 3]}..."


def reason(error: ValidationError) -> str:
    """The first problem, without its place."""
    return error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of a validation error as one line: field, value, what is allowed."""
    problem = _telling(error.errors(include_url=False))
    *parents, last = problem["loc"] or ("",)
    # a user knows fields, not the branches of a union
    parts = [part for part in problem["loc"] if not str(part).endswith("]") and part not in (*_BRANCHES, *tasks())]
    path = clip(".".join(part if isinstance(part, str) and len(part) <= _VALUE else shown(part) for part in parts))
    if problem["type"] == "extra_forbidden":
        return clip(f"{path}: unknown key {shown(last)}; {did_you_mean(str(last), tuple(_fields(model, parents)))}")
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "recall_task" and isinstance(problem["input"], dict):
        return clip(f"{path}.task={shown(problem['input'].get('task'))}: {message}")
    value = "" if problem["type"] in ("missing", "value_error") else f"={shown(problem['input'])}"
    return clip(f"{path}{value}: {message}" if path else message)


def _telling(problems: list[ErrorDetails]) -> ErrorDetails:
    """A misspelt key explains the missing one beside it; the deepest place, which branch of a union was meant."""
    unknown = next((found for found in problems if found["type"] == "extra_forbidden"), None)
    return unknown or max(problems, key=lambda found: len(found["loc"]))


def _fields(model: type[BaseModel], path: list[Any]) -> list[str]:
    """Field names of the model that `path` leads to from `model`."""
    for part in path:
        if part in tasks():  # the branch of a recall task
            model = tasks()[part]
            continue
        info = model.model_fields.get(str(part)) if isinstance(part, str) else None
        found = _models(info.annotation) if info else []
        if found:
            model = found[0]
    return list(model.model_fields)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]
