"""What `nas launch` can refuse before it opens a database or starts a worker: one line each, nothing written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nas.architecture import Architecture, Candidate
from nas.search.sampler import complete_params
from nas.store.database import check_file, parse_url
from nas.store.studies import STUDY_NAME
from search_spaces import SearchSpace
from search_spaces.designs import Recorder, Value, architecture, candidate, find_backbone, takes_routing
from search_spaces.loading import load_yaml
from search_spaces.problems import clip, shown
from search_spaces.schema import MAX_TRIALS

MAX_WORKERS = 100_000
MAX_SECONDS = 10 * 365 * 86400
_LIMITS = {"trials": MAX_TRIALS, "workers": MAX_WORKERS, "timeout": MAX_SECONDS}


class LaunchError(ValueError):
    """A launch that is refused before anything is written; one line (exit code 2)."""


def check_study(name: str) -> None:
    if not STUDY_NAME.fullmatch(name):
        allowed = "allowed: 1 to 64 letters, digits, '.', '_', '-', the first a letter or digit"
        raise LaunchError(f"study={shown(name)} is not a name; {allowed}")


def check_bounds(**given: float | None) -> None:
    """Of trials, workers and timeout (seconds); None is a default, and fine."""
    for name, value in given.items():
        if value is not None and not value > 0:
            raise LaunchError(f"{name}={shown(value)} must be above 0")
        if value is not None and value > _LIMITS[name]:
            raise LaunchError(f"{name}={shown(value)} must be at most {_LIMITS[name]}")


def check_seed(seed: int | None) -> None:
    if seed is not None and not 0 <= seed < 2**63:
        raise LaunchError(f"seed={shown(seed)} must be from 0 to {2**63 - 1}")


def check_storage(storage: str) -> None:
    """Refuses what can be refused without opening a database.

    Raises:
        StoreError: no URL that we know, or a folder or file that is missing or not writable.
    """
    address = parse_url(storage)
    if address.get_backend_name() == "sqlite":
        check_file(address, read_only=False)


def check_text(space: SearchSpace) -> None:
    text = space.workload.text
    local = text.source != "python" and not text.source.startswith("hub:")
    if text.weight and local and not Path(text.source).exists():
        raise LaunchError(f"workload.text.source={shown(text.source)} does not exist")


def writable(checkpoints: str) -> str:
    """Refuses a local folder that could not be written to, without making it, and a protocol that fsspec lacks."""
    if "://" in checkpoints:
        from fsspec import available_protocols

        unknown = set(checkpoints.partition("://")[0].split("::")) - set(available_protocols())
        if unknown:
            raise LaunchError(f"checkpoints={shown(checkpoints)}: fsspec knows no protocol {shown(unknown.pop())}")
        return checkpoints
    path = Path(checkpoints).resolve()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise LaunchError(f"checkpoints={checkpoints!r} cannot be written: {existing} is not a writable folder")
    return str(path)


def read_designs(path: str, space: SearchSpace) -> list[tuple[Candidate, dict[str, Value]]]:
    """Own designs from a YAML list; each entry gives parameters of the space, the others take its first choices.

    Raises:
        SpaceError, LaunchError: unreadable file, or a parameter outside of the space or of no use to its design.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"enqueue={path!r} cannot be read: {clip(str(error))}") from error
    content = load_yaml(text, f"enqueue={path!r}")
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise LaunchError(f"enqueue={path!r}: expected a list of mappings, such as - {{backbone: gla, ratio: 4:1}}")
    designs = []
    for index, entry in enumerate(content):
        try:
            designs.append(_design(space, entry))
        except ValueError as error:
            raise LaunchError(clip(f"enqueue[{index}].{error}")) from error
    return designs


def _design(space: SearchSpace, entry: Mapping[str, Value]) -> tuple[Candidate, dict[str, Value]]:
    """The Candidate of some parameters, and all its parameters.

    Raises:
        ValueError: names the parameter that is unknown, outside of the space, or of no use to this design.
    """
    params = complete_params(space, entry)
    for name in entry:
        if name not in params:
            raise ValueError(f"{clip(str(name))} is unknown; allowed: {', '.join(params)}")
    recorder = Recorder(params)
    found = candidate(space, recorder)
    for name in entry:
        if name not in recorder.used:
            # each parameter but the first ones depends on one before it
            depends = {"placement": "ratio", "kv_groups": "ratio", "routing": "backbone"}.get(name, "optimizer")
            if depends == "backbone" and takes_routing(space, _pure(space, str(params["backbone"]))):
                depends = "ratio"
            raise ValueError(f"{name} does not apply to {depends} {params[depends]}")
    label = found.architecture.routing.label
    if label != entry.get("routing", label):
        raise ValueError(f"routing {entry['routing']} does not apply to backbone {params['backbone']}")
    return found, params


def _pure(space: SearchSpace, backbone: str) -> Architecture:
    return architecture(space, find_backbone(space, backbone), ())
