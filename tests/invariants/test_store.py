"""The store of evidence: each case and fault is run once, by one worker, and what is stored is whole."""

import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.case import Case
from invariants.errors import WorldError
from invariants.evidence import Evidence, Loss
from invariants.store import Store
from invariants.strategies import cases
from invariants.target import Promises

CASE = Case(microbatches=3)
BOUND_S = 30


def record(case, fault):
    losses = (Loss(0, 1, None, float("inf"), 1e-300, False),)
    return Evidence("literal", case, Promises(), fault, losses=losses, lost={"resume": "rank 1\ndied"})


def forbidden(case, fault):
    raise AssertionError(f"{case} is run again")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(cases(), st.sampled_from([None, "", "none", "-", "a/b", "ä"])), max_size=4))
def test_every_case_and_fault_is_run_once_and_stays_what_it_was(wanted):
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        for case, fault in wanted:
            assert store.fetch(case, fault, record) == record(case, fault)
        for case, fault in wanted:
            other = Store(Path(folder))
            assert other.fetch(case, fault, forbidden) == other.peek(case, fault) == record(case, fault)
        assert len(store.runs()) == len(set(wanted))


def test_nothing_is_there_before_a_run(tmp_path):
    store = Store(tmp_path / "not" / "yet")
    assert store.peek(CASE, None) is None
    assert store.runs() == ()
    store.fetch(CASE, None, record)
    assert store.peek(CASE, "fault") is None


def test_runs_say_their_purpose_fault_and_case_in_order(tmp_path):
    store = Store(tmp_path)
    store.fetch(CASE, None, record)
    store.fetch(CASE, "late-loss", record, purpose="faults")
    store.fetch(CASE, None, record, purpose="shrink")
    store.fetch(Case(), None, record, purpose="shrink")
    assert store.runs() == ("plan - m=3", "faults late-loss m=3", "shrink - default")


def test_a_run_that_raises_leaves_the_case_to_the_next(tmp_path):
    def broken(case, fault):
        raise RuntimeError("the pool is gone")

    store = Store(tmp_path)
    with pytest.raises(RuntimeError, match="the pool is gone"):
        store.fetch(CASE, None, broken)
    assert (store.peek(CASE, None), store.runs()) == (None, ())
    assert store.fetch(CASE, None, record, wait=False) == record(CASE, None)


def test_a_case_that_another_worker_runs_is_skipped_or_waited_for(tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def slow(case, fault):
        begun.set()
        assert go_on.wait(BOUND_S)
        return record(case, fault)

    with ThreadPoolExecutor(1) as worker:
        running = worker.submit(Store(tmp_path).fetch, CASE, None, slow)
        try:
            assert begun.wait(BOUND_S)
            store = Store(tmp_path, wait_s=0.1)
            assert store.fetch(CASE, None, forbidden, wait=False) is None
            assert store.fetch(CASE, "other", record, wait=False) == record(CASE, "other")
            with pytest.raises(WorldError, match=r"case m=3, fault none: .* for 0\.1 s and has not written /.*\.json;"):
                store.fetch(CASE, None, forbidden)
        finally:
            go_on.set()
        assert Store(tmp_path).fetch(CASE, None, forbidden) == running.result(BOUND_S) == record(CASE, None)
    assert store.runs() == ("plan other m=3", "plan - m=3")


WORKER = """
import sys
from pathlib import Path
from invariants.case import Case
from invariants.store import Store

def run(case, fault):
    print("running", flush=True)
    sys.stdin.read()

Store(Path(sys.argv[1])).fetch(Case(microbatches=3), None, run)
"""


def test_a_worker_that_is_killed_leaves_its_case_to_the_next(tmp_path):
    store = Store(tmp_path)
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout.readline() == "running\n"
            assert store.fetch(CASE, None, forbidden, wait=False) is None
        finally:
            worker.kill()
        worker.wait(BOUND_S)
        assert store.fetch(CASE, None, record, wait=False) == record(CASE, None)
    assert store.runs() == ("plan - m=3",)


def test_what_a_worker_had_half_written_is_not_read(tmp_path, monkeypatch):
    store = Store(tmp_path)

    def lost_before_the_rename(part, path):
        part.write_text(part.read_text()[:40])
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Path, "replace", lost_before_the_rename)
        with pytest.raises(KeyboardInterrupt):
            store.fetch(CASE, None, record)
    assert [path.stat().st_size for path in tmp_path.glob("*.part")] == [40]
    assert store.peek(CASE, None) is None
    assert store.fetch(CASE, None, record, wait=False) == store.peek(CASE, None) == record(CASE, None)
    assert list(tmp_path.glob("*.part")) == []
