"""From exceptions to one line on stderr and an exit code: 1 failed, 2 usage or refused."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import typer

FAILED, REFUSED, INTERRUPTED = 1, 2, 130

EXTRAS = {
    "train": ("torch", "triton", "fla", "transformers", "ray", "datasets", "fsspec", "safetensors"),
    "dashboard": ("streamlit", "plotly", "pandas"),
}
_REFUSED_ERRNO = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
"""Errors about a path that the user named; others, such as a full disk, are failures."""


class CliError(Exception):
    """An error that is told in one line."""

    code = FAILED


class Failed(CliError):
    """What was asked for was begun and did not succeed."""


class Refused(CliError):
    """What was asked for is not possible; nothing was begun."""

    code = REFUSED


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Tells errors of these kinds in one line: the user's input is to blame."""
    try:
        yield
    except kinds as error:
        raise Refused(one_line(error)) from error


def explain(error: Exception) -> tuple[int, str] | None:
    """(exit code, message) of an error that can be expected; None for one that should not have happened."""
    from pydantic import ValidationError

    from nas.settings import SettingsError
    from nas.store import StoreError
    from search_spaces import SpaceError
    from search_spaces.problems import reason

    if isinstance(error, typer.TyperException):
        return error.exit_code, one_line(error.format_message())
    if isinstance(error, CliError):
        return error.code, str(error)
    if isinstance(error, ValidationError):  # a stored design that this installation cannot read: a package is missing
        return REFUSED, one_line(reason(error))
    if isinstance(error, StoreError | SpaceError | SettingsError):
        return REFUSED, one_line(error)
    if isinstance(error, ModuleNotFoundError) and (extra := _extra(error.name)):
        package = str(error.name).partition(".")[0]
        return REFUSED, f"{package} is not installed: pip install 'hybrid-nas[{extra}]'"
    if isinstance(error, OSError):
        return (REFUSED if error.errno in _REFUSED_ERRNO else FAILED), one_line(error)
    return None


def _extra(module: str | None) -> str | None:
    root = (module or "").partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if root in modules), None)


def one_line(message: object) -> str:
    return " ".join(str(message).split())
