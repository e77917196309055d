"""The command line's shape is a promise: options are added, not renamed."""

from __future__ import annotations

import typer.main

from nas.cli.app import COMMANDS, app

OPTIONS = {
    "": ["--debug", "--version"],
    "launch": [
        "--space",
        "--study",
        "--storage",
        "--trials",
        "--workers",
        "--gpus",
        "--timeout",
        "--seed",
        "--ray-address",
        "--enqueue",
        "--checkpoints",
        "--dry-run",
    ],
    "status": ["STUDY", "--storage", "--json"],
    "front": ["STUDY", "--all", "--storage", "--json"],
    "trials": ["STUDY", "--state", "--storage", "--json"],
    "show": ["TRIAL", "--storage", "--json"],
    "cost": ["NAME|FILE", "--context", "--json"],
    "spaces": [],
    "spaces list": [],
    "spaces show": ["NAME|FILE"],
    "spaces check": ["NAME|FILE"],
    "data": [],
    "data show": ["mqar|text", "--space", "--seed"],
    "export": ["STUDY|STUDY/N", "--out", "--top", "--storage"],
    "dashboard": ["STUDY", "--port", "--storage"],
}


def options(command: typer.main._click.Command, name: str = "") -> dict[str, list[str]]:
    found = {name: [p.opts[0] if p.param_type_name == "option" else p.metavar for p in command.params]}
    for child, nested in getattr(command, "commands", {}).items():
        found |= options(nested, f"{name} {child}".strip())
    return found


def test_commands_and_options_are_frozen() -> None:
    assert options(typer.main.get_command(app)) == OPTIONS


def test_every_command_that_takes_a_storage_takes_settings() -> None:
    assert {name for name, found in OPTIONS.items() if "--storage" in found} == set(COMMANDS)
