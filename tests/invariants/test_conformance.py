"""The kit for authors: it accepts what is pure, quiet and loud, and names the demand that is not met."""

from __future__ import annotations

import itertools
import math

import pytest

from invariants import Case, Evidence, Promises, Section, UsageError, Violation, invariant
from invariants.catalog import BUILT_IN
from invariants.conformance import check_invariant
from invariants.evidence import Loss, Print, Snapshot

CALLS = itertools.count()


def evidence(reported, **others):
    return Evidence("literal", Case(), Promises(), losses=(Loss(0, 1, reported, 1.0, 0.1, finite=True),), **others)


SOUND, BROKEN = evidence(1.0), evidence(2.0)


def breaks(found, what="loss", **others):
    return [Violation(what, "1.0", "2.0", **others)] if found.losses[0].reported != 1.0 else []


def counting(found):
    return breaks(found, what=f"call {next(CALLS)}")


def changing(found):
    found.lost["resume"] = "overwritten"
    return breaks(found)


def comparing_types(found):
    return breaks(found, what=type(found.lost).__name__)


def reading_more(found):
    return breaks(found, step=len(found.replicas))


def declared(function):
    def judged(found):
        """Losses are 1."""
        return function(found)

    return invariant("own.losses", needs=[Section.LOSSES])(judged)


class Lost(dict):
    """JSON has plain dictionaries only."""


MORE = {"replicas": (Snapshot(0, 0, False, ()),)}


@pytest.mark.parametrize(
    ("function", "others", "demand"),
    [
        (lambda _: [], {}, r"own\.losses on violated\[0\]: expected 'violated', observed holds"),
        (lambda _: breaks(BROKEN), {}, r"on holds\[0\]: expected 'holds', observed violated: loss: expected 1\.0"),
        (lambda _: 1 / 0, {}, r"on holds\[0\]: expected 'holds', observed unknown: .*ZeroDivisionError"),
        (counting, {}, r"asked twice, it says violated: call \d+: .*, then violated: call \d+"),
        (changing, {}, r"on holds\[0\]: it changes its evidence"),
        (
            comparing_types,
            {"lost": Lost()},
            "says violated: Lost: .*, and of the same evidence, stored, violated: dict",
        ),
        (
            reading_more,
            MORE,
            r"on holds\[0\], without Section\.REPLICAS, which it does not need: .*; add the section",
        ),
        (lambda found: breaks(found, excess=math.nan), {}, "excess=nan"),
        (lambda found: breaks(found, what=""), {}, "violation with what=''; expected some text"),
        (lambda found: breaks(found) and ["wrong"], {}, r"yields 'wrong'; expected an invariants\.Violation"),
        (breaks, {}, r"own\.losses is not registered: name it in an entry point of group 'invariants'"),
    ],
)
def test_the_demand_that_is_not_met_is_named(function, others, demand):
    with pytest.raises(AssertionError, match=demand):
        check_invariant(declared(function), holds=[evidence(1.0, **others)], violated=[evidence(2.0, **others)])


@pytest.mark.parametrize(("holds", "violated"), [([], [BROKEN]), ([SOUND], [])])
def test_evidence_of_both_kinds_is_needed(holds, violated):
    with pytest.raises(UsageError, match=r"=\[\]: expected evidence of which own\.losses says"):
        check_invariant(declared(breaks), holds=holds, violated=violated)


def test_a_plain_function_is_no_invariant():
    with pytest.raises(UsageError, match="decorate it with"):
        check_invariant(breaks, holds=[SOUND], violated=[BROKEN])


def snapshots(*digests):
    return tuple(
        Snapshot(rank, 0, False, (Print("w", 0, 4, "float32", digest, 1.0),)) for rank, digest in enumerate(digests)
    )


def test_a_built_in_invariant_conforms():
    (replicas_agree,) = [each for each in BUILT_IN if each.id == "replicas.agree"]
    holds, violated = (evidence(1.0, replicas=snapshots("a", other)) for other in "ab")
    check_invariant(replicas_agree, holds=[holds], violated=[violated])


CONFTEST = """
from invariants import Section, Violation, invariant

pytest_plugins = ["invariants.plugin"]


@invariant("own.losses", needs=[Section.LOSSES])
def own_losses(evidence):
    '''Losses are 1.'''
    for loss in evidence.losses:
        if loss.reported != 1:
            yield Violation("loss", "1", str(loss.reported))


def pytest_invariants_register(config):
    return [own_losses]
"""

TEST = """
from conftest import own_losses
from invariants import Case, Evidence, Promises
from invariants.conformance import check_invariant
from invariants.evidence import Loss


def evidence(reported):
    return Evidence("literal", Case(), Promises(), losses=(Loss(0, 1, reported, 1.0, 0.1, finite=True),))


def test_own_losses(pytestconfig):
    check_invariant(own_losses, holds=[evidence(1.0)], violated=[evidence(2.0)], config=pytestconfig)
"""


def test_an_invariant_of_a_conftest_is_found_by_pytests_configuration(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TEST)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
