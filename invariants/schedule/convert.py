"""Schedules of other programs: torch's live objects, Megatron-LM's tables, DeepSpeed's instructions, plain tuples.

Theirs are known by their attributes alone; nothing is imported to read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any, Final, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.schedule.actions import LARGEST, NO_MICROBATCH, Action, Op, Row, parse_cell
from invariants.schedule.table import ALONE, CODES, FIRST, IDLE, NEXT, UNSHARD, B, F, Schedule
from invariants.schedule.text import parse_csv

Entry = tuple[str, int, int | None]
"""(kind, stage, microbatch): the kind as in the text form, `F` or `SEND_F`; None where the kind has no microbatch."""

_NAMES: Final = tuple(op.value for op in Op)
_IDLE: Final = " "
_NOTHING: Final = (NO_MICROBATCH, _IDLE, NO_MICROBATCH, None)
_KINDS: Final = {op.value: code for op, code in CODES.items()} | {_IDLE: IDLE}
_UNKNOWN: Final = IDLE + 1
_LETTERS: Final = np.array([_KINDS.get(chr(letter), _UNKNOWN) for letter in range(128)], np.uint8)


def of_torch(schedule: Any, *, lowered: bool = True) -> Schedule:
    """What a schedule object of `torch.distributed.pipelining` runs: with its sends and receives, or computation only.

    Of schedules with several stages a rank (torch 2.13: Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
    ZBVZeroBubble, DualPipeV, and `_PipelineScheduleRuntime` after `_load_csv`) it is `pipeline_order_with_comms` or
    `pipeline_order`, where a step at which a rank idles is an empty cell. GPipe and 1F1B do not run their
    `pipeline_order`, which for 1F1B gives the last stage the microbatches 1 to M: here their own `_step_microbatches`
    is run, once a rank, on stages that compute nothing, with all parameters taken as trained: some 10 microseconds an
    action, against a fraction of one.

    An object without such an order is a `UsageError`.
    """
    name = type(schedule).__name__
    if hasattr(schedule, "_stages"):
        source = "pipeline_order_with_comms" if lowered else "pipeline_order"
        if not (order := getattr(schedule, source, None)):
            raise UsageError(f"schedule {name}: {source} holds nothing: expected lowered={not lowered}")
        return of_actions(order)
    if not hasattr(schedule, "_stage"):
        raise UsageError(f"schedule {name}: expected a schedule object of torch.distributed.pipelining")
    rows: Iterable[Row] = _posted(schedule)
    if not lowered:
        rows = (tuple(cell for cell in row if isinstance(cell, Action) and cell.op.computes) for row in rows)
    return Schedule.of_rows(rows)


def _posted(schedule: Any) -> Iterator[Row]:
    """What each rank of a schedule with one stage a rank does."""
    # It imports torch, as whoever holds such an object has done.
    from invariants.targets.torch_rows import posted_row

    def again(stage: Any, _microbatches: int, loss_fn: Any) -> Any:
        made = copy(schedule)
        made._stage, made._loss_fn, made._has_backward, made._internal_losses = stage, loss_fn, True, []
        return made

    stages = schedule._num_stages
    for stage in range(stages):
        yield posted_row(cast(Any, again), stage, stages, schedule._n_microbatches, (stage > 0, True))


def of_actions(order: Mapping[int, Sequence[Any]] | Sequence[Sequence[Any]]) -> Schedule:
    """Torch's own form: of each rank its `_Action`s (stage, kind, microbatch, sub_actions), None where it idles.

    A rank that is missing, and an entry that is neither, are each a `UsageError`.
    """
    ranks = range(len(order))
    if not order or (isinstance(order, Mapping) and order.keys() != {*ranks}):
        found = ", ".join(map(str, order)) or "none"
        raise UsageError(f"schedule: rows of ranks {found}: expected one row a rank, from rank 0")
    columns = [_columns(rank, order[rank]) for rank in ranks]
    lengths = [len(each[0]) for each in columns]
    return Schedule.of_arrays(lengths, *(np.concatenate(column) for column in zip(*columns, strict=True)))


def of_tuples(rows: Iterable[Iterable[Entry | Sequence[Entry] | None]]) -> Schedule:
    """Of each rank, in order, its entries (kind, stage, microbatch); None where it idles.

    Several entries in a list are one cell: a batch of sends and receives, or computations that overlap. What the text
    form does not allow is a `UsageError`, as is anything that is not such a tuple.
    """
    return parse_csv("".join(f"{','.join(map(_text, row))}\n" for row in rows), "tuples")


def of_megatron(table: Sequence[tuple[int, int]], ranks: int, group: int | None = None, *, extra: int = 0) -> Schedule:
    """The order in which Megatron-LM computes, from its table of (microbatch, model chunk), one entry a forward.

    The table is what `get_schedule_table(microbatches, chunks, group)` returns; `group`, by default the number of
    ranks, is `microbatch_group_size_per_vp_stage`. Chunk c of rank r is stage c N + r. The k-th backward is the k-th
    entry with the chunks counted from the last. Before its first backward, rank r of N runs 2 (N - r - 1) +
    (chunks - 1) group + `extra` forwards and one, where `extra` is 1 with `overlap_moe_expert_parallel_comm`; with one
    chunk, which is the schedule without interleaving, N - r - 1 and one. Sources, in megatron-core 0.16:
    `get_schedule_table` and `get_pp_rank_microbatches` in `megatron/core/pipeline_parallel/schedules.py`,
    `convert_schedule_table_to_order` in `megatron/core/transformer/cuda_graphs.py`.

    A table that is none, and several chunks on one rank, which Megatron-LM does not interleave, are a `UsageError`.
    """
    try:
        microbatch, chunk = np.array(table, np.int64).T
    except ValueError:
        raise UsageError("schedule: expected a table of (microbatch, model chunk), one entry a forward") from None
    chunks, total = int(chunk.max()) + 1, len(chunk)
    if ranks < 1 or (ranks == 1 and chunks > 1):
        raise UsageError(f"schedule: ranks={ranks} with {chunks} model chunks: expected {min(chunks, 2)} or more")
    op, stage, microbatches = np.empty((3, ranks, 2 * total), np.int64)
    every = np.arange(total)
    for rank in range(ranks):
        ahead = ranks - rank - 1
        warmup = 2 * ahead + (chunks - 1) * (ranks if group is None else group) + extra if chunks > 1 else ahead
        forward = np.maximum(every, 2 * every - warmup)
        backward = np.minimum(every + total, 2 * every + warmup + 1)
        op[rank, forward], op[rank, backward] = F, B
        stage[rank, forward], stage[rank, backward] = chunk * ranks + rank, (chunks - 1 - chunk) * ranks + rank
        microbatches[rank, forward], microbatches[rank, backward] = microbatch, microbatch
    return Schedule.of_arrays([2 * total] * ranks, op.ravel(), stage.ravel(), microbatches.ravel())


_MOVES: Final = {
    "ForwardPass": "F",
    "BackwardPass": "B",
    "SendActivation": "SEND_F",
    "RecvActivation": "RECV_F",
    "SendGrad": "SEND_B",
    "RecvGrad": "RECV_B",
}
_FILLS: Final = ("LoadMicroBatch", "RecvActivation")
_REDUCES: Final = "ReduceGrads"
_PASSES_OVER: Final = ("LoadMicroBatch", "ReduceTiedGrads", "OptimizerStep")


def of_deepspeed(schedules: Iterable[Any]) -> Schedule:
    """What DeepSpeed's `TrainSchedule(micro_batches, stages, stage_id)` of each stage does, from stage 0, one a rank.

    An element is such an object (`InferenceSchedule` as well), or the list of its steps, each the list of its
    instructions: objects, or tuples (name, buffer_id). DeepSpeed names buffers; a microbatch is known by the buffer it
    is in, from the k-th `LoadMicroBatch` or `RecvActivation`, which brings microbatch k. So a buffer that is filled
    again too early shows as a microbatch lost. Sends and receives block in program order. `ReduceGrads` is
    `REDUCE_GRAD`; `ReduceTiedGrads` and `OptimizerStep` are passed over. Source: `deepspeed/runtime/pipe/schedule.py`,
    DeepSpeed 0.19.

    Another instruction, an empty buffer that is used, and stages out of order are each a `UsageError`.
    """
    rows = []
    for stage, schedule in enumerate(schedules):
        if getattr(schedule, "stage_id", stage) != stage:
            raise UsageError(
                f"schedule: stage {schedule.stage_id} at place {stage}: expected one a stage, from stage 0"
            )
        rows.append([*_instructions(stage, schedule.steps() if hasattr(schedule, "steps") else schedule)])
    return of_tuples(rows)


def _instructions(stage: int, steps: Iterable[Iterable[Any]]) -> Iterator[Entry]:
    filled: Counter[str] = Counter()
    held: dict[Any, int] = {}
    for number, step in enumerate(steps):
        for instruction in step:
            name, *rest = instruction if isinstance(instruction, tuple) else (type(instruction).__name__,)
            buffer = rest[0] if rest else getattr(instruction, "buffer_id", None)
            if name in _FILLS:
                held[buffer] = filled[name]
                filled[name] += 1
            if name in _MOVES:
                if buffer not in held:
                    place = f"stage {stage}, step {number}: {name}(buffer_id={buffer})"
                    raise UsageError(f"schedule: {place}: expected a buffer that {' or '.join(_FILLS)} has filled")
                yield _MOVES[name], stage, held[buffer]
            elif name == _REDUCES:
                yield Op.REDUCE_GRAD.value, stage, None
            elif name not in _PASSES_OVER:
                known = ", ".join(dict.fromkeys([*_MOVES, _REDUCES, *_PASSES_OVER]))
                raise UsageError(f"schedule: stage {stage}, step {number}: {name}: expected one of {known}")


def _text(entry: Entry | Sequence[Entry] | None) -> str:
    """The cell of an entry."""
    if entry is None:
        return '""'
    if isinstance(entry, list) and entry:
        parts = ";".join(map(_text, entry))
        return f"({parts}){'BATCH' if '_' in parts else 'OVERLAP_F_B'}"
    if not isinstance(entry, tuple) or len(entry) != 3 or entry[0] not in _NAMES:
        expected = f"(kind, stage, microbatch) with kind one of {', '.join(_NAMES)}, a list of such, or None"
        raise UsageError(f"schedule entry {entry!r}: expected {expected}")
    kind, stage, microbatch = entry
    return f"{stage}{kind}{'' if microbatch is None else microbatch}"


def _columns(rank: int, row: Sequence[Any]) -> tuple[NDArray[Any], ...]:
    """`op`, `stage`, `microbatch` and `joint` of one rank's actions."""
    try:
        try:
            fields = [*chain.from_iterable(row)]
        except TypeError:  # None is not iterable
            row = [_NOTHING if action is None else action for action in row]
            fields = [*chain.from_iterable(row)]
        joint = np.zeros(len(row), np.uint8)
        parts = fields[3::4]
        if any(parts):
            cells = [part or (action,) for action, part in zip(row, parts, strict=True)]
            sizes = np.fromiter(map(len, cells), np.int64, len(cells))
            joint = np.full(sizes.sum(), NEXT, np.uint8)
            joint[np.cumsum(sizes) - sizes] = [FIRST if part else ALONE for part in parts]
            fields = [*chain.from_iterable(chain.from_iterable(cells))]
        op = _codes(fields[1::4])
        stage = np.fromiter(fields[0::4], np.int64, len(op))
        microbatch = _microbatches(fields[2::4])
    except (KeyError, OverflowError, TypeError, ValueError):
        _refuse(rank, row)
    numbered = ((stage >= 0) == (op != IDLE)) & ((microbatch >= 0) == (op < UNSHARD)) & (op <= IDLE)
    numbered &= (stage <= LARGEST) & (microbatch <= LARGEST)
    if len(fields) != 4 * len(joint) or not numbered.all() or (op[joint != ALONE] > B).any():
        _refuse(rank, row)
    return op, stage, microbatch, joint


def _codes(kinds: Sequence[str]) -> NDArray[np.uint8]:
    """Codes of kinds, which are strings, though torch's are members of an enumeration, whose hash is slow."""
    letters = "".join(kinds)
    if len(letters) == len(kinds):
        return _LETTERS[np.frombuffer(letters.encode("ascii"), np.uint8)]
    return np.frombuffer(bytes(map(_KINDS.__getitem__, ",".join(kinds).split(","))), np.uint8)


def _microbatches(numbers: Sequence[int | None]) -> NDArray[np.int64]:
    try:
        return np.fromiter(numbers, np.int64, len(numbers))
    except TypeError:
        return np.fromiter([NO_MICROBATCH if each is None else each for each in numbers], np.int64, len(numbers))


def _refuse(rank: int, row: Sequence[Any]) -> NoReturn:
    """Name the first entry that is not an action."""
    expected = "expected an _Action (stage, kind, microbatch, sub_actions) of torch.distributed.pipelining, or None"
    for column, action in enumerate(row):
        try:
            if action not in (None, _NOTHING):
                parse_cell(_text(_entry(action)))
        except (TypeError, ValueError, UsageError):
            raise UsageError(f"schedule: rank {rank}, column {column}: {action!r}: {expected}") from None
    raise UsageError(f"schedule: rank {rank}: {expected}")


def _entry(action: Any) -> Any:
    stage, kind, microbatch, parts = action
    return [*map(_entry, parts)] if parts else (str.__str__(kind), stage, microbatch)
