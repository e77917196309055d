"""The Ray that workers run on: one of our own on this machine, or a running cluster; and how many workers it holds."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

OBJECT_STORE_BYTES = 100 * 2**20
"""Only messages of a few kilobytes pass through Ray; Ray's own minimum is 75 MiB."""
TEMP_DIR_LIMIT = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Longest temp_dir in bytes: Linux allows 107 for the path of a Unix socket."""


@dataclass(frozen=True)
class Session:
    """This process's connection to Ray. `folder` holds the sockets and logs of a Ray that we started."""

    ours: bool
    folder: Path | None = None

    @property
    def is_local(self) -> bool:
        """Whether the Ray is our own, so that nobody else claims its resources."""
        return self.folder is not None

    @property
    def runtime_env(self) -> dict[str, Any]:
        """What workers need to find our packages; those of our own Ray inherit it, which starts them faster."""
        return {} if self.is_local else {"env_vars": {"PYTHONPATH": import_path()}}

    def close(self) -> None:
        """Disconnects, if we connected; ends the Ray processes, if we started them, and deletes their folder."""
        if self.ours and ray.is_initialized():
            ray.shutdown()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def connect(address: str | None, temp_dir: str | Path | None = None) -> Session:
    """Connects to the cluster at `address`; without one uses the Ray this process is connected to, or starts one.

    A Ray of our own has no dashboard and ends with this process, however that ends: after a SIGKILL workers go
    within about 3 s, Ray's two idle agents after a minute.

    Raises:
        ValueError: temp_dir is longer than TEMP_DIR_LIMIT, or `address` is malformed.
        ConnectionError: no cluster at `address`, or a local one did not start in time.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is not None:
        _check_reachable(address)
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
        return Session(ours=True)
    return Session(ours=False) if ray.is_initialized() else _start(_temp_dir(temp_dir))


def _check_reachable(address: str) -> None:
    """Ray itself would try a dead address for more than a minute."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        if address != "auto":
            raise ValueError(f"ray_address={address} must be auto or HOST:PORT")
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ConnectionError(f"ray_address={address}: no Ray cluster answers there ({error})") from None


def _start(temp_dir: Path) -> Session:
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        # Ray's ports are open to the network and want a token; without one given Ray would write it to ~/.ray.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with _environment("PYTHONPATH", import_path()):
        try:
            context: Any = ray.init(
                "local",  # also where RAY_ADDRESS names a cluster
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                log_to_driver=False,
                _temp_dir=str(temp_dir),
                # Idle processes, one a core, would take 100 MB each.
                _system_config={"prestart_worker_first_driver": False, "enable_metrics_collection": False},
            )
        except Exception as error:  # Ray raises a bare Exception when its node is not up in time
            reason = " ".join(str(error).split())
            raise ConnectionError(f"Ray did not start on this machine, try again: {reason}") from error
    return Session(ours=True, folder=Path(context.address_info["session_dir"]))


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable for the processes started meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _temp_dir(given: str | Path | None) -> Path:
    if given is None:
        name = f"nas-ray-{os.getuid()}"
        default = Path(tempfile.gettempdir(), name)
        return default if len(os.fsencode(default)) <= TEMP_DIR_LIMIT else Path("/tmp", name)
    if len(os.fsencode(Path(given).absolute())) > TEMP_DIR_LIMIT:
        raise ValueError(f"temp_dir={given} must be at most {TEMP_DIR_LIMIT} bytes long: Unix sockets lie in it")
    return Path(given).absolute()


def count_workers(slots: int | None, num_cpus: int, num_gpus: float) -> int:
    """How many workers to start that claim `num_cpus` and `num_gpus` each: `slots`, or as many as the cluster holds.

    Raises:
        ValueError: the cluster cannot hold them; Ray itself would wait for ever without a word.
    """
    nodes: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(_share(node.get("CPU", 0), num_cpus), _share(node.get("GPU", 0), num_gpus)) for node in nodes)
    wanted = slots if slots is not None else max(1, total_cpus() if room == math.inf else int(room))
    if wanted > room:
        gpus = sum(node.get("GPU", 0) for node in nodes)
        raise ValueError(
            f"workers={wanted} with {num_gpus:g} GPUs each: this Ray has {gpus:g} GPUs and {total_cpus()} CPU cores "
            f"on {len(nodes)} machines, enough for {int(room)}"
        )
    return wanted


def _share(amount: float, each: float) -> float:
    """Workers that `amount` of a machine's resource holds; one GPU is shared, but no share spans two."""
    if each == 0:
        return math.inf
    return int(amount) * int(1 / each + 1e-9) if each < 1 else amount // each


def total_cpus() -> int:
    """CPU cores of all machines of the cluster, within the limits of their containers."""
    return int(ray.cluster_resources().get("CPU", 1))


def import_path() -> str:
    """PYTHONPATH for workers: the driver's sys.path without what its Python adds itself, so that our packages are
    found where they are not installed."""
    own = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders = [Path(entry).resolve() for entry in sys.path]
    return os.pathsep.join(str(f) for f in folders if f.is_dir() and f not in own and f.name != "lib-dynload")
