"""Schedules of other programs: torch's objects, Megatron-LM's tables, DeepSpeed's instructions, tuples."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Op, parse_rows
from invariants.schedule.completeness import complete
from invariants.schedule.convert import of_actions, of_deepspeed, of_megatron, of_torch, of_tuples
from invariants.schedule.families import generate
from invariants.schedule.lowering import lower
from invariants.schedule.order import evaluate
from invariants.schedule.table import B, F, Schedule
from invariants.schedule.text import format_csv, parse_csv
from invariants.targets.torch_rows import posted_row

STAGES, MICROBATCHES = st.integers(0, 300), st.integers(0, 10**5)
KINDS = st.sampled_from([kind for kind in _ComputationType if kind.value != "OVERLAP_F_B"])
COMPUTING = st.sampled_from([_ComputationType(kind) for kind in "FIWB"])


def live(stage, kind, microbatch):
    return _Action(stage, kind, None if Op(kind.value).shards else microbatch)


ACTIONS = st.builds(live, STAGES, KINDS, MICROBATCHES)
PARTS = st.lists(st.builds(live, STAGES, COMPUTING, MICROBATCHES), min_size=1, max_size=3)
OVERLAPS = PARTS.map(lambda parts: _Action(-1, _ComputationType.OVERLAP_F_B, None, tuple(parts)))
ROWS = st.lists(st.lists(st.none() | ACTIONS | OVERLAPS, max_size=6), min_size=1, max_size=4)


def computations(schedule):
    """The rows without sends, receives and what moves parameters."""
    return tuple(
        tuple(cell for cell in row if not isinstance(cell, Action) or cell.op.computes) for row in schedule.rows()
    )


@given(rows=ROWS)
def test_actions_are_their_text(rows):
    text = "".join(",".join('""' if action is None else str(action) for action in row) + "\n" for row in rows)
    assert of_actions(rows) == of_actions(dict(enumerate(rows))) == parse_csv(text, "text")


@given(rows=st.lists(st.lists(st.builds(live, STAGES, COMPUTING, MICROBATCHES)), min_size=1, max_size=4))
def test_rows_of_computations_alone_are_their_text(rows):
    assert of_actions(rows) == parse_csv("".join(",".join(map(str, row)) + "\n" for row in rows), "text")


FORWARD = _Action(0, _ComputationType.FORWARD, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        7,
        "0F0",
        (0, _ComputationType.FORWARD),
        (0, "Q", 0, None),
        (0, "ZZ", 0, None),
        (0, "\u00e9", 0, None),
        (0, None, 0, None),
        (0, Op.FORWARD, 0, None),
        (0, "F", None, None),
        (0, "UNSHARD", 3, None),
        (-1, "F", 0, None),
        (0, "F", -2, None),
        (2**31, "F", 0, None),
        (2**80, "F", 0, None),
        _Action(-1, _ComputationType.OVERLAP_F_B),
        _Action(-1, _ComputationType.OVERLAP_F_B, None, (FORWARD, _Action(0, _ComputationType.SEND_F, 0))),
        _Action(-1, _ComputationType.OVERLAP_F_B, None, (FORWARD, None)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("rest", [[], [None], [_Action(0, _ComputationType.UNSHARD)]], ids=repr)
def test_what_is_no_action_is_named(wrong, rest):
    with pytest.raises(UsageError) as error:
        of_actions({0: [FORWARD], 1: [*rest, wrong, FORWARD]})
    assert str(error.value).startswith(f"schedule: rank 1, column {len(rest)}: {wrong!r}: expected an _Action")


def test_rows_of_missing_ranks_are_refused():
    for order, found in (({}, "none"), ([], "none"), ({1: []}, "1"), ({0: [], 2: []}, "0, 2")):
        with pytest.raises(UsageError, match=f"rows of ranks {found}: expected one row a rank"):
            of_actions(order)


@pytest.mark.parametrize(("name", "made"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
def test_schedules_of_one_stage_a_rank_are_what_they_run(torch_schedule, name, made):
    for ranks, microbatches in product(range(1, 5), range(1, 7)):
        if name == "gpipe" or microbatches >= ranks:
            schedule = torch_schedule(made.__name__, ranks, microbatches)
            posted = [posted_row(made, stage, ranks, microbatches, (stage > 0, True)) for stage in range(ranks)]
            assert of_torch(schedule).rows() == tuple(posted)
            assert of_torch(schedule) == lower(generate(name, ranks, microbatches), "batched")
            assert of_torch(schedule, lowered=False) == generate(name, ranks, microbatches)
            assert schedule._internal_losses == []


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
@pytest.mark.parametrize("defer", [False, True])
def test_live_schedules_of_several_stages_are_complete(torch_schedule, name, defer):
    for ranks, microbatches in ((1, 2), (2, 4), (3, 6), (4, 8)):
        schedule = torch_schedule(f"Schedule{name}", ranks, microbatches, defer_pp_recv=defer)
        lowered, plain = of_torch(schedule), of_torch(schedule, lowered=False)
        assert complete(lowered, 2 * ranks, microbatches) == []
        assert complete(plain, 2 * ranks, microbatches) == []
        assert computations(lowered) == computations(plain) == plain.rows()
        assert not plain.communicates
        assert evaluate(lowered, "buffered").finished


def test_an_object_without_an_order_is_refused(torch_schedule):
    schedule = torch_schedule("ScheduleInterleaved1F1B", 2, 4)
    stages, microbatches = schedule._stages, 4
    with pytest.raises(UsageError, match="_PipelineScheduleRuntime: pipeline_order holds nothing: expected lowered=Tr"):
        of_torch(_PipelineScheduleRuntime(stages, microbatches), lowered=False)
    with pytest.raises(UsageError, match="schedule int: expected a schedule object of torch"):
        of_torch(3)


def test_tuples_are_their_text():
    rows = [
        [("F", 0, 0), None, ("SEND_F", 0, 0), ("UNSHARD", 0, None)],
        [[("F", 1, np.int64(0)), ("B", 2, 3)], [("SEND_F", 1, 0), ("RECV_B", 1, 1)]],
        [],
        [None],
    ]
    text = '0F0,,0SEND_F0,0UNSHARD\r\n(1F0;2B3)OVERLAP_F_B,(1SEND_F0;1RECV_B1)BATCH\r\n\r\n""\r\n'
    assert format_csv(of_tuples(rows)) == text


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("X", 0, 0), r"entry \('X', 0, 0\): expected \(kind, stage, microbatch\) with kind one of F, I, W, B"),
        (("F,0B0\n", 0, 0), "expected .kind, stage, microbatch"),
        (("F", 0), "expected .kind, stage, microbatch"),
        ([], "expected .kind, stage, microbatch"),
        ("0F0", "expected .kind, stage, microbatch"),
        ([None], "column 1 of 1"),
        ([("F", 0, 0), ("SEND_F", 0, 0)], "a BATCH holds sends and receives only"),
        (("F", 0.5, 0), r"row 2 of 2 \(rank 1\), column 1 of 1: schedule cell '0\.5F0'"),
        (("F", 0, None), "schedule cell '0F': expected a microbatch after F"),
        (("UNSHARD", 0, 1), "expected no microbatch after UNSHARD"),
    ],
)
def test_wrong_tuples_are_named(entry, message):
    with pytest.raises(UsageError, match=message):
        of_tuples([[("F", 0, 0)], [entry]])


# Two ranks, two chunks, five microbatches in groups of three: the example in Megatron-LM's source.
TABLE = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]


def table(microbatches, chunks, group):
    """By its definition: groups of microbatches, in each all chunks one after the other."""
    groups = [range(first, min(first + group, microbatches)) for first in range(0, microbatches, group)]
    return [(microbatch, chunk) for each in groups for chunk in range(chunks) for microbatch in each]


def test_megatrons_example_literally():
    assert table(5, 2, 3) == TABLE
    rows = [" ".join(map(str, row)) for row in of_megatron(TABLE, 2, 3).rows()]
    assert rows == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4",
    ]


@given(ranks=st.integers(2, 5), rounds=st.integers(1, 3), chunks=st.integers(2, 3))
def test_megatrons_order_is_interleaved_1f1b(ranks, rounds, chunks):
    ours = generate("interleaved-1f1b", ranks, rounds * ranks, chunks)
    assert of_megatron(table(rounds * ranks, chunks, ranks), ranks) == ours


@given(
    ranks=st.integers(2, 4),
    microbatches=st.integers(1, 9),
    chunks=st.integers(1, 3),
    group=st.integers(1, 9),
    extra=st.integers(0, 1),
)
def test_megatrons_orders_are_complete(ranks, microbatches, chunks, group, extra):
    schedule = of_megatron(table(microbatches, chunks, group), ranks, group, extra=extra)
    assert complete(schedule, ranks * chunks, microbatches) == []
    for rank in range(ranks):
        ahead = ranks - rank - 1
        warmup = 2 * ahead + (chunks - 1) * group + extra if chunks > 1 else ahead
        warmup = min(warmup, microbatches * chunks)
        paired = [F, B] * (microbatches * chunks - warmup)
        row = schedule.op[schedule.starts[rank] : schedule.starts[rank + 1]]
        assert row.tolist() == [F] * warmup + paired + [B] * warmup


def test_megatrons_package_agrees_where_it_is_installed():
    theirs = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    graphs = pytest.importorskip("megatron.core.transformer.cuda_graphs")
    for ranks, microbatches, chunks, group in product(range(1, 5), range(1, 8), range(1, 4), range(1, 8)):
        made = theirs.get_schedule_table(microbatches, chunks, group)
        assert made == table(microbatches, chunks, group)
        if ranks == 1 < chunks:
            continue
        schedule = of_megatron(made, ranks, group)
        for rank in range(ranks):
            group_of_rank = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)  # noqa: B023
            communicator = SimpleNamespace(
                pp_group=group_of_rank, virtual_pipeline_model_parallel_size=None if chunks == 1 else chunks
            )
            *_, warmup, _ = theirs.get_pp_rank_microbatches(microbatches, chunks, group, p2p_communicator=communicator)
            signs = [(1 if cell.op is Op.FORWARD else -1) * (cell.stage // ranks + 1) for cell in schedule.row(rank)]
            assert signs == graphs.convert_schedule_table_to_order(warmup, chunks, made)


@pytest.mark.parametrize("wrong", [[], [3], [(0, 0, 0)], [("a", "b")], [(0, 0), (1,)]])
def test_a_wrong_table_is_refused(wrong):
    with pytest.raises(UsageError, match=r"expected a table of \(microbatch, model chunk\)"):
        of_megatron(wrong, 2)


def test_ranks_that_megatron_does_not_have_are_refused():
    for ranks, entries, least in ((0, TABLE, 2), (1, TABLE, 2), (0, [(0, 0)], 1)):
        with pytest.raises(UsageError, match=f"ranks={ranks} with .* model chunks: expected {least} or more"):
            of_megatron(entries, ranks)
    assert of_megatron([(0, 0), (1, 0)], 1) == generate("1f1b", 1, 2)


class Instruction:
    def __init__(self, buffer_id=None):
        self.buffer_id = buffer_id


NAMES = (
    *("LoadMicroBatch", "ForwardPass", "BackwardPass", "SendActivation", "RecvActivation", "SendGrad", "RecvGrad"),
    *("ReduceTiedGrads", "ReduceGrads", "OptimizerStep"),
)
INSTRUCTIONS = {name: type(name, (Instruction,), {}) for name in NAMES}


class TrainSchedule:
    """The instructions of `deepspeed.runtime.pipe.schedule.TrainSchedule`, from what its documentation says: 1F1B on a
    clock that alternates, forwards on steps of a stage's own parity, each exchange on the step after the computation.
    """

    def __init__(self, micro_batches, stages, stage_id):
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.buffers = max(2, min(stages - stage_id, micro_batches))

    def at(self, step):
        """Microbatch and whether it is a forward."""
        if step % 2 == self.stage_id % 2:
            return (step - self.stage_id) // 2, True
        return (step - 2 * self.stages + 1 + self.stage_id) // 2, False

    def steps(self):
        count = 2 * (self.micro_batches + self.stages - 1)
        before = -1
        for step in range(count):
            now, forward = self.at(step)
            yield [*self.exchange(before, now, forward), *self.compute(now, forward), *self.end(step == count - 1)]
            before = now

    def exchange(self, before, now, forward):
        neighbour = self.stage_id > 0 if forward else self.stage_id < self.stages - 1
        sent, received = ("SendGrad", "RecvActivation") if forward else ("SendActivation", "RecvGrad")
        posts = [(sent, before), (received, now)] if forward else [(received, now), (sent, before)]
        return [self.on(name, which) for name, which in posts if neighbour and which in range(self.micro_batches)]

    def compute(self, now, forward):
        if now in range(self.micro_batches):
            if forward and self.stage_id in (0, self.stages - 1):
                yield self.on("LoadMicroBatch", now)
            yield self.on("ForwardPass" if forward else "BackwardPass", now)

    def on(self, name, microbatch):
        return INSTRUCTIONS[name](microbatch % self.buffers)

    def end(self, last):
        return [INSTRUCTIONS[name]() for name in NAMES[-3:]] if last else []


def test_deepspeeds_instructions_literally():
    schedules = [TrainSchedule(3, 2, stage) for stage in range(2)]
    expected = parse_rows(
        row.split()
        for row in (
            "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0F2 0RECV_B1 0SEND_F2 0B1 0RECV_B2 0B2 0REDUCE_GRAD",
            "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1REDUCE_GRAD",
        )
    )
    assert of_deepspeed(schedules).rows() == expected
    plain = [
        [[(type(each).__name__, each.buffer_id)[: 1 + (each.buffer_id is not None)] for each in step] for step in steps]
        for steps in (schedule.steps() for schedule in schedules)
    ]
    assert plain[1][1] == [("RecvActivation", 0), ("LoadMicroBatch", 0), ("ForwardPass", 0)]
    assert of_deepspeed(plain).rows() == expected


def check_deepspeed(made):
    for stages, microbatches in product(range(1, 6), range(1, 8)):
        schedule = of_deepspeed([made(microbatches, stages, stage) for stage in range(stages)])
        assert complete(schedule, stages, microbatches) == []
        outcome = evaluate(schedule, "blocking")
        assert outcome.finished
        assert outcome.mismatches == ()
        assert computations(schedule) == generate("1f1b", stages, microbatches).rows()


def test_deepspeeds_schedule_is_1f1b_and_ends_with_blocking_sends():
    check_deepspeed(TrainSchedule)


def test_deepspeeds_package_agrees_where_it_is_installed():
    theirs = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    check_deepspeed(theirs.TrainSchedule)


def test_a_buffer_that_is_filled_too_early_loses_a_microbatch():
    schedules = [TrainSchedule(4, 4, stage) for stage in range(4)]
    schedules[0].buffers = 2
    problems = complete(of_deepspeed(schedules), 4, 4)
    assert any("0B0 is missing" in problem for problem in problems)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [[("ForwardPass", 1)]],
            r"stage 0, step 0: ForwardPass\(buffer_id=1\): expected a buffer that LoadMicroBatch or",
        ),
        ([[], [("CommitP2P",)]], "stage 0, step 1: CommitP2P: expected one of ForwardPass, BackwardPass"),
    ],
)
def test_wrong_instructions_are_named(steps, message):
    with pytest.raises(UsageError, match=message):
        of_deepspeed([steps])


def test_deepspeeds_stages_come_in_order():
    with pytest.raises(UsageError, match="stage 1 at place 0: expected one a stage, from stage 0"):
        of_deepspeed([TrainSchedule(2, 2, 1), TrainSchedule(2, 2, 0)])


def test_an_order_without_actions_is_a_schedule():
    assert of_actions([[], [None]]) == parse_csv('\n""\n', "text")
    assert len(of_actions([[]])) == 0
    assert isinstance(of_actions({0: []}), Schedule)
