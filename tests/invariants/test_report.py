"""What is printed and written, from literal judgements."""

from __future__ import annotations

import io
import json
import shlex
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from invariants.campaign import Judgement
from invariants.case import Case
from invariants.invariant import Verdict, Violation
from invariants.known import Known
from invariants.matrix import Row
from invariants.report import document, terminal
from invariants.report.progress import Progress
from invariants.strategies import cases

CASE = Case(microbatches=3)
EARLY = Violation("bits [0]", "1", ":x:", rank=1, step=1, excess=2.0)
LATE = Violation("bits", "1", "9", rank=0, step=4)
KNOWN = Known("*", "m > 2", "too [many] microbatches", "https://example.org/1")


def judgement(status, violations=(), reason="", known=(), **counts):
    verdict = Verdict("toy.one", CASE, status, reason, violations) if status in ("violated", "unknown") else None
    return Judgement("toy.one", status, reason, counts, verdict, known, 0)


def printed(*items):
    out = io.StringIO()
    terminal.console(out).print(*items)
    return out.getvalue()


def test_counts_are_words_in_the_order_in_which_they_matter():
    counts = {"refused": 4, "not applicable": 5, "holds": 31, "violated": 0}
    assert terminal.counts_text(counts) == "31 hold, 5 not applicable, 4 refused"
    assert terminal.counts_text({}) == ""


def test_the_table_prints_text_as_it_is(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    text = printed(
        terminal.judgement_table([judgement("unknown", reason="[red]rank 1[/] died :boom:\nstack", holds=1)])
    )
    assert "[red]rank 1[/] died :boom:" in text
    assert "stack" not in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= terminal.LOG_WIDTH


def test_a_terminal_keeps_its_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert terminal.console(io.StringIO()).width == 60


def test_a_violation_shows_case_first_and_worst_offender_and_replay():
    text = terminal.failure_text(judgement("violated", (LATE, EARLY)), "invariants replay x")
    assert text.splitlines() == [
        "toy.one is violated",
        "  case      m=3",
        "  first     rank 1, step 1: bits [0]: expected 1, observed :x:",
        "  worst     rank 0, step 4: bits: expected 1, observed 9",
        "  in all    2 violations in this case",
        "  replay    invariants replay x",
    ]
    alone = terminal.failure_text(judgement("violated", (EARLY,)), "again").splitlines()
    assert [line.split()[0] for line in alone] == ["toy.one", "case", "first", "replay"]


def test_an_unknown_shows_the_whole_failure_of_the_rank():
    text = terminal.failure_text(judgement("unknown", reason="rank 1 died: killed by SIGKILL\n  stack"), "again")
    assert "  reason    rank 1 died: killed by SIGKILL\n              stack\n" in text
    assert text.endswith("  replay    again")


def test_a_judgement_without_a_case_is_one_line():
    text = terminal.failure_text(judgement("refused", reason="not today"), "again")
    assert text == "toy.one is refused: not today"


@pytest.mark.parametrize(("count", "more"), [(1, None), (20, None), (21, "  and 1 more"), (300, "  and 280 more")])
def test_a_replayed_verdict_shows_at_most_twenty_violations(count, more):
    lines = terminal.verdict_text(Verdict("toy.one", CASE, "violated", "", (LATE,) * count)).splitlines()
    assert lines[0] == "toy.one: violated"
    assert lines[1 : 1 + min(count, 20)] == [f"  {LATE}"] * min(count, 20)
    assert lines[21:] == ([more] if more else [])


def test_a_verdict_gives_its_reason():
    text = terminal.verdict_text(Verdict("toy.one", CASE, "unknown", "rank 1 died\nstack"))
    assert text == "toy.one: unknown: rank 1 died\n  stack"


def test_known_violations_are_told_once_with_all_that_they_explain():
    other = Known("toy.one", "dp > 1", "why", "there")
    second = replace(judgement("known", known=((KNOWN, 3),)), invariant="toy.two")
    met = [judgement("known", known=((KNOWN, 1), (other, 2))), judgement("holds"), second]
    assert list(terminal.known_texts(met)) == [
        "known violation 1: toy.one in 1 case, toy.two in 3 cases",
        "  where     m > 2",
        "  reason    too [many] microbatches",
        "  report    https://example.org/1",
        "known violation 2: toy.one in 2 cases",
        "  where     dp > 1",
        "  reason    why",
        "  report    there",
    ]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from([None, "a.b"]), st.sampled_from([None, "fault one"]), st.sampled_from(["", "--x 1"]))
def test_a_replay_line_reads_back(case, only, fault, also):
    line = terminal.replay_line("torch", case, only=only, fault=fault, also=also)
    words = shlex.split(line)
    assert words[:2] == ["invariants", "replay"]
    spec, _, text = words[2].partition("/")
    assert (spec, Case.parse(text)) == ("torch", case)
    given_options = dict(zip(words[3::2], words[4::2], strict=True))
    expected = {"--fault": fault, "--only": only, "--x": "1" if also else None}
    assert given_options == {key: value for key, value in expected.items() if value}
    assert fault or "'" not in line  # what a case needs is safe as it is


def rows():
    broken = {"toy.one": Verdict("toy.one", CASE, "violated", "", (EARLY,))}
    dead = {"toy.two": Verdict("toy.two", CASE, "unknown", "rank 1 died\nstack")}
    return (
        Row("seen", "report 1", False, (CASE,), 1, broken, dead),
        Row("missed", "report 2", False, (CASE, CASE), 1, {}, dead),
        Row("idle", "report 3", False),
        Row("calm", "reason 4", True, (CASE,), 1),
        Row("loud", "reason 5", True, (CASE,), 1, broken),
    )


def test_the_matrix_marks_what_is_violated_and_what_is_unknown():
    lines = printed(terminal.fault_table(rows(), ["toy.one", "toy.two"])).splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [
        ["seen", "x", "?", "caught, 1 case"],
        ["missed", "", "?", "not caught, 2 cases"],
        ["idle", "", "", "not tried: it applies to no planned case"],
        ["calm", "", "", "variant clean, 1 case"],
        ["loud", "x", "", "variant flagged, 1 case"],
    ]
    assert [index for index, line in enumerate(lines) if line.startswith("├")] == [6]  # variants stand apart
    assert terminal.matrix_summary(rows()) == "1 of 3 faults caught, 1 of 2 harmless variants clean"
    assert terminal.matrix_summary(rows()[:1]) == "1 of 1 faults caught"


def test_what_has_not_passed_is_explained():
    _, missed, idle, _, loud = rows()
    assert terminal.row_text(missed, "again").splitlines() == [
        "missed: not caught, 2 cases",
        "  stands for  report 2",
        "  unknown     toy.two: rank 1 died",
        "  replay      again",
    ]
    assert "replay" not in terminal.row_text(idle, None)
    assert f"  violated    toy.one: {EARLY}" in terminal.row_text(loud, "again")


def test_documents_are_strict_json_with_a_version(tmp_path):
    path = tmp_path / "out.json"
    found = document.judgement_document(
        judgement("violated", (LATE, EARLY), known=((KNOWN, 2),), violated=1), "It.", "r"
    )
    document.write(
        path, {"invariants": [found], "rows": [document.row_document(each, ["toy.one"], None) for each in rows()]}
    )
    read = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read["version"] == document.VERSION
    (one,) = read["invariants"]
    assert (one["id"], one["verdict"], one["cases"], one["promise"]) == ("toy.one", "violated", {"violated": 1}, "It.")
    assert one["known"] == [
        {"invariant": "*", "when": "m > 2", "reason": KNOWN.reason, "report": KNOWN.report, "failure": None, "cases": 2}
    ]
    assert one["shown"]["case"] == "m=3"
    assert one["shown"]["replay"] == "r"
    assert [each["excess"] for each in one["shown"]["violations"]] == [None, 2.0]
    assert [each["outcome"] for each in read["rows"]] == ["caught", "not caught", "no case", "clean", "flagged"]
    assert read["rows"][0]["marks"] == {"toy.one": "violated"}


def test_a_document_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.json"
    document.write(path, {"good": 1})
    before = path.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        document.write(path, {"bad": float("inf")})
    folder = tmp_path / "taken.json"
    folder.mkdir()
    with pytest.raises(OSError, match="taken"):
        document.write(folder, {"good": 1})
    assert path.read_text() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.json", "taken.json"]
    assert path.stat().st_mode & 0o444 == 0o444 & ~_umask()


def _umask():
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask


class Lines(io.StringIO):
    """A log that tells when it has a number of lines."""

    def __init__(self, wanted):
        super().__init__()
        self.wanted = wanted
        self.enough = threading.Event()

    def write(self, text):
        written = super().write(text)
        if self.getvalue().count("\n") >= self.wanted:
            self.enough.set()
        return written


def test_a_log_gets_a_line_again_and_again_without_being_told():
    log = Lines(4)
    with Progress(terminal.console(log), "checking", every_s=0.01) as progress:
        progress.counting(lambda case, fault: None)(CASE)
        progress.count(1, 8)
        progress.say("judging")
        assert log.enough.wait(20)
    lines = log.getvalue().splitlines()
    assert lines[0] == "checking"
    assert lines[-1].startswith("judging: 1 of 8, run 1, ")
    assert progress.runs == 1


def test_a_terminal_gets_a_bar_that_goes_away():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, markup=False)
    with Progress(console, "checking [all]") as progress:
        progress.count(3, 8)
    assert "checking [all]" in screen.getvalue()
    assert "3/8" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")


def test_progress_ends_with_what_it_shows():
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), Progress(terminal.console(io.StringIO()), "checking"):
        raise KeyboardInterrupt
    assert threading.active_count() == before
