"""The GPU suite (`pytest -m gpu`): exact arithmetic, one configuration a kernel, figures kept.

Environment variables, by names that tests/conftest.py leaves alone:
    GPU_TESTS_DEVICE    cpu runs the same lines without a GPU: our CPU kernels in place of Triton's
    GPU_TESTS_AUTOTUNE  1 lets every kernel be tuned, which takes minutes a mixer
    GPU_TESTS_SHARD     i/n takes the i-th of n parts: tests/gpu/run starts them side by side
    OUT                 folder for the figures

Unless tuned, every kernel takes its first configuration that fits. What it computes does not depend on the choice,
but compilers have erred in some of them: on Hopper with Triton 3.4 to 3.7.0, fla#640 (GDN's gradients) and fla#984 (the
delta rule's dk and dbeta with 4 warps). Only a tuned run tests the configurations that training takes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from tests.gpu.measured import FILE, Errors, Figures, environment, write

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
AUTOTUNE = os.environ.get("GPU_TESTS_AUTOTUNE") == "1"
SHARD, _, SHARDS = os.environ.get("GPU_TESTS_SHARD", "0/1").partition("/")
FIGURES = pytest.StashKey[dict[str, Figures]]()
FAILED = pytest.StashKey[list[str]]()
# fla takes TF32 in these triangular solves whatever TRITON_F32_DEFAULT says
SOLVES = ("fla.ops.gated_delta_rule.chunk_fwd", "fla.ops.kda.chunk_intra", "fla.ops.gdn2.chunk_intra")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.stash[FIGURES], config.stash[FAILED] = {}, []


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if not ours:
        return
    if DEVICE == "cuda" and not torch.cuda.is_available():
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    groups = sorted(set(map(_group, ours)))  # the same in every process
    others = {item for item in ours if groups.index(_group(item)) % int(SHARDS) != int(SHARD)}
    items[:] = [item for item in items if item not in others]


def _group(item: pytest.Item) -> str:
    """Tests that compile the same kernels: those of one mixer, or else of one function."""
    callspec = getattr(item, "callspec", None)
    mixer = callspec.params.get("mixer") if callspec is not None else None
    return str(mixer or item.name.partition("[")[0])


@pytest.fixture(scope="session", autouse=True)
def exact_arithmetic() -> Iterator[None]:
    """float32 means float32: no TF32 in torch, in Triton's products and in fla's triangular solves."""
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        for path in SOLVES:
            patch.setattr(import_module(path), "SOLVE_TRIL_DOT_PRECISION", triton.language.constexpr("ieee"))
        if not AUTOTUNE:
            take_first_configurations(patch)
        yield
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.set_float32_matmul_precision(products)


def take_first_configurations(patch: pytest.MonkeyPatch) -> None:
    """Each kernel is tried in the order of its configurations and takes the first that fits on the card, untimed.

    Triton keeps what it timed on disk; nothing is read from there or written.
    """
    prune, bench = Autotuner.prune_configs, Autotuner._bench
    found: set[int] = set()

    def begin(self: Any, *args: Any, **kwargs: Any) -> list[Any]:
        found.discard(id(self))
        return list(prune(self, *args, **kwargs))

    def try_until_one_runs(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if id(self) in found:
            return [math.inf] * 3
        times = bench(self, *args, config=config, **meta)  # infinite where it does not fit
        if times[0] < math.inf:
            found.add(id(self))
        return list(times)

    def run_once(call: Callable[[], object], quantiles: object) -> list[float]:
        call()
        return [0.0] * 3

    def no_disk(self: Any, key: object, configs: object, benchmark: Callable[[], None]) -> bool:
        benchmark()
        return False

    patch.setattr(Autotuner, "prune_configs", begin)
    patch.setattr(Autotuner, "_bench", try_until_one_runs)
    patch.setattr(Autotuner, "do_bench", staticmethod(run_once))
    patch.setattr(Autotuner, "check_disk_cache", no_disk)


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


def ids(device: str, length: int, rows: int = 2) -> torch.Tensor:
    """The same tokens [rows, length] out of 64 in every test."""
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(1)).to(device)


@pytest.fixture
def errors(request: pytest.FixtureRequest) -> Iterator[Errors]:
    """Collects what a test measures; printed in one line and kept for the figures even where the test fails."""
    collected = Errors()
    yield collected
    name = request.node.nodeid.removeprefix("tests/gpu/")
    request.config.stash[FIGURES][name] = collected.figures
    print(f"\n{name}: {collected.line()}", end=" ")
    _write(request.config)  # after each test: a run that is cut short keeps what it measured


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if report.failed and item.path.is_relative_to(Path(__file__).parent):
        item.config.stash[FAILED].append(f"{item.nodeid.removeprefix('tests/gpu/')} ({report.when})")
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    _write(session.config)


def _write(config: pytest.Config) -> None:
    figures, out = config.stash[FIGURES], os.environ.get("OUT")
    if figures and out:
        name = FILE if SHARDS == "1" else f"{FILE}.{SHARD}"
        write(Path(out) / f"{name}.json", environment(DEVICE, AUTOTUNE), figures, config.stash[FAILED])
