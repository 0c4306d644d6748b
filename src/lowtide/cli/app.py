"""The command `lowtide`: finds the verb that was asked for, and alone turns errors into text and exit codes.

Exit codes: 0 all went well; 1 lowtide refused, or results differ, the reason is on standard error; 2 the command
line was not understood; 3 it does not fit as asked, an option does; 4 nothing fits; 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from lowtide import __version__
from lowtide.errors import LowtideError

__all__ = ["app", "main"]

VERBS = ("fit", "advise", "plan", "explore", "report", "verify", "measure", "calibrate", "demo")
"""Each is the function of that name in the file of that name beside this one."""


class Verbs(TyperGroup):
    """The verbs by name. A verb's file is imported when it is asked for: none pays for another's imports."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        alone = typer.Typer(add_completion=False)
        alone.command(cmd_name)(getattr(import_module(f"lowtide.cli.{cmd_name}"), cmd_name))
        return typer.main.get_command(alone)


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lowtide {__version__}")
        raise typer.Exit


@app.callback()
def lowtide(
    _version: bool = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Activation checkpointing for PyTorch that recomputes tensors, not modules."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (without `arguments`, the process's own) and leave with its exit code."""
    try:
        app(args=arguments, prog_name="lowtide")
    except LowtideError as error:
        typer.echo(f"lowtide: {error}", err=True)
        sys.exit(1)
