"""The figures of the CPU demo: time, trials, front, recall, and memory of the whole process tree.

    python benchmarks/cpu_demo.py [--out FOLDER]

Runs `nas launch --space cpu-demo --study demo` in an empty folder, as `make launch` does after the installation, and
prints each figure beside its goal. Exits with 1 if one is missed. Needs psutil (extra `dev`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 2**20
LAUNCH = [sys.executable, "-m", "nas", "launch", "--space", "cpu-demo", "--study", "demo"]


@dataclass
class Peaks:
    """Peak memory in bytes. The tree is counted by proportional set size: shared pages once."""

    driver: int = 0
    tree: int = 0


def watch(process: psutil.Process, peaks: Peaks, done: threading.Event) -> None:
    """Samples the process tree every second until `done`."""
    while not done.wait(1.0):
        try:
            tree = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        total = 0
        for member in tree:
            try:
                total += member.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it ended between the two calls
        peaks.tree = max(peaks.tree, total)
        peaks.driver = max(peaks.driver, process.memory_info().rss)


def nas_json(folder: Path, *arguments: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "nas", *arguments, "--json"], cwd=folder, capture_output=True, text=True, check=True
    )
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


def help_seconds() -> float:
    """The best of five `nas --help`."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "nas", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="an empty folder that keeps nas.db; a temporary one by default")
    folder = parser.parse_args().out or Path(tempfile.mkdtemp(prefix="nas-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    peaks, done, began = Peaks(), threading.Event(), time.monotonic()
    with (folder / "launch.log").open("w") as log:
        launch = subprocess.Popen(LAUNCH, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        watcher = threading.Thread(target=watch, args=(psutil.Process(launch.pid), peaks, done))
        watcher.start()
        code = launch.wait()
        seconds = time.monotonic() - began
        done.set()
        watcher.join()
    print((folder / "launch.log").read_text())
    if code:
        return code

    trials, front = nas_json(folder, "trials", "demo"), nas_json(folder, "front", "demo")
    states = Counter(trial["state"] for trial in trials)
    recalls = [float(str(trial["recall"])) for trial in trials if trial["state"] == "complete"]
    backbones = {name for trial in trials for name in trial["backbones"]}  # type: ignore[attr-defined]
    figures = [
        ("minutes", seconds / 60, "at most 12, goal 8", seconds <= 12 * 60),
        ("trials", len(trials), "at least 16", len(trials) >= 16),
        ("backbones", len(backbones), "at least 4", len(backbones) >= 4),
        ("pruned", states["pruned"], "at least 8", states["pruned"] >= 8),
        ("designs on the front", len(front), "at least 3", len(front) >= 3),
        ("best recall", max(recalls), "at least 0.9", max(recalls) >= 0.9),
        ("worst recall, complete", min(recalls), "under 0.5", min(recalls) < 0.5),
        ("MiB, all processes", peaks.tree / MIB, "under 4096", peaks.tree < 4096 * MIB),
        ("MiB, driver", peaks.driver / MIB, "under 700", peaks.driver < 700 * MIB),
        ("seconds, nas --help", help_time := help_seconds(), "under 0.7", help_time < 0.7),
    ]
    for name, value, goal, met in figures:
        print(f"{'ok  ' if met else 'MISS'} {name:<24} {value:>10.2f}   {goal}")
    return 0 if all(met for *_, met in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
