"""What `invariants schedule` is given: files and names of families, costs, a window, files to write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Final

from invariants.errors import UsageError
from invariants.report import document
from invariants.schedule.costs import Costs, PerStage
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.lowering import LOWERINGS
from invariants.schedule.table import Schedule
from invariants.schedule.text import read_csv
from invariants.schedule.transports import TRANSPORTS

PICTURES: Final = ("svg", "png", "html")
FORMS: Final = (*PICTURES, "json")

_REAL: Final = tuple(name for name in TRANSPORTS if name != "nccl-one-stream")

_PRICES: Final = {
    "F": "forward",
    "I": "input_gradient",
    "W": "weight_gradient",
    "FB": "overlapped",
    "activations": "activation_bytes",
    "messages": "message_bytes",
    "bandwidth": "bandwidth",
    "latency": "latency",
}
_ONE_NUMBER: Final = ("bandwidth", "latency")
_NUMBER: Final = re.compile(r"[0-9]{1,18}/[0-9]{1,18}|[0-9]{1,18}(\.[0-9]{1,18})?(e[+-]?[0-9]{1,2})?", re.IGNORECASE)


@dataclass(frozen=True)
class Sizes:
    """What `--pp`, `--microbatches` and `--virtual` say: ranks, microbatches, stages a rank; None where not given."""

    ranks: int | None
    microbatches: int | None
    virtual: int | None

    def __post_init__(self) -> None:
        given = {"--pp": self.ranks, "--microbatches": self.microbatches, "--virtual": self.virtual}
        for option, value in given.items():
            if value is not None and value < 1:
                raise UsageError(f"{option} {value}: expected 1 or more")


@dataclass(frozen=True)
class Source:
    """One schedule to judge, with the numbers of stages and microbatches that it should have.

    `family` names the closed forms that it is compared with, None where there are none.
    """

    name: str
    schedule: Schedule
    family: str | None
    stages: int
    microbatches: int

    @property
    def virtual(self) -> int:
        """Stages a rank, of those that have most."""
        return max(1, -(-self.stages // self.schedule.ranks))


def sources(given: Sequence[str], sizes: Sizes, family: str | None) -> Iterator[Source]:
    """The schedules that are named; `family` is what a file is to be compared with, if anything.

    Where one of several families leaves the number of stages a rank open, `--virtual` is meant for that one.
    """
    if family is not None and family not in FAMILIES:
        raise UsageError(f"--family {family!r}: expected one of {', '.join(FAMILIES)}")
    among_open = any(each in FAMILIES and FAMILIES[each].virtual is None for each in given)
    for each in given:
        if each.endswith(".csv") or Path(each).is_file():
            yield _of_file(each, sizes, family)
        elif each in FAMILIES:
            yield _of_family(each, replace(sizes, virtual=None) if among_open and FAMILIES[each].virtual else sizes)
        else:
            raise UsageError(f"schedule {each!r}: expected a file FILE.csv, or one of {', '.join(FAMILIES)}")


def _of_file(name: str, sizes: Sizes, family: str | None) -> Source:
    schedule = read_csv(name)
    if not schedule.computes.any():
        raise UsageError(f"schedule {name}: nothing is computed: expected a forward and a backward at the least")
    if sizes.ranks not in (None, schedule.ranks):
        raise UsageError(f"--pp {sizes.ranks}: {name} has {schedule.ranks} ranks, one a row: leave --pp out for a file")
    each = sizes.virtual
    if each is None and family is not None:
        each = -(-schedule.stages // schedule.ranks)  # on all ranks as many, so that a last stage may be missed
    stages = schedule.stages if each is None else schedule.ranks * each
    microbatches = schedule.microbatches if sizes.microbatches is None else sizes.microbatches
    return Source(Path(name).name, schedule, family, stages, microbatches)


def _of_family(name: str, sizes: Sizes) -> Source:
    if sizes.ranks is None or sizes.microbatches is None:
        lacking = "--pp, its number of ranks" if sizes.ranks is None else "--microbatches (-m)"
        raise UsageError(f"schedule {name}: expected {lacking}")
    schedule = generate(name, sizes.ranks, sizes.microbatches, sizes.virtual or 1)
    return Source(name, schedule, name, schedule.stages, sizes.microbatches)


def costs(text: str) -> Costs:
    """Costs from such as `F=1,I=1:1:2,W=1,latency=0.1`; what is not named keeps its default."""
    fields: dict[str, object] = {}
    for part in text.split(",") if text else ():
        key, equals, value = part.strip().partition("=")
        field = "overlap" if key == "overlap" and value in ("yes", "no") else _PRICES.get(key)
        if field in fields:
            raise UsageError(f"--cost {part.strip()}: {key} is given twice")
        if field == "overlap":
            fields[field] = value == "yes"
        elif field and equals:
            fields[field] = _numbers(part.strip(), value, several=key not in _ONE_NUMBER)
        else:
            raise UsageError(
                f"--cost {part.strip()!r}: expected KEY=NUMBER or, one a stage, KEY=NUMBER:NUMBER:..., with KEY one of "
                f"{', '.join(_PRICES)}; or overlap=yes, overlap=no (a full backward costs I + W)"
            )
    return Costs(**fields)  # type: ignore[arg-type]


def scaled(price: Costs, weight: Fraction) -> Costs:
    """The costs of stages that hold `weight` of the layers that `price` is meant for; messages stay as large."""

    def part(value: PerStage) -> PerStage:
        numbers = value if isinstance(value, Sequence) else (value,)
        parts = tuple(weight * Fraction(number) for number in numbers)
        return parts if isinstance(value, Sequence) else parts[0]

    return replace(
        price,
        forward=part(price.forward),
        input_gradient=part(price.input_gradient),
        weight_gradient=part(price.weight_gradient),
        overlapped=None if price.overlapped is None else part(price.overlapped),
        activation_bytes=None if price.activation_bytes is None else part(price.activation_bytes),
    )


def _numbers(part: str, text: str, *, several: bool) -> Fraction | tuple[Fraction, ...]:
    try:
        numbers = tuple(map(_number, text.split(":")))
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"--cost {part}: expected numbers such as 2, 0.5 or 1/3, with : between stages") from None
    if len(numbers) > 1 and not several:
        raise UsageError(f"--cost {part}: expected one number for all links")
    return numbers if len(numbers) > 1 else numbers[0]


def _number(text: str) -> Fraction:
    if not _NUMBER.fullmatch(text):
        raise ValueError(text)
    return Fraction(text)


def transports(given: Sequence[str]) -> tuple[str, ...]:
    """The transports that are named; `all` stands for those of real backends, as does naming none."""
    return tuple(dict.fromkeys(each for name in given or ("all",) for each in (_REAL if name == "all" else (name,))))


def lowering(name: str) -> str:
    """The name of a lowering that exists."""
    if name not in LOWERINGS:
        raise UsageError(f"--lowering {name!r}: expected one of {', '.join(LOWERINGS)}")
    return name


def read_window(text: str | None) -> tuple[float, float] | None:
    """Begin and end of the part of time to draw, from `BEGIN:END`."""
    if text is None:
        return None
    try:
        begin, end = (float(_number(each)) for each in text.split(":"))
    except (ValueError, ZeroDivisionError):
        begin = end = 0.0
    if not 0 <= begin < end:
        raise UsageError(f"--window {text}: expected BEGIN:END, two times in the unit of the costs, such as 0:40")
    return begin, end


def outputs(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """The files to write, each with its form; a `UsageError` where one cannot be written, before any work is done."""
    found = []
    for path in paths:
        form = path.suffix.lower().removeprefix(".")
        if form not in FORMS:
            raise UsageError(
                f"-o {path}: expected a name that ends in one of {', '.join(f'.{each}' for each in FORMS)}"
            )
        found.append((document.check_writable(path, "-o"), form))
    if any(form in PICTURES for _, form in found):
        from invariants.report.schedule_picture import require_matplotlib

        require_matplotlib()
    return found
