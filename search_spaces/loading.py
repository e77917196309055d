"""Reading a space from a preset or a YAML file. All that can be wrong with it is one SpaceError, one line."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from nas.registry import did_you_mean
from search_spaces.feasible import deployment_problem
from search_spaces.problems import clip, describe, shown
from search_spaces.schema import SearchSpace

_PRESETS = files("search_spaces") / "presets"


class SpaceError(ValueError):
    """A space that cannot be used: the message is one line naming the field, its value and what is allowed."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 where it matters: `1e-3` is a number, `4:1` a string, `<<` a key as any other, and a key given twice an
    error.
    """


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for key in keys:
        if isinstance(key, list | dict | set):
            raise yaml.constructor.ConstructorError(None, None, f"key {shown(key)} is no name", node.start_mark)
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"key {shown(key)} is given twice", node.start_mark)
    return dict(zip(keys, (loader.construct_object(value, deep=True) for _, value in node.value), strict=True))


def _resolvers() -> None:
    # PyYAML follows YAML 1.1, where 4:1 is the base-60 integer 241 and 1e-3 a string.
    drop = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:merge")
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in drop]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?\Z|[-+]?\.inf\Z|\.nan\Z")
    _Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?\d+\Z"), list("-+0123456789"))
    _Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    _Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
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
        raise SpaceError(f"space {shown(name_or_file)} is unknown; {nearest}, or FILE.yaml")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpaceError(clip(f"space file {shown(name_or_file)} cannot be read: {error}")) from error


def load_space(name_or_file: str) -> SearchSpace:
    """A SearchSpace from a preset name or a YAML file.

    Raises:
        SpaceError: unknown preset, unreadable file, or bad content.
    """
    return parse_space(read_text(name_or_file), name_or_file)


def load_yaml(text: str, origin: str) -> Any:
    """What a YAML text holds, read as spaces are; `origin` names it in errors.

    Raises:
        SpaceError: not YAML, or nothing that can be read as such.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise SpaceError(f"{origin}: nested too deeply") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:  # ValueError: an integer of thousands of digits
        raise SpaceError(f"{origin}: not valid YAML: {clip(str(error))}") from error


def parse_space(text: str, origin: str) -> SearchSpace:
    """A SearchSpace from YAML text; `origin` names it in errors."""
    content = load_yaml(text, origin)
    if not isinstance(content, dict):
        raise SpaceError(f"{origin}: expected a mapping of fields, got {type(content).__name__}")
    try:
        space = SearchSpace.model_validate(content)
    except ValidationError as error:
        raise SpaceError(f"{origin}: {describe(error, SearchSpace)}") from error
    if problem := deployment_problem(space):
        raise SpaceError(f"{origin}: {problem}")
    return space
