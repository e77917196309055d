"""The command line: `nas`. One file a command group; heavy libraries are imported by the command that needs them."""

from nas.cli.app import main

__all__ = ["main"]
