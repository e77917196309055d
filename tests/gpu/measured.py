"""The figures that the GPU suite measures: relative errors beside their bounds, kept, printed and written as JSON.

As a program, `python -m tests.gpu.measured FOLDER` joins the files of several processes into gpu_exactness.json and
prints its worst figures; tests/gpu/run calls it.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FILE = "gpu_exactness"
Figures = dict[str, dict[str, float]]


@dataclass
class Errors:
    """The errors of one test by name; `check` fails on those at or above their bound."""

    figures: Figures = field(default_factory=dict)

    def add(self, name: str, error: float, bound: float) -> None:
        """One relative error; what is not finite counts as 1e9, since JSON has no word for it."""
        self.figures[name] = {"error": error if error < 1e9 else 1e9, "bound": bound}

    def note(self, name: str, value: float) -> None:
        """A figure that nothing bounds."""
        self.figures[name] = {"value": value}

    def check(self) -> None:
        assert self.figures, "nothing was measured"
        exceeded = [name for name, x in self.figures.items() if "bound" in x and not x["error"] < x["bound"]]
        assert not exceeded, f"above the bound: {self.line(exceeded)}"

    def line(self, names: Iterable[str] | None = None) -> str:
        """The figures of `names` (default: all) in one line: free ones, then the three nearest to their bounds."""
        shown = [(name, self.figures[name]) for name in (self.figures if names is None else names)]
        parts = [f"{name} {x['value']:.4g}" for name, x in shown if "value" in x]
        bounded = sorted((share(x), name) for name, x in shown if "bound" in x)[::-1]
        for _, name in bounded[:3]:
            parts.append(f"{name} {self.figures[name]['error']:.1e} of {self.figures[name]['bound']:.0e}")
        return ", ".join(parts) + (f" and {len(bounded) - 3} smaller" if len(bounded) > 3 else "")


def share(figure: dict[str, float]) -> float:
    """A bounded error in units of its bound."""
    return figure["error"] / figure["bound"] if figure["bound"] else float("inf")


def environment(device: str, autotune: bool) -> dict[str, Any]:
    """Card, versions and date of a run."""
    import torch
    import triton

    cuda = device == "cuda"
    packages = ("flash-linear-attention", "transformers", "numpy")
    return {
        "card": torch.cuda.get_device_name() if cuda else f"none (CPU, {platform.machine()})",
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            **{name: _version(name) for name in packages},
        },
        "kernels": "fully autotuned" if autotune else "first configuration of each kernel that fits",
        "float32": "ieee in every matrix product, triangular solves included",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(path: Path, about: dict[str, Any], figures: dict[str, Figures], failed: list[str]) -> None:
    content = {**about, "failed": sorted(failed), "figures": dict(sorted(figures.items()))}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def join(folder: Path) -> dict[str, Any]:
    """Join FILE.*.json of one folder into FILE.json; the latter stands there already after a run of one process."""
    paths = sorted(folder.glob(f"{FILE}.*.json"))
    if not paths:
        paths = [folder / f"{FILE}.json"]
        if not paths[0].exists():
            raise SystemExit(f"{folder} holds no {FILE}.json")
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    joined: dict[str, Any] = parts[0]
    joined["failed"] = sorted({name for part in parts for name in part["failed"]})
    joined["figures"] = dict(sorted(item for part in parts for item in part["figures"].items()))
    (folder / f"{FILE}.json").write_text(json.dumps(joined, indent=1) + "\n", encoding="utf-8")
    for path in paths:
        if path.name != f"{FILE}.json":
            path.unlink()
    return joined


def summary(content: dict[str, Any]) -> str:
    """One line a test function: its worst error as a share of its bound, over all its cases."""
    worst: dict[str, tuple[float, str]] = {}
    for test, figures in content["figures"].items():
        for name, x in figures.items():
            if "bound" in x:
                line = f"{x['error']:.1e} of {x['bound']:.0e}  {name}  {test.partition('[')[2].rstrip(']')}"
                key = test.partition("[")[0].rpartition("::")[2]
                worst[key] = max(worst.get(key, (-1.0, "")), (share(x), line))
    lines = [f"{key}: {line}" for key, (_, line) in sorted(worst.items())]
    about = f"{content['card']}, {content['versions']}, {content['date']}"
    return "\n".join([about, *lines, f"failed: {len(content['failed'])}", *content["failed"]])


if __name__ == "__main__":
    print(summary(join(Path(sys.argv[1]))))
