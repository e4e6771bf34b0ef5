"""What the evaluation decides, gloo does: schedules run on real ranks, with blocking and with posted messages."""

import pytest

from invariants.schedule.actions import parse_rows
from invariants.schedule.convert import of_torch
from invariants.schedule.families import generate
from invariants.schedule.lowering import lower
from invariants.schedule.minimal import smallest
from invariants.schedule.order import evaluate
from invariants.schedule.table import Schedule
from invariants.world.pool import RankFailed


def carry_out(ctx, texts, homes, posted):
    """Do what this rank's row says: each message is its own name, and what else arrived is counted."""
    import torch
    import torch.distributed as dist

    from invariants.schedule.actions import Op, actions_of, parse_cell

    torch.set_num_threads(1)
    waiting, sending, swapped = {}, [], 0

    def name(action, stage):
        return torch.tensor([stage, int(action.op.forward), action.microbatch])

    def post(action):
        peer = homes[action.peer]
        if action.op.sends:
            message = name(action, action.stage)
            return dist.isend(message, peer), message, None
        message = torch.full((3,), -1)
        return dist.irecv(message, peer), message, name(action, action.peer)

    def finish(work, message, expected):
        work.wait()
        return 0 if expected is None else int(not torch.equal(message, expected))

    for text in texts[ctx.rank]:
        cell = parse_cell(text)
        for action in actions_of(cell):
            needs = (action.stage, Op.RECV_F if action.op is Op.FORWARD else Op.RECV_B, action.microbatch)
            if action.op.computes and action.op is not Op.WEIGHT_GRADIENT and needs in waiting:
                swapped += finish(*waiting.pop(needs))
        pending = [(action, post(action)) for action in actions_of(cell) if action.op.exchanges]
        for action, operation in pending:
            if not posted:
                swapped += finish(*operation)
            elif action.op.sends:
                sending.append(operation)
            else:
                waiting[action.stage, action.op, action.microbatch] = operation
    return swapped + sum(finish(*operation) for operation in [*sending, *waiting.values()])


def run(worlds, schedule, posted):
    rows = schedule.rows()
    homes = {stage: int(rank) for stage, rank in enumerate(schedule.placement)}
    texts = [list(map(str, row)) for row in rows]
    return sum(worlds(schedule.ranks).run(carry_out, texts, homes, posted))


NEIGHBOURS = [(name, how) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2") for how in ("receive-first", "textbook")]
RINGS = [("interleaved-1f1b", how) for how in ("in-order", "batched", "textbook")] + [("zb-v", "in-order")]


@pytest.mark.parametrize(("name", "how"), [*NEIGHBOURS, *RINGS])
def test_blocking_messages_hang_where_the_evaluation_says_so(worlds, name, how):
    schedule = lower(generate(name, 2, 4, 2 if name == "interleaved-1f1b" else 1), how)
    if evaluate(schedule, "blocking").finished:
        assert run(worlds, schedule, posted=False) == 0
    else:
        with pytest.raises(RankFailed, match="deadlock: ranks 0 -> 1 -> 0 wait for each other"):
            run(worlds, smallest(schedule, "blocking"), posted=False)


def test_both_kinds_are_among_them():
    ends = [evaluate(lower(generate(name, 2, 4), how), "blocking").finished for name, how in (*NEIGHBOURS, *RINGS)]
    assert min(map(ends.count, (True, False))) >= 3


@pytest.mark.parametrize("name", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_posted_messages_are_swapped_where_the_evaluation_says_so(worlds, torch_schedule, name):
    schedule = of_torch(torch_schedule(name, 2, 4, defer_pp_recv=True))
    outcome = evaluate(schedule, "gloo")
    assert outcome.finished
    assert run(worlds, schedule, posted=True) == len(outcome.mismatches) > 0


def test_a_receive_out_of_send_order_gets_another_message(worlds):
    rows = [
        ["0F0", "0F1", "0SEND_F0", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F1", "1RECV_F0", "1F0", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"],
    ]
    schedule = Schedule.of_rows(parse_rows(rows))
    assert run(worlds, schedule, posted=True) == len(evaluate(schedule, "gloo").mismatches) == 2
