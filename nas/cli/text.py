"""Numbers, times and sizes as people read them, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from nas.cli.errors import Refused

ABSENT = "-"
_BARS = "▁▂▃▄▅▆▇█"
MAX_CONTEXT = 2**40
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def number(value: float | None, spec: str = ".3f") -> str:
    return ABSENT if value is None else format(value, spec)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def percent(value: float | None) -> str:
    """A share with three digits: 0.34% 3.4% 34.1% 100%."""
    if value is None:
        return ABSENT
    return f"{100 * value:.2f}%" if value < 0.01 else f"{100 * value:.1f}%" if value < 0.9995 else f"{100 * value:.0f}%"


def size(count: float | None) -> str:
    """Bytes in binary units."""
    if count is None:
        return ABSENT
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def big(count: float | None) -> str:
    """Counts in decimal units: 1.31 B parameters."""
    if count is None:
        return ABSENT
    for unit in ("", " k", " M", " B", " T"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} P"


def context(tokens: int) -> str:
    """Tokens in units of 1024 and 1024 * 1024 where they are whole: 4k, 1m."""
    if tokens % 2**20 == 0:
        return f"{tokens // 2**20}m"
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def parse_contexts(given: str) -> list[int]:
    """Context lengths of "4k,32k,1m", each once: k = 1024, m = 1024 * 1024; at most 2^40 tokens."""
    found = []
    for part in given.lower().split(","):
        match = re.fullmatch(r"\s*([1-9]\d{0,12})([km]?)\s*", part, re.ASCII)
        tokens = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2]] if match else 0
        if not 0 < tokens <= MAX_CONTEXT:
            shown = given if len(given) <= 80 else f"{given[:77]}..."
            raise Refused(f"--context={shown!r}: allowed are 1 to 1048576m tokens, such as 4096 or 4k or 1m, by commas")
        found.append(tokens)
    return list(dict.fromkeys(found))


def parse_duration(given: str) -> float:
    """Seconds of "90", "90s", "10m", "2h" or "1d"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", given.lower(), re.ASCII)
    if match is None:
        raise Refused(f"--timeout={given!r} is not a duration; allowed: seconds (90), or 90s, 10m, 2h, 1d")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def duration(seconds: float) -> str:
    """5s, 3m 20s, 2h 05m, 1d 4h."""
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {whole % 60:02}s" if minutes else f"{whole}s"


def moment(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """One character a value, from the smallest to the largest; longer series are thinned evenly to `width`."""
    if not values:
        return ""
    if len(values) > width:
        values = [values[i * (len(values) - 1) // (width - 1)] for i in range(width)]
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
