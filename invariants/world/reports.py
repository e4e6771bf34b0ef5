"""What ranks have printed, in pytest's report of a test that failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from invariants.world.output import Output

if TYPE_CHECKING:
    from invariants.world.failure import RankFailed
    from invariants.world.pool import WorldPool

_of_example = pytest.StashKey[tuple[Output, ...]]()


def shows_live(config: pytest.Config) -> bool:
    """Whether what is printed is seen at once, so that reports need not repeat it."""
    return config.getoption("capture") in ("no", "tee-sys")


def keep_of_example(item: pytest.Item, pool: WorldPool) -> None:
    """An example of `@given` has failed, and its worlds are about to be reset."""
    item.stash[_of_example] = pool.outputs()


def add_sections(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, pool: WorldPool) -> None:
    """A section for each stream of the ranks that failed; of all ranks, where the test failed on their results."""
    if call.excinfo is None or not report.failed or shows_live(item.config):
        return
    failures = list(_rank_failures(call.excinfo.value))
    if failures:
        outputs = [output for failure in failures for output in failure.outputs]
    elif call.when == "call":
        of_example = item.stash.get(_of_example, None)
        outputs = list(of_example or pool.outputs())
    else:
        return
    # The last words of a rank that died are in the error.
    told = str(call.excinfo.value)
    report.sections += [(each.title, each.text) for each in dict.fromkeys(outputs) if each.text.strip() not in told]


def _rank_failures(error: BaseException) -> Iterator[RankFailed]:
    """Those that `error` is, holds or came from."""
    from invariants.world.failure import RankFailed

    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, RankFailed):
            yield each
        waiting += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]
