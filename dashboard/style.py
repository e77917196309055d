"""How things look and read everywhere on the page: colours, names and units."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from nas.registry import mixers

Record = Mapping[str, Any]
"""One trial as `nas.search.records` gives it; absent values are None."""

INK, MUTED, FAINT, LINE = "#1f2933", "#64748b", "#94a3b8", "#e6eaf0"
ACCENT = "#0f4c81"
FONT = "'Source Sans', 'Source Sans Pro', 'Helvetica Neue', Arial, sans-serif"

FULL_ATTENTION = "Full attention"
_FULL_COLOUR, _MIXED_COLOUR = "#3d4451", "#9c755f"

# Okabe and Ito's colour-blind safe set (https://jfly.uni-koeln.de/color/), then what stands apart from it on white.
_PALETTE = {
    "gated_deltanet": "#0072b2",
    "deltanet": "#56b4e9",
    "gla": "#e69f00",
    "hgrn2": "#009e73",
    "hgrn": "#cc79a7",
    "retnet": "#d55e00",
    "kda": "#7a6ff0",
    "gated_deltanet2": "#17becf",
    "mamba2": "#8c564b",
    "rwkv6": "#b8a400",
}
_SPARE = ("#a03070", "#5b8c2a", "#b07aa1", "#86bcb6")


def finite(value: object) -> float | None:
    """`value` as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def backbone_label(record: Record) -> str:
    """The group a design is coloured by: its linear mixers by title, or full attention."""
    return " + ".join(title(name) for name in record.get("backbones") or ()) or FULL_ATTENTION


def title(mixer: str) -> str:
    """A mixer's title; its name where the package that added it is not installed here."""
    known = mixers().get(mixer)
    return known.title if known else mixer


def colour(backbones: Sequence[str]) -> str:
    """The fixed colour of a design's linear mixers: the same in every chart, study and process."""
    if not backbones:
        return _FULL_COLOUR
    if len(backbones) > 1:
        return _MIXED_COLOUR
    name = backbones[0]
    return _PALETTE.get(name) or _SPARE[zlib.crc32(name.encode()) % len(_SPARE)]


def bytes_text(value: float | None) -> str:
    """Binary units, three significant digits: 768 MiB, 1.5 GiB."""
    return _scaled(value, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB"))


def count_text(value: float | None) -> str:
    """Decimal units: 120 k, 1.31 G."""
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T")).strip()


def _scaled(value: float | None, base: float, units: Sequence[str]) -> str:
    number = finite(value)
    if number is None:
        return "–"
    power = 0
    while abs(number) >= base and power < len(units) - 1:
        number, power = number / base, power + 1
    return f"{number:.0f} {units[power]}" if abs(number) >= 100 else f"{number:.3g} {units[power]}"


def percent_text(ratio: float | None) -> str:
    """A share as percent: 26 %, 0.82 %."""
    number = finite(ratio)
    if number is None:
        return "–"
    return f"{100 * number:.0f} %" if number >= 0.1 else f"{100 * number:.2g} %"


def score_text(value: float | None, digits: int = 3) -> str:
    number = finite(value)
    return "–" if number is None else f"{number:.{digits}f}"


def rate_text(value: float | None) -> str:
    """A learning rate: 0.0021, 1.5e-05."""
    number = finite(value)
    return "–" if number is None else f"{number:.2g}"


def duration_text(seconds: float | None) -> str:
    """42 s, 7 min 05 s, 3 h 12 min, 2 d 4 h."""
    number = finite(seconds)
    if number is None:
        return "–"
    total = round(number)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


def state_text(record: Record) -> str:
    """The trial's state and, if it failed, why."""
    failure = record.get("failure")
    return f"{record['state']} ({failure})" if failure else str(record["state"])
