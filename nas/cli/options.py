"""What several commands take: the storage, a study, a trial, `--json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nas.cli.errors import Refused

if TYPE_CHECKING:
    from nas.store import Store, StudyInfo

StorageOption = Annotated[
    str,
    typer.Option(
        "--storage",
        envvar="NAS_STORAGE",
        metavar="URL",
        help="Database: sqlite:///FILE or postgresql://USER@HOST/NAME.",
    ),
]
StudyArgument = Annotated[
    str | None, typer.Argument(metavar="STUDY", help="Name of a study; the latest by default.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@contextmanager
def reading(storage: str, study: str | None) -> Iterator[tuple[Store, StudyInfo]]:
    """The store, read-only, and a study in it, the latest if None.

    Raises:
        StoreError: no such database or study.
    """
    from nas.store import Store

    with Store.open(storage, read_only=True) as store:
        yield store, store.study(study)


def parse_trial(trial: str) -> tuple[str | None, int]:
    """(study or None for the latest, number) of `STUDY/N` or `N`; N has at most 9 digits."""
    study, slash, number = trial.rpartition("/")
    if not (number.isascii() and number.isdecimal() and len(number) <= 9) or (slash and not study):
        raise Refused(f"trial={trial!r} is not a trial; allowed: STUDY/N, or N in the latest study")
    return study or None, int(number)


def print_json(value: Any) -> None:
    """Strict JSON: a number that is not finite is an error, never NaN."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
