"""Reading a space from a preset or a YAML file. All that can be wrong with it is one SpaceError, one line."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from nas.registry import did_you_mean
from search_spaces.designs import deployment_problem
from search_spaces.schema import SearchSpace

_PRESETS = files("search_spaces") / "presets"


class SpaceError(ValueError):
    """A space that cannot be used: the message is one line naming the field, its value and what is allowed."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 where it matters: `1e-3` is a number, `4:1` a string, and a key given twice an error."""


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
    return dict(zip(keys, (loader.construct_object(value, deep=True) for _, value in node.value), strict=True))


def _resolvers() -> None:
    # PyYAML follows YAML 1.1, where 4:1 is the base-60 integer 241 and 1e-3 a string.
    drop = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in drop]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?\Z|[-+]?\.inf\Z|\.nan\Z")
    _Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?\d+\Z"), list("-+0123456789"))
    _Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    _Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


_resolvers()


def preset_names() -> list[str]:
    """Names of the presets that ship with the package."""
    return sorted(path.name.removesuffix(".yaml") for path in _PRESETS.iterdir() if path.name.endswith(".yaml"))


def read_text(name_or_file: str) -> str:
    """The YAML text of a preset or a file.

    Raises:
        SpaceError: neither a preset nor a readable file.
    """
    if name_or_file in preset_names():
        return (_PRESETS / f"{name_or_file}.yaml").read_text(encoding="utf-8")
    path = Path(name_or_file)
    if not path.suffix:
        nearest = did_you_mean(name_or_file, tuple(preset_names()))
        raise SpaceError(f"space {name_or_file!r} is unknown; {nearest}, or FILE.yaml")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpaceError(f"space file {name_or_file!r} cannot be read: {error}") from error


def load_space(name_or_file: str) -> SearchSpace:
    """A SearchSpace from a preset name or a YAML file.

    Raises:
        SpaceError: unknown preset, unreadable file, or bad content.
    """
    return parse_space(read_text(name_or_file), name_or_file)


def parse_space(text: str, origin: str) -> SearchSpace:
    """A SearchSpace from YAML text; `origin` names it in errors."""
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise SpaceError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise SpaceError(f"{origin}: expected a mapping of fields, got {type(content).__name__}")
    try:
        space = SearchSpace.model_validate(content)
    except ValidationError as error:
        raise SpaceError(f"{origin}: {describe(error, SearchSpace)}") from error
    if problem := deployment_problem(space):
        raise SpaceError(f"{origin}: {problem}")
    return space


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of a validation error as one line: field, value, what is allowed."""
    problem = error.errors(include_url=False)[0]
    for other in error.errors(include_url=False):
        if other["type"] == "extra_forbidden":  # a misspelt key explains the missing one beside it
            problem = other
            break
    *parents, last = problem["loc"] or ("",)
    # pydantic names the branch of a union or validator in brackets; a user knows fields only
    path = ".".join(str(part) for part in problem["loc"] if not str(part).endswith("]"))
    if problem["type"] == "extra_forbidden":
        fields = tuple(_fields(model, parents))
        return f"{path}: unknown key {last!r}; {did_you_mean(str(last), fields)}"
    message = problem["msg"].removeprefix("Value error, ")
    value = problem["input"]
    shown = "" if problem["type"] in ("missing", "value_error") else f"={value!r}"
    return f"{path}{shown}: {message}" if path else message


def _fields(model: type[BaseModel], path: list[Any]) -> list[str]:
    """Field names of the model that `path` leads to from `model`."""
    for part in path:
        info = model.model_fields.get(str(part)) if isinstance(part, str) else None
        found = _models(info.annotation) if info else []
        if found:
            model = found[0]
    return list(model.model_fields)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]
