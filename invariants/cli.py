"""The command `invariants`: what it is called with. Each command's work is in `invariants.commands`."""

from __future__ import annotations

import functools
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn, ParamSpec

import typer

from invariants.errors import UsageError, WorldError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # its boxes would make several lines of one mistake
    help="Check the invariants of distributed training code.",
)

P = ParamSpec("P")
NOBODY_READS = 128 + signal.SIGPIPE
"""Exit status where standard output was closed, as by `| head`: that of a process that the signal ends."""


def _ends(command: Callable[P, int]) -> Callable[P, NoReturn]:
    """Make the status that `command` returns that of the process; a mistake is one line, an interruption none."""

    @functools.wraps(command)
    def ended(*args: P.args, **kwargs: P.kwargs) -> NoReturn:
        try:
            status = command(*args, **kwargs)
        except UsageError as error:
            print(error, file=sys.stderr)
            status = 2
        except WorldError as error:
            print(f"nothing could be judged: {error}", file=sys.stderr)
            status = 3
        except KeyboardInterrupt:
            status = 130
        except (Exception, SystemExit) as error:  # whatever status an exit asks for, it is no verdict; 1 would be one
            if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):  # rich makes it one
                raise typer.Exit(NOBODY_READS) from None
            traceback.print_exc()
            print("nothing could be judged: the error above was not expected", file=sys.stderr)
            status = 3
        raise typer.Exit(status)

    return ended


Spec = Annotated[str, typer.Argument(metavar="TARGET", help="package.module:name of a target, or torch")]
Json = Annotated[Path | None, typer.Option("--json", metavar="OUT", help="write what was found to this file")]
Seed = Annotated[int, typer.Option(help="what cases are drawn from")]
Largest = Annotated[int, typer.Option("--max-world", help="most ranks of a case")]
Deadline = Annotated[float, typer.Option(help="seconds that each call of a world may take")]
Backend = Annotated[str, typer.Option(help="auto, gloo or nccl")]
Only = Annotated[list[str] | None, typer.Option(metavar="ID", help="judge this invariant; may be given again")]


@app.command("check")
@_ends
def check_target(
    target: Spec,
    cases: Annotated[int, typer.Option(help="number of cases to draw")] = 24,
    seed: Seed = 0,
    known: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="known violations; may be given again")
    ] = None,
    json: Json = None,
    only: Only = None,
    max_world: Largest = 8,
    deadline: Deadline = 30.0,
    backend: Backend = "auto",
) -> int:
    """Judge a target by every invariant, on drawn cases.

    Exit status: 0 all hold, 1 violated, 2 usage, 3 something could not be judged, 5 nothing was judged.
    """
    from invariants.commands.check import Plan, check
    from invariants.commands.session import Worlds

    plan = Plan(target, cases, seed, tuple(known or ()), tuple(only or ()), json)
    return check(plan, Worlds(backend, deadline, max_world))


@app.command("replay")
@_ends
def replay_case(
    case: Annotated[
        str, typer.Argument(metavar="TARGET/CASE", help="the target and the case, as a failure prints them")
    ],
    fault: Annotated[str | None, typer.Option(metavar="NAME", help="plant this fault of the target")] = None,
    only: Only = None,
    max_world: Largest = 8,
    deadline: Deadline = 30.0,
    backend: Backend = "auto",
) -> int:
    """Run one case and judge it; exit status as of check."""
    from invariants.commands.replay import replay
    from invariants.commands.session import Worlds

    return replay(case, fault, tuple(only or ()), Worlds(backend, deadline, max_world))


@app.command("faults")
@_ends
def plant_faults(
    target: Spec,
    only: Annotated[list[str] | None, typer.Option(metavar="FAULT", help="this fault; may be given again")] = None,
    cases: Annotated[int, typer.Option(help="number of cases to draw; few of them are run")] = 200,
    seed: Seed = 0,
    tries: Annotated[int, typer.Option(help="most cases to run under a fault until it is caught")] = 6,
    variants: Annotated[int, typer.Option(help="cases to judge under a harmless variant")] = 2,
    json: Json = None,
    max_world: Largest = 8,
    deadline: Deadline = 30.0,
    backend: Backend = "auto",
) -> int:
    """Plant each fault of a target, and print which invariant catches which.

    Exit status: 0 every fault is caught and no harmless variant flagged, 1 otherwise, 2 usage.
    """
    from invariants.commands.faults import Plan, faults
    from invariants.commands.session import Worlds

    plan = Plan(target, tuple(only or ()), cases, seed, tries, variants, json)
    return faults(plan, Worlds(backend, deadline, max_world))


@app.command("schedule")
@_ends
def judge_schedules(
    schedules: Annotated[
        list[str], typer.Argument(metavar="FILE.csv|NAME...", help="torch's CSV, or the name of a family; several")
    ],
    pp: Annotated[int | None, typer.Option(help="number of ranks, for a name")] = None,
    microbatches: Annotated[int | None, typer.Option("--microbatches", "-m", help="number of microbatches")] = None,
    virtual: Annotated[int | None, typer.Option(help="stages a rank")] = None,
    family: Annotated[
        str | None, typer.Option(metavar="NAME", help="compare files with this family's formulas")
    ] = None,
    transport: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="what sends wait for; all, and may be given again")
    ] = None,
    lowering: Annotated[str, typer.Option(help="how sends and receives are added where there are none")] = "in-order",
    cost: Annotated[str, typer.Option(metavar="KEY=TIME,...", help="such as F=1,I=1:1:2,W=1,latency=0.1")] = "",
    timeline: Annotated[bool, typer.Option("--timeline", help="draw in the terminal")] = False,
    window: Annotated[str | None, typer.Option(metavar="BEGIN:END", help="part of time to draw")] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", "-o", metavar="FILE", help=".svg, .png, .html or .json; may be given again"),
    ] = None,
) -> int:
    """Judge pipeline schedules, without running them: complete, free of deadlock, as idle and as large as promised.

    Exit status: 0 all hold, 1 violated, 2 usage, 3 something could not be judged.
    """
    from invariants.commands.schedule import Plan, schedule
    from invariants.commands.schedule_sources import Sizes

    sizes = Sizes(pp, microbatches, virtual)
    plan = Plan(schedules, sizes, family, tuple(transport or ()), lowering, cost, timeline, window, tuple(out or ()))
    return schedule(plan)


@app.command("list")
@_ends
def list_invariants() -> int:
    """List the invariants, those of installed packages and of the conftest in this folder included."""
    from invariants.commands.listing import listing

    return listing()


def main() -> None:
    """Entry point."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # targets beside the caller, as with `python -m`
    # A cancelled CI job ends as by Ctrl-C: what was started is cleaned up.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()
