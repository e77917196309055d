"""Checkpoints of a trial: written whole or not at all, verified when read, the last two kept.

A file is one header line with the SHA-256 of the rest, then what torch.save makes of the state.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import uuid
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import fsspec
import torch

KEPT = 2
_HEADER = b"nas-checkpoint 1 sha256:"
_NAME = re.compile(r"step-(\d{9})\.ckpt")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or not ours; the message is one line and names the file."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written (a full disk, a folder that is gone); the message is one line."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a trial after `step` updates: raw weights, their moving average, and the optimiser's state.

    Nothing else is needed: batches and learning rates are functions of the step, and training draws no other
    random numbers.
    """

    step: int
    model: dict[str, Any]
    average: dict[str, Any]
    optimizer: dict[str, Any]


def save(checkpoint: Checkpoint, folder: str, protect: str | None = None) -> str:
    """Writes `folder/step-N.ckpt` and deletes all but the last two checkpoints there.

    Args:
        folder: a local folder or an fsspec URL; made if missing.
        protect: a checkpoint that stays whatever its age: the one a retry would start from.

    Returns:
        The checkpoint's path or URL.

    Raises:
        CheckpointWriteError: it could not be written; earlier ones stay.
    """
    try:
        return _save(checkpoint, folder, protect)
    except OSError as error:
        raise CheckpointWriteError(f"checkpoint of step {checkpoint.step} in {folder}: {error}") from error


def _save(checkpoint: Checkpoint, folder: str, protect: str | None) -> str:
    buffer = io.BytesIO()
    torch.save(_fields(checkpoint), buffer)
    payload = buffer.getvalue()
    data = _HEADER + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload
    files, root = fsspec.url_to_fs(folder)
    files.makedirs(root, exist_ok=True)
    name = f"step-{checkpoint.step:09d}.ckpt"
    partial, target = f"{root}/.{name}.{uuid.uuid4().hex}", f"{root}/{name}"
    if "file" in _protocols(files):
        _write_local(Path(partial), Path(target), data)
    else:
        files.pipe_file(partial, data)
        files.mv(partial, target)
    kept = {name, Path(protect).name if protect else name}
    for old in _names(files, root)[:-KEPT]:
        if old not in kept:
            files.rm_file(f"{root}/{old}")
    return f"{folder.rstrip('/')}/{name}"


def load(path: str, device: torch.device | str = "cpu") -> Checkpoint:
    """Reads a checkpoint and checks its SHA-256.

    Raises:
        CheckpointError: the file is missing, damaged or no checkpoint.
    """
    files, name = fsspec.url_to_fs(path)
    try:
        data = files.cat_file(name)
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path} does not exist") from error
    header, _, payload = data.partition(b"\n")
    if not header.startswith(_HEADER):
        raise CheckpointError(f"checkpoint {path} is damaged or no checkpoint: its first line is not ours")
    if hashlib.sha256(payload).hexdigest().encode() != header.removeprefix(_HEADER):
        raise CheckpointError(f"checkpoint {path} is damaged: its SHA-256 differs from the one written with it")
    return Checkpoint(**torch.load(io.BytesIO(payload), map_location=device, weights_only=True))


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    return {field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}


def _write_local(partial: Path, target: Path, data: bytes) -> None:
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)  # the rename itself must survive a power cut
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def _names(files: Any, root: str) -> list[str]:
    """Names of the checkpoints in a folder, oldest step first."""
    names = (Path(path).name for path in files.ls(root, detail=False))
    return sorted(name for name in names if _NAME.fullmatch(name))
