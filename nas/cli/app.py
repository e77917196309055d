"""The `nas` command: its commands, its settings, and how it ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from nas._version import __version__
from nas.cli import cost, launch, show, spaces, study, tools
from nas.cli.errors import FAILED, INTERRUPTED, explain, one_line

app = typer.Typer(
    name="nas",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nas {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def nas(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", envvar="NAS_DEBUG", help="Add the traceback to errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Search hybrid linear-attention language models: recall against KV-cache memory.

    Settings: option, else the NAS_* variable, else nas.toml in the working directory, else the default.
    """
    context.obj["debug"] = debug
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("launch")(launch.launch)
app.command("status")(study.status)
app.command("front")(study.front)
app.command("trials")(study.trials)
app.command("show")(show.show)
app.command("cost")(cost.cost)
app.add_typer(spaces.spaces_app, name="spaces")
app.add_typer(spaces.data_app, name="data")
app.command("export")(tools.export)
app.command("dashboard")(tools.dashboard)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line (sys.argv by default) and exits: 0 done, 1 failed, 2 usage or refused, 130 interrupted."""
    state: dict[str, Any] = {"debug": False}
    _open_closed_streams()
    try:
        code = run(list(sys.argv[1:] if arguments is None else arguments), state)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _drop_output()
        code = FAILED
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001  the program's boundary: every error ends in one line and a code
        code = report(error, debug=state["debug"])
        try:
            sys.stdout.flush()
        except OSError:  # a full disk: the error has been told
            _drop_output()
    sys.exit(code)


def _drop_output() -> None:
    """Sends what is still buffered for stdout nowhere, so that the interpreter does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """A stream that the caller closed (`>&-`) leads nowhere; else the next file to be opened, such as the database,
    would get its number, and all that is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            if descriptor != number:
                os.dup2(descriptor, number)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115  for good


def run(arguments: Sequence[str], state: dict[str, Any]) -> int:
    """Runs a command line and returns its exit code; errors pass through. `state` takes the global options."""
    from nas.settings import SettingsError, read_file

    command = typer.main.get_command(app)
    try:
        settings = dict.fromkeys(COMMANDS, read_file())
    except SettingsError:
        if arguments and not {"--help", "-h", "--version"} & set(arguments):
            raise
        settings = {}
    code = command.main(arguments, prog_name="nas", standalone_mode=False, default_map=settings, obj=state)
    return code if isinstance(code, int) else 0


COMMANDS = ("launch", "status", "front", "trials", "show", "export", "dashboard")
"""Those that take settings."""


def report(error: Exception, *, debug: bool) -> int:
    """Prints an error in one line, with its traceback if `debug`; returns the exit code."""
    if debug:
        traceback.print_exception(error)
    known = explain(error)
    code, message = known or (FAILED, f"unexpected {type(error).__name__}: {one_line(error)}")
    hint = "" if known or debug else "; `nas --debug ...` shows where"
    typer.echo(f"error: {message}{hint}", err=True)
    return code
