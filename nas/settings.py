"""Settings of this machine. Precedence: option > NAS_* variable > nas.toml in the working directory > default.

The file holds what belongs to the machine; what to search is said on the command line.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from nas.registry import did_you_mean

FILE = "nas.toml"
DEFAULT_STORAGE = "sqlite:///nas.db"
KEYS: dict[str, tuple[type, ...]] = {
    "storage": (str,),
    "checkpoints": (str,),
    "ray_address": (str,),
    "workers": (int,),
    "gpus": (int, float),
}
Value = str | int | float


class SettingsError(ValueError):
    """nas.toml cannot be used; one line."""


def read_file(path: str | Path = FILE) -> dict[str, Value]:
    """The settings of a nas.toml; empty where there is no such file.

    Raises:
        SettingsError: the file is not TOML, or a key or the type of its value is not known.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not TOML, an integer of thousands of digits
        raise SettingsError(f"{path} cannot be read: {error}") from error
    for key, value in content.items():
        if key not in KEYS:
            raise SettingsError(f"{path}: unknown key {key[:80]!r}; {did_you_mean(key, KEYS)}")
        if not isinstance(value, KEYS[key]) or isinstance(value, bool):
            raise SettingsError(f"{path}: {key}={value!r:.80} must be {' or '.join(t.__name__ for t in KEYS[key])}")
    return content


def storage(given: str | None = None) -> str:
    """The database URL: as given, else NAS_STORAGE, else that of nas.toml, else nas.db in the working directory."""
    return given or os.environ.get("NAS_STORAGE") or str(read_file().get("storage", DEFAULT_STORAGE))
