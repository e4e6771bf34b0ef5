"""The pytest side of suites: options, one item an invariant, verdicts as outcomes, a summary.

Workers of xdist draw the same plan, share one store of evidence, and each case is run by one of them.
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from invariants import hookspecs, profiles
from invariants.case import Case
from invariants.errors import InvariantsError, UsageError
from invariants.known import read_known
from invariants.loading import checked_target, spec_of
from invariants.registry import registry
from invariants.runner import preloaded
from invariants.suite import ATTRIBUTE, Suite
from invariants.suite_summary import record, summarize
from invariants.target import HasKnown
from invariants.world import fixtures
from invariants.world.fixtures import Worlds, shared_folder
from invariants.world.launched.controller import fleet_of

if TYPE_CHECKING:
    from invariants.campaign import Campaign, Judgement
    from invariants.invariant import Invariant, Verdict
    from invariants.store import Store
    from invariants.world.pool import WorldPool

FIXTURE = "invariants_outcome"

_drawn_seed = pytest.StashKey[int]()
_campaigns = pytest.StashKey[dict[str, "tuple[Campaign, Store]"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("invariants", "invariants of distributed training")
    group.addoption(
        "--invariants-cases",
        type=int,
        metavar="N",
        help="cases that each suite draws (default: the suite's own number, else the Hypothesis profile's: "
        + ", ".join(f"{name} {count}" for name, count in profiles.SUITE_CASES.items())
        + f", any other {profiles.OTHER_CASES})",
    )
    group.addoption(
        "--invariants-seed",
        type=int,
        metavar="N",
        help="what cases are drawn from (default: the suite's own, else 0; a new one each session under the profiles "
        + ", ".join(sorted(profiles.RANDOM))
        + ")",
    )
    group.addoption(
        "--case",
        dest="invariants_case",
        metavar="CASE",
        help="judge this one case, as a failure prints it, instead of drawn ones",
    )
    parser.addini("invariants_known", "files of known violations, for all suites", type="paths", default=[])


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare `pytest_invariants_register`."""
    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    """Check the options, and draw the seed of random profiles once for all workers."""
    cases, case = config.getoption("--invariants-cases"), config.getoption("invariants_case")
    if cases is not None and cases < 1:
        raise pytest.UsageError(f"--invariants-cases={cases}: expected 1 or more")
    if case is not None:
        _check_case(case)
    handed_on = getattr(config, "workerinput", {}).get("invariants_seed")
    config.stash[_drawn_seed] = secrets.randbelow(2**32) if handed_on is None else handed_on
    config.stash[_campaigns] = {}


def _check_case(text: str) -> None:
    from invariants.campaign import MAX_WORLD

    try:
        size = Case.parse(text).topology.world_size
    except UsageError as error:
        raise pytest.UsageError(f"--case={text}: {error}") from error
    if size > MAX_WORLD:
        raise pytest.UsageError(f"--case={text}: {size} ranks; expected a topology of {MAX_WORLD} or fewer")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the drawn seed to a worker of xdist."""
    node.workerinput["invariants_seed"] = node.config.stash[_drawn_seed]


def pytest_report_header(config: pytest.Config) -> str | None:
    """Tell the drawn seed before anything can go wrong."""
    given = config.getoption("--invariants-seed") is not None or config.getoption("invariants_case")
    if given or profiles.loaded() not in profiles.RANDOM:
        return None
    seed = config.stash[_drawn_seed]
    return f"invariants: seed of suites drawn under {profiles.loaded()}; repeat with --invariants-seed={seed}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item an invariant; a mistake in the suite is one error that names it."""
    suite = getattr(metafunc.function, ATTRIBUTE, None)
    if suite is None:
        return
    definition = metafunc.definition
    try:
        if metafunc.cls is not None:
            raise UsageError("a suite is a function: assign it at the top level of a module, not in a class")
        own = hookspecs.registered(definition.ihook.pytest_invariants_register, metafunc.config)
        invariants = registry(own)
        _check(suite, definition, invariants)
    except UsageError as error:
        raise _failed(f"{definition.nodeid}: {error}") from None
    metafunc.config.stash[fixtures.preload].update(preloaded(suite.target))
    metafunc.parametrize(FIXTURE, list(invariants.values()), indirect=True, ids=list(invariants))


def _failed(text: str) -> BaseException:
    """An error that pytest shows as this text alone."""
    return pytest.fail.Exception(text, pytrace=False)


def _check(suite: Suite, item: pytest.Item, ids: Collection[str]) -> None:
    """Raise `UsageError` for what is wrong in a suite, before anything of it runs."""
    checked_target(suite.target, "target of the suite")
    if suite.cases is not None and not (isinstance(suite.cases, int) and suite.cases >= 1):
        raise UsageError(f"cases={suite.cases!r}: expected a whole number of 1 or more")
    if suite.seed is not None and not isinstance(suite.seed, int):
        raise UsageError(f"seed={suite.seed!r}: expected a whole number")
    for path in _known_files(suite, item):
        read_known(path, ids)


def _known_files(suite: Suite, item: pytest.Item) -> list[Path]:
    shipped = [suite.target.known()] if isinstance(suite.target, HasKnown) else []
    return [*shipped, *(item.path.parent / path for path in suite.known), *item.config.getini("invariants_known")]


@dataclass(frozen=True)
class Outcome:
    """A judgement as pytest shows it: `text` is what there is to read of it."""

    invariant: str
    status: str
    text: str

    def tell(self) -> None:
        """Fail, skip or expect the failure; return where the invariant holds."""
        if self.status == "violated":
            raise _failed(self.text)
        if self.status == "known":
            pytest.xfail(self.text)
        if self.status in ("not applicable", "refused"):
            pytest.skip(f"{self.invariant} is {self.status}: {self.text}")


@pytest.fixture
def invariants_outcome(
    request: pytest.FixtureRequest, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    """Judge the item's invariant; the first item that a worker gets runs cases. What is unknown is an error here."""
    item: pytest.Function = request.node
    invariant: Invariant = request.param
    suite: Suite = getattr(item.obj, ATTRIBUTE)
    if fleet_of(item.config) is not None:
        pytest.skip("suites draw worlds of many sizes that share a folder of one machine: run them without a launcher")
    try:
        campaign, store = _campaign(item, suite, worlds, tmp_path_factory)
        judgement = campaign.judge(invariant)
    except InvariantsError as error:
        raise _failed(str(error)) from None
    given = item.config.getoption("invariants_case")
    source = "--case" if given else f"seed {_seed(item.config, suite)}"
    # Of one case that was asked for, most entries say nothing.
    record(item, suite.target.name, judgement, store, source, () if given else campaign.known)
    outcome = Outcome(invariant.id, judgement.status, _text(item, suite, judgement, worlds.pool))
    if judgement.status == "unknown":
        raise _failed(outcome.text)
    return outcome


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the suites did."""
    summarize(terminalreporter)


def _campaign(
    item: pytest.Function, suite: Suite, worlds: Worlds, factory: pytest.TempPathFactory
) -> tuple[Campaign, Store]:
    """The suite's campaign in this worker, made by its first item."""
    name = _suite_id(item)
    campaigns = item.config.stash[_campaigns]
    if name not in campaigns:
        from invariants.campaign import Campaign, plan
        from invariants.runner import Runner
        from invariants.store import Store

        case, seed = item.config.getoption("invariants_case"), _seed(item.config, suite)
        cases = (Case.parse(case),) if case else plan(suite.target, _count(item.config, suite), seed)
        folder = shared_folder(item.config, factory) / "invariants" / hashlib.sha256(name.encode()).hexdigest()[:16]
        store = Store(folder)
        runner = Runner(worlds.pool, suite.target, factory.mktemp("invariants"))
        known = [entry for path in _known_files(suite, item) for entry in read_known(path)]
        # A case that was asked for is not to be replaced by a smaller one.
        limit = {"shrink_runs": 0} if case else {}
        campaigns[name] = Campaign(suite.target, cases, seed, runner, store, known, **limit), store
    return campaigns[name]


def _count(config: pytest.Config, suite: Suite) -> int:
    chosen = config.getoption("--invariants-cases") or suite.cases
    return chosen or profiles.SUITE_CASES.get(profiles.loaded(), profiles.OTHER_CASES)


def _seed(config: pytest.Config, suite: Suite) -> int:
    for chosen in (config.getoption("--invariants-seed"), suite.seed):
        if chosen is not None:
            return int(chosen)
    return config.stash[_drawn_seed] if profiles.loaded() in profiles.RANDOM else 0


def _suite_id(item: pytest.Function) -> str:
    assert item.parent is not None
    return f"{item.parent.nodeid}::{item.originalname}"


def _text(item: pytest.Function, suite: Suite, judgement: Judgement, pool: WorldPool) -> str:
    if judgement.verdict is None:
        return judgement.reason
    from invariants.report.terminal import failure_text

    return failure_text(judgement, _replay(item, suite, judgement.verdict, pool))


def _replay(item: pytest.Function, suite: Suite, verdict: Verdict, pool: WorldPool) -> str:
    """The command that judges the verdict's case again; pytest's own where only a test module holds the target."""
    from invariants.commands import session
    from invariants.report.terminal import replay_line

    spec = spec_of(suite.target)
    if spec is None:
        return shlex.join(["pytest", item.nodeid, "--case", str(verdict.case)])
    like = session.Worlds(item.config.getoption("--backend"), pool.deadline_s)
    return replay_line(spec, verdict.case, only=verdict.invariant, also=like.options)
