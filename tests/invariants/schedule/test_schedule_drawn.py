"""What is drawn is right, or what it says was changed; all that should come up does."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from invariants.schedule import drawn
from invariants.schedule.actions import Batch, Overlap
from invariants.schedule.completeness import complete
from invariants.schedule.drawn import MUTATIONS, mutated_schedules, schedules
from invariants.schedule.families import FAMILIES
from invariants.schedule.lowering import LOWERINGS, lower
from invariants.schedule.order import evaluate
from invariants.schedule.table import IDLE, B, I
from invariants.schedule.text import format_csv
from invariants.schedule.timeline import simulate

UNSHRUNK = settings(max_examples=5000, database=None, phases=[Phase.generate])


def cells(schedule):
    return Counter(cell for row in schedule.rows() for cell in row)


@given(schedule=schedules())
def test_right_ones_are_complete_and_their_computation_ends(schedule):
    assert complete(schedule, schedule.stages, schedule.microbatches) == []
    assert len(simulate(schedule).index) == schedule.computes.sum()


@given(schedule=schedules(lowered=False))
def test_right_ones_end_in_the_lowering_that_promises_it(schedule):
    outcome = evaluate(lower(schedule, "in-order"), "blocking")
    assert outcome.finished
    assert outcome.mismatches == ()


@given(schedule=schedules(max_ranks=4, max_microbatches=5, max_virtual=1, lowered=False))
def test_sizes_are_kept(schedule):
    assert schedule.ranks <= 4
    assert schedule.microbatches <= 5
    assert np.bincount(schedule.placement, minlength=1).max() <= 1
    assert not schedule.communicates


def test_each_family_and_each_lowering_is_drawn(monkeypatch):
    seen = set()
    for name in ("generate", "lower"):
        kept = getattr(drawn, name)
        monkeypatch.setattr(
            drawn,
            name,
            lambda *args, kept=kept: (seen.update(arg for arg in args if isinstance(arg, str)), kept(*args))[1],
        )

    @settings(max_examples=600, database=None, derandomize=True, phases=[Phase.generate])
    @given(schedules(max_microbatches=6).map(lambda _: None))
    def draw_many(_):
        pass

    draw_many()
    assert seen >= {*FAMILIES, *LOWERINGS}


FEATURES = {
    "an empty rank": lambda schedule: bool((np.diff(schedule.starts) == 0).any()),
    "an empty cell": lambda schedule: IDLE in schedule.op,
    "an overlap": lambda schedule: any(isinstance(cell, Overlap) for cell in cells(schedule)),
    "a batch": lambda schedule: any(isinstance(cell, Batch) for cell in cells(schedule)),
    "whole and split": lambda schedule: B in schedule.op and I in schedule.op,
    "fewer microbatches than ranks": lambda schedule: schedule.microbatches < schedule.ranks,
    "two stages on a rank": lambda schedule: bool((np.bincount(schedule.placement) > 1).any()),
    "neighbours on a rank": lambda schedule: bool((np.diff(schedule.placement) == 0).any()),
    "stages in falling order": lambda schedule: bool((np.diff(schedule.placement) < 0).any()),
    "a deadlock": lambda schedule: not evaluate(schedule, "blocking").finished,
    "a swap": lambda schedule: bool(evaluate(schedule, "buffered").mismatches),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_what_is_rare_is_drawn(feature):
    assert find(schedules(), FEATURES[feature], settings=UNSHRUNK)


def test_examples_shrink_to_the_smallest():
    assert format_csv(find(schedules(), lambda _: True)) == "0F0,0B0\r\n"
    lowered, fixed = schedules(lowered=True), settings(derandomize=True, database=None, max_examples=500)
    smallest = find(lowered, lambda schedule: not evaluate(schedule, "blocking").finished, settings=fixed)
    assert (smallest.ranks, smallest.stages, smallest.microbatches) == (2, 2, 2)


@given(mutated=mutated_schedules())
def test_one_thing_is_changed(mutated):
    mutation = mutated.change.partition(":")[0]
    before, after = cells(mutated.right), cells(mutated.schedule)
    assert mutated.schedule != mutated.right
    assert complete(mutated.right, mutated.right.stages, mutated.right.microbatches) == []
    size = after.total() - before.total()
    assert size == {"drop": -1, "duplicate": 1}.get(mutation, 0)
    assert sum(((before - after) + (after - before)).values()) == abs(size)
    assert all(str(cell) in mutated.change for cell in (before - after) + (after - before))


@given(mutated=mutated_schedules(("drop", "duplicate", "misplace")))
def test_what_is_missing_or_twice_or_elsewhere_is_found(mutated):
    assert complete(mutated.schedule, mutated.right.stages, mutated.right.microbatches)


@given(mutated=mutated_schedules(("cross",)))
@settings(suppress_health_check=[HealthCheck.filter_too_much])
def test_crossed_sends_are_found(mutated):
    outcome = evaluate(mutated.schedule, "buffered")
    problems = complete(mutated.schedule, mutated.right.stages, mutated.right.microbatches)
    assert problems or outcome.mismatches or not outcome.finished


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_mutation_is_drawn(mutation):
    mutated = find(mutated_schedules((mutation,)), lambda _: True, settings=UNSHRUNK)
    assert mutated.change.startswith(f"{mutation}: ")


def test_nothing_else_imports_hypothesis_or_torch():
    modules = ("actions", "convert", "families", "lowering", "order", "table", "text")
    names = ", ".join(f"invariants.schedule.{module}" for module in modules)
    code = f"import sys, {names}; assert not {{'hypothesis', 'torch'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
