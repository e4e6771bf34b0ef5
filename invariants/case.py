"""A case: one point of the input space, written as short text that runs it again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args

from invariants.errors import UsageError

Precision = Literal["float32", "float64"]
OptimizerKind = Literal["adam", "adamw", "sgd"]
Mask = Literal["full", "uneven", "holes"]
"""Which tokens count: all; a random part of each sample; the same with whole samples left out."""


@dataclass(frozen=True)
class Topology:
    """A world as a grid of named axes, outermost first: `Topology.of(pp=2, dp=2)`; rank = pp * size(dp) + dp."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if not names:
            raise UsageError("topology without axes: expected one at least, for example Topology.of(dp=1)")
        for name, size in self.axes:
            if not name.isalpha() or names.count(name) > 1:
                raise UsageError(f"topology axis {name!r}: expected a name of letters that occurs once")
            if size < 1:
                raise UsageError(f"topology axis {name}={size}: expected a size of 1 or more")

    @classmethod
    def of(cls, **sizes: int) -> Topology:
        """Build from keywords, outermost axis first."""
        return cls(tuple(sizes.items()))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along `axis`; 1 where the topology has no such axis."""
        return dict(self.axes).get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of `rank` on each axis."""
        position = {}
        for name, size in reversed(self.axes):
            rank, position[name] = divmod(rank, size)
        return position

    def rank(self, **coordinate: int) -> int:
        """Rank at a position; axes that are not named count as 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def peers(self, axis: str, rank: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` along `axis` only, in the order of the axis, `rank` included."""
        here = self.coordinate(rank)
        if axis not in here:
            return (rank,)
        return tuple(self.rank(**{**here, axis: index}) for index in range(self.size(axis)))

    def __str__(self) -> str:
        return ".".join(f"{name}{size}" for name, size in self.axes)


@dataclass(frozen=True)
class Model:
    """Sizes of the small GPT that the embedded targets train; a target with a model of its own ignores them."""

    layers: int = 2
    width: int = 8
    heads: int = 2
    vocabulary: int = 11
    sequence: int = 4
    tied: bool = False


@dataclass(frozen=True)
class OptimizerSpec:
    """The update rule; betas (0.9, 0.999) and eps 1e-8, momentum 0, as torch's defaults."""

    kind: OptimizerKind = "adam"
    lr: float = 1e-2
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Step:
    """One optimizer step over a window of `batches` global batches."""

    batches: int = 1

    def __str__(self) -> str:
        return str(self.batches)


@dataclass(frozen=True)
class Save:
    """A checkpoint, which a fresh world loads to run what is left of the history."""

    def __str__(self) -> str:
        return "save"


Operation = Step | Save


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one run does, from the world to the last step.

    A global batch is `dp * microbatches * microbatch_size` samples: replica d takes the d-th contiguous block, and cuts
    it into `microbatches` contiguous microbatches. `split` is the number of layers of each stage (embedding and head
    are layers of their own), or None where the target is to decide. `frozen` are indices of layers that are not
    trained. `options` carries what a target's own cases need, as text.
    """

    topology: Topology = field(default_factory=lambda: Topology.of(pp=1, dp=1))
    schedule: str = "gpipe"
    microbatches: int = 1
    microbatch_size: int = 1
    model: Model = Model()
    split: tuple[int, ...] | None = None
    precision: Precision = "float32"
    optimizer: OptimizerSpec = OptimizerSpec()
    mask: Mask = "full"
    frozen: tuple[int, ...] = ()
    history: tuple[Operation, ...] = (Step(), Step(), Step())
    seed: int = 0
    options: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("microbatches", "microbatch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"case: {name}={getattr(self, name)}: expected 1 or more")
        for name, allowed in (("precision", Precision), ("mask", Mask)):
            if getattr(self, name) not in get_args(allowed):
                raise UsageError(
                    f"case: {name}={getattr(self, name)!r}: expected one of {', '.join(get_args(allowed))}"
                )
        if self.optimizer.kind not in get_args(OptimizerKind):
            kinds = ", ".join(get_args(OptimizerKind))
            raise UsageError(f"case: optimizer={self.optimizer.kind!r}: expected one of {kinds}")
        self._check_text()
        if not any(isinstance(operation, Step) for operation in self.history):
            raise UsageError("case: history has no step: expected for example history=1.2.save.1.1")
        if any(isinstance(operation, Step) and operation.batches < 1 for operation in self.history):
            raise UsageError("case: history has a step of no batches: expected 1 or more each")
        if self.history.count(Save()) > 1:
            raise UsageError("case: history saves more than once: expected one save at most")

    def _check_text(self) -> None:
        """Refuse what `str` could not write so that `parse` reads it again."""
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"case: seed={self.seed}: expected 0 or more and less than 2**32")
        if self.split == ():
            raise UsageError("case: split=(): expected a number of layers for each stage, or None")
        if math.isnan(self.optimizer.lr) or math.isnan(self.optimizer.weight_decay):
            raise UsageError("case: lr or decay is nan: expected a number")
        names = [name for name, _ in self.options]
        for name, value in (("schedule", self.schedule), *self.options):
            if names.count(name) > 1:
                raise UsageError(f"case: option {name!r} is given twice: expected each name once")
            for text, marks in ((name, ",="), (value, ",")):
                if not isinstance(text, str) or not text or not text.isprintable() or set(text) & set(marks):
                    what = f"schedule {value!r}" if name == "schedule" else f"option {name!r} = {value!r}"
                    raise UsageError(
                        f"case: {what}: expected printable texts, not empty, without ',', no '=' in a name"
                    )

    @property
    def batch_size(self) -> int:
        """Samples of one global batch, over all replicas."""
        return self.topology.size("dp") * self.microbatches * self.microbatch_size

    @property
    def windows(self) -> tuple[int, ...]:
        """Global batches of each optimizer step, in order."""
        return tuple(operation.batches for operation in self.history if isinstance(operation, Step))

    @property
    def save_after(self) -> int | None:
        """Number of steps done when the history saves; None where it does not."""
        if Save() not in self.history:
            return None
        before = self.history[: self.history.index(Save())]
        return sum(isinstance(operation, Step) for operation in before)

    def single(self) -> Case:
        """The same training on one rank, in one microbatch, in float64: the reference's case."""
        size = self.batch_size
        axes = tuple((name, 1) for name, _ in self.topology.axes)
        return replace(
            self, topology=Topology(axes), microbatches=1, microbatch_size=size, split=None, precision="float64"
        )

    def __str__(self) -> str:
        default = _texts(Case())
        return ",".join(f"{key}={text}" for key, text in _texts(self).items() if default.get(key) != text) or "default"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read what `str(case)` wrote; a `UsageError` names the part that cannot be read."""
        texts = {} if text == "default" else dict(_parts(text))
        return _assemble(texts)


def _texts(case: Case) -> dict[str, str]:
    model, optimizer = case.model, case.optimizer
    texts = {
        "topology": str(case.topology),
        "schedule": case.schedule,
        "m": str(case.microbatches),
        "mb": str(case.microbatch_size),
        **{f.name: _plain(getattr(model, f.name)) for f in fields(model)},
        "split": "auto" if case.split is None else "+".join(map(str, case.split)),
        "precision": case.precision,
        "optimizer": optimizer.kind,
        "lr": repr(optimizer.lr),
        "decay": repr(optimizer.weight_decay),
        "mask": case.mask,
        "frozen": "+".join(map(str, case.frozen)) or "none",
        "history": ".".join(map(str, case.history)),
        "seed": str(case.seed),
    }
    return {**texts, **{f"x.{name}": value for name, value in case.options}}


def _plain(value: Any) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _parts(text: str) -> Iterator[tuple[str, str]]:
    known = _texts(Case())
    seen: set[str] = set()
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise UsageError(f"case part {part!r}: expected key=value, for example topology=pp2.dp2,m=4")
        if key not in known and not key.startswith("x."):
            raise UsageError(f"case part {part!r}: unknown key; expected one of {', '.join(known)} or x.NAME")
        if key in seen:
            raise UsageError(f"case part {part!r}: {key} is given twice")
        seen.add(key)
        yield key, value


def _assemble(given: dict[str, str]) -> Case:
    texts = {**_texts(Case()), **given}

    def read(key: str, convert: Callable[[str], Any], expected: str) -> Any:
        try:
            return convert(texts[key])
        except (ValueError, KeyError) as error:
            raise UsageError(f"case part '{key}={texts[key]}': expected {expected}") from error

    number = "a whole number"
    return Case(
        topology=read("topology", _topology, "axes and sizes such as pp2.dp2"),
        schedule=texts["schedule"],
        microbatches=read("m", int, number),
        microbatch_size=read("mb", int, number),
        model=Model(
            **{f.name: read(f.name, int, number) for f in fields(Model) if f.name != "tied"},
            tied=read("tied", {"no": False, "yes": True}.__getitem__, "yes or no"),
        ),
        split=None if texts["split"] == "auto" else read("split", _integers, "auto, or layer counts such as 2+1"),
        precision=cast(Precision, texts["precision"]),
        optimizer=OptimizerSpec(
            cast(OptimizerKind, texts["optimizer"]), read("lr", float, "a number"), read("decay", float, "a number")
        ),
        mask=cast(Mask, texts["mask"]),
        frozen=() if texts["frozen"] == "none" else read("frozen", _integers, "none, or layer indices such as 0+2"),
        history=read("history", _history, "steps by their number of batches, and save, such as 1.2.save.1.1"),
        seed=read("seed", int, number),
        options=tuple((key[2:], value) for key, value in texts.items() if key.startswith("x.")),
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+"))


def _topology(text: str) -> Topology:
    axes = []
    for part in text.split("."):
        name = part.rstrip("0123456789")
        axes.append((name, int(part[len(name) :])))
    return Topology(tuple(axes))


def _history(text: str) -> tuple[Operation, ...]:
    return tuple(Save() if part == "save" else Step(int(part)) for part in text.split("."))
