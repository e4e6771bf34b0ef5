"""The command `invariants`."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.table import Table

from invariants.errors import UsageError
from invariants.registry import registry

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Check the invariants of distributed training code.")


@app.callback()
def root() -> None:
    """Keep `list` a subcommand: typer drops the name of a lone command."""


@app.command("list")
def list_invariants() -> None:
    """List the invariants, those of installed packages included."""
    table = Table("id", "promise")
    for item in registry().values():
        table.add_row(item.id, item.promise)
    Console().print(table)


def main() -> None:
    """Entry point; a user's mistake is one line and exit status 2."""
    try:
        app()
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
