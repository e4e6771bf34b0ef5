"""`invariants list`: which invariants exist, and what each promises."""

from __future__ import annotations

import sys

from rich.table import Table

from invariants.commands.session import registered
from invariants.report.terminal import console


def listing() -> int:
    """Print all invariants, those of installed packages and of the conftest here included; returns the exit status."""
    table = Table("id", "promise")
    for item in registered().values():
        table.add_row(item.id, item.promise)
    console(sys.stdout).print(table)
    return 0
