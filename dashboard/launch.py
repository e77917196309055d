"""How the page is started: the exact command that `nas dashboard` runs."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from dashboard.style import ACCENT, INK, LINE

APP = Path(__file__).with_name("app.py")

_SETTINGS = {
    "server.headless": "true",
    "server.fileWatcherType": "none",
    "browser.gatherUsageStats": "false",
    "client.toolbarMode": "minimal",
    "theme.base": "light",
    "theme.primaryColor": ACCENT,
    "theme.textColor": INK,
    "theme.borderColor": LINE,
}


def command(
    storage: str | None = None, port: int = 8501, study: str | None = None, address: str = "127.0.0.1"
) -> list[str]:
    """The command line of the Streamlit server; run it as a subprocess, Ctrl-C ends it.

    Args:
        storage: database URL; None leaves it to the environment (NAS_STORAGE), where a password is not seen by `ps`.
        port: port to listen on.
        study: the study that opens first; None opens the newest.
        address: address to listen on; the page has no password, so only this machine by default.

    Raises:
        ValueError: streamlit or plotly is not installed.
    """
    missing = [name for name in ("streamlit", "plotly") if find_spec(name) is None]
    if missing:
        raise ValueError(f"the dashboard needs {' and '.join(missing)}: pip install 'hybrid-nas[dashboard]'")
    settings = {**_SETTINGS, "server.port": str(port), "server.address": address}
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    own = [part for name, value in (("--storage", storage), ("--study", study)) if value for part in (name, value)]
    return [sys.executable, "-m", "streamlit", "run", str(APP), *flags, "--", *own]


def url(port: int = 8501, address: str = "127.0.0.1") -> str:
    """Where a browser finds the page."""
    return f"http://{address}:{port}/"
