"""The command line: a user's mistakes, what verdicts make of the exit status, what is left after an interruption."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from invariants import campaign, cli
from invariants.case import Case
from invariants.commands.session import Worlds, exit_status
from invariants.errors import UsageError, WorldError
from invariants.evidence import Evidence, Loss, Section
from invariants.target import Promises

ROOT = Path(__file__).parents[2]

TOY = """
from contextlib import nullcontext

from hypothesis import strategies as st

from invariants import Case, Fault, Promises, Topology


class Toy:
    name = "toy"
    promises = Promises()

    def cases(self):
        sizes = st.builds(lambda pp, dp: Topology.of(pp=pp, dp=dp), st.integers(1, 2), st.integers(1, 2))
        return st.builds(Case, topology=sizes, microbatches=st.integers(1, 9), seed=st.integers(0, 99))

    def build(self, case, rank):
        raise NotImplementedError

    def faults(self):
        return {
            "loud": Fault("https://example.org/loud", nullcontext),
            "quiet": Fault("changes nothing", nullcontext, harmless=True),
            "idle": Fault("https://example.org/idle", nullcontext, applies=lambda case: case.microbatches > 9),
        }


toy = Toy()
shapeless = object()
"""

ABSENT = {section.value: "the toy has none" for section in Section if section is not Section.LOSSES}


class Runs:
    """Runs without ranks: losses that are right, but where `wrong(case, fault)`."""

    def __init__(self):
        self.made = []
        self.wrong = lambda case, fault: fault == "loud"
        self.lost = self.refused = None
        self.raises = None

    def __call__(self, case, fault=None):
        self.made.append((case, fault))
        if self.raises:
            raise self.raises
        reported = 2.0 if self.wrong(case, fault) else 1.0
        return Evidence(
            "toy",
            case,
            Promises(),
            fault=fault,
            absent=ABSENT,
            refused=self.refused,
            lost={"losses": self.lost} if self.lost else {},
            losses=None
            if self.lost
            else tuple(
                Loss(rank, step, reported, 1.0, 0.5, True)
                for rank in range(case.topology.world_size)
                for step in (1, 2, 3)
            ),
        )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that the command is called in, with `toy.py`; what it leaves in this process is undone."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "300")
    sys.modules.pop("toy", None)
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    sys.modules.pop("toy", None)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def runs(monkeypatch, folder):
    """In place of worlds."""
    runs = Runs()

    @contextlib.contextmanager
    def running(self, target, cases):
        yield runs, folder / "evidence"

    monkeypatch.setattr(Worlds, "running", running)
    return runs


@pytest.fixture
def command(folder, monkeypatch, capsys):
    """Call the command; its exit status, standard output and standard error."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["invariants", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return command


MISTAKES = [
    (["check", "nonsense"], ["'nonsense'", "package.module:name"]),
    (["check", "nowhere.at_all:target"], ["nowhere.at_all", "No module named"]),
    (["check", "toy:missing"], ["module toy has no 'missing'", "'toy'"]),
    (["check", "toy:shapeless"], ["object has no member 'name'"]),
    (["check", "toy:toy", "--only", "loss.infinite"], ["'loss.infinite' does not exist", "loss.finite"]),
    (["check", "toy:toy", "--cases", "0"], ["--cases 0", "1 or more"]),
    (["check", "toy:toy", "--max-world", "0"], ["--max-world 0", "1 or more"]),
    (["check", "toy:toy", "--deadline", "-1"], ["--deadline -1", "above 0"]),
    (["check", "toy:toy", "--deadline", "86400"], ["--deadline 86400", "below 86400"]),
    (["replay", "toy:toy/m=2", "--deadline", "inf"], ["--deadline inf", "below 86400"]),
    (["check", "toy:toy", "--deadline", "nan"], ["--deadline nan", "above 0"]),
    (["check", "toy:toy", "--backend", "mpi"], ["--backend mpi", "auto, gloo, nccl"]),
    (["check", "toy:toy", "--known", "absent.toml"], ["absent.toml", "No such file"]),
    (["check", "toy:toy", "--known", "toy.py"], ["toy.py", "not TOML"]),
    (["check", "toy:toy", "--json", "absent/out.json"], ["absent does not exist", "--json"]),
    (["check", "toy:toy", "--json", "."], ["expected the name of a file"]),
    (["replay", "toy:toy"], ["'toy:toy'", "SPEC/CASE"]),
    (["replay", "toy:toy/m=none"], ["'m=none'", "a whole number"]),
    (["replay", "toy:toy/topology=pp3.dp3"], ["9 ranks", "--max-world allows 8"]),
    (["replay", "toy:toy/m=2", "--only", "nothing"], ["'nothing' does not exist"]),
    (["replay", "toy:toy/m=2", "--fault", "deaf"], ["'deaf' of target toy", "loud, quiet, idle"]),
    (["replay", "nonsense/m=2"], ["'nonsense'"]),
    (["faults", "toy:toy", "--only", "deaf"], ["'deaf' of target toy", "loud, quiet, idle"]),
    (["faults", "toy:toy", "--tries", "0"], ["--tries 0", "1 or more"]),
    (["faults", "toy:toy", "--variants", "0"], ["--variants 0", "1 or more"]),
]


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=lambda value: " ".join(value[:3]))
def test_a_mistake_is_one_line_and_nothing_starts(command, runs, arguments, named):
    status, out, err = command(*arguments)
    assert (status, out, runs.made) == (2, "", [])
    assert len(err.splitlines()) == 1
    for part in named:
        assert part in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["check"], "Missing argument 'TARGET'"),
        (["check", "toy:toy", "--cases", "many"], "'--cases'"),
        (["check", "toy:toy", "--nothing"], "No such option: --nothing"),
        (["judge"], "No such command 'judge'"),
    ],
)
def test_what_is_no_call_at_all_is_shown_how_to_call(command, arguments, named):
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("Usage: ")
    assert named in err.splitlines()[-1]


def test_a_target_without_faults_is_told_how_to_have_some(command, runs, folder):
    (folder / "toy.py").write_text(TOY.replace("def faults", "def no_faults"))
    status, _, err = command("faults", "toy:toy")
    assert (status, err) == (2, "target toy has no planted faults; it would return them from a method faults()\n")


def test_all_hold(command, runs):
    status, out, err = command("check", "toy:toy", "--cases", 5, "--seed", 3)
    assert status == 0
    table = {cells[0]: cells[1:] for line in out.splitlines() if len(cells := _cells(line)) > 1}
    assert table["loss.finite"] == ["holds", "5 hold", ""]
    assert table["replicas.agree"] == ["not applicable", "5 not applicable", "the toy has none"]
    assert out.splitlines()[-1].startswith("5 cases, 5 runs, ")
    assert out.endswith(" s, seed 3\n")
    assert err.startswith("checking toy: 5 cases, seed 3\n")
    assert {case for case, _ in runs.made} == set(campaign.plan(sys.modules["toy"].toy, 5, 3))


def _cells(line):
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_a_violation_is_shrunk_shown_and_replayed(command, runs, folder):
    runs.wrong = lambda case, fault: case.microbatches > 2
    out_file = folder / "out.json"
    status, out, _ = command("check", "toy:toy", "--cases", 9, "--only", "loss.finite", "--json", out_file)
    assert status == 1
    lines = out.splitlines()
    at = lines.index("loss.finite is violated")
    assert lines[at + 1] == "  case      topology=pp1.dp1,m=3,seed=0" or lines[at + 1] == "  case      m=3"
    assert "expected 1.0" in lines[at + 2]
    assert "observed 2.0" in lines[at + 2]
    replayed = next(line for line in lines if line.startswith("  replay")).removeprefix("  replay    ")
    found = json.loads(out_file.read_text())
    assert (found["version"], found["exit_status"], found["seed"], found["cases"]) == (1, 1, 0, 9)
    (one,) = found["invariants"]
    assert (one["verdict"], one["shown"]["replay"]) == ("violated", replayed)
    assert sum(one["cases"].values()) == 9
    assert found["runs"] == 9 + one["extra_runs"] == len(runs.made)
    status, out, _ = command(*shlex.split(replayed)[1:])
    assert status == 1
    assert out.startswith("loss.finite: violated\n  rank 0, step 1: ")
    assert len(out.splitlines()) == 4


def test_a_replay_runs_under_the_same_worlds(command, runs):
    runs.lost = "rank 0 died: killed by SIGKILL\nlast words"
    status, out, _ = command("check", "toy:toy", "--cases", 1, "--only", "loss.finite", "--deadline", "7")
    assert status == 3
    assert "reason    rank 0 died: killed by SIGKILL\n            last words" in out
    replayed = out.split("replay    ")[1].splitlines()[0]
    assert replayed.endswith("--only loss.finite --deadline 7.0")
    assert command(*shlex.split(replayed)[1:])[0] == 3


def test_what_the_target_refuses_is_no_pass(command, runs):
    runs.refused = "not today"
    status, out, _ = command("check", "toy:toy", "--cases", 2)
    assert status == 5
    assert "2 refused" in out
    assert command("replay", "toy:toy/m=2")[0] == 5


def test_known_violations_are_shown_and_let_pass(command, runs, folder):
    runs.wrong = lambda case, fault: case.microbatches > 2
    entry = '[[known]]\ninvariant = "loss.finite"\nwhen = "m > 2"\nreason = "too many"\nreport = "there"\n'
    (folder / "known.toml").write_text(entry)
    status, out, _ = command("check", "toy:toy", "--cases", 9, "--known", "known.toml")
    assert status == 0
    assert "known violation 1: loss.finite in " in out
    assert "reason    too many" in out
    (folder / "toy.py").write_text(
        TOY.replace(
            "    def faults",
            "    def known(self):\n        import pathlib\n        return pathlib.Path('known.toml')\n\n    def faults",
        )
    )
    del sys.modules["toy"]
    status, out, _ = command("check", "toy:toy", "--cases", 9)
    assert status == 0
    assert "known violation 1" in out


def test_an_entry_for_no_invariant_is_a_mistake_and_one_that_covers_nothing_is_told(command, runs, folder):
    entry = '[[known]]\ninvariant = "loss.finite"\nwhen = "m > 2"\nreason = "why"\nreport = "there"\n'
    (folder / "known.toml").write_text(entry + entry.replace("loss.finite", "loss.infinite"))
    status, out, err = command("check", "toy:toy", "--known", "known.toml")
    assert (status, out, runs.made, len(err.splitlines())) == (2, "", [], 1)
    assert "entry 2: invariant 'loss.infinite' does not exist; expected one of *, " in err
    (folder / "known.toml").write_text(entry)
    line = "known violation of loss.finite where m > 2: matched no case\n"
    status, out, _ = command("check", "toy:toy", "--known", "known.toml", "--only", "loss.finite")
    assert (status, line in out) == (0, True)
    runs.wrong = lambda case, fault: case.microbatches > 2
    status, out, _ = command("check", "toy:toy", "--known", "known.toml", "--only", "loss.finite", "--seed", 1)
    assert (status, line in out) == (0, False)


def test_an_entry_that_fits_no_case_is_found_before_worlds_start(command, folder, monkeypatch):
    monkeypatch.setattr(Worlds, "running", None)  # calling it would be an error of another kind
    entry = '[[known]]\ninvariant = "loss.finite"\nwhen = "m < schedule"\nreason = "why"\nreport = "there"\n'
    (folder / "known.toml").write_text(entry)
    status, out, err = command("check", "toy:toy", "--known", "known.toml")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "when='m < schedule'" in err


@pytest.mark.parametrize(("wrong", "expected"), [(False, 3), (True, 1)])
def test_a_file_that_cannot_be_written_in_the_end_keeps_the_verdicts(command, runs, folder, wrong, expected):
    out_folder = folder / "reports"
    out_folder.mkdir()

    def vanish(case, fault):
        shutil.rmtree(out_folder, ignore_errors=True)
        return wrong

    runs.wrong = vanish
    untried = ["--only", "idle"] if wrong else []
    for arguments in (["check", "toy:toy"], ["faults", "toy:toy", "--only", "quiet", *untried]):
        out_folder.mkdir(exist_ok=True)
        status, out, err = command(*arguments, "--json", "reports/out.json")
        assert status == expected
        assert "loss.finite" in out
        assert err.splitlines()[-1] == (
            f"--json {out_folder / 'out.json'}: could not be written: No such file or directory"
        )


def test_a_folder_that_takes_no_file_is_found_before_anything_starts(command, runs):
    status, out, err = command("check", "toy:toy", "--json", "/proc/out.json")
    assert (status, out, runs.made, len(err.splitlines())) == (2, "", [], 1)
    assert "--json /proc/out.json: folder /proc cannot be written to: " in err


def test_replay_says_where_a_fault_changes_nothing(command, runs):
    status, out, _ = command("replay", "toy:toy/m=2", "--fault", "loud", "--only", "loss.finite")
    assert (status, runs.made) == (1, [(Case(microbatches=2), "loud")])
    assert "note" not in out
    status, out, _ = command("replay", "toy:toy/default", "--fault", "idle")
    assert status == 0
    assert "note: fault idle says of itself that it changes nothing in this case" in out


def test_the_matrix_names_what_is_not_caught(command, runs, folder):
    status, out, _ = command("faults", "toy:toy", "--json", "out.json")
    assert status == 1
    assert "idle: not tried: it applies to no planned case" in out
    assert "no fault here violates schedule.complete, " in out
    assert "1 of 2 faults caught, 1 of 1 harmless variants clean, 4 runs, " in out
    found = json.loads((folder / "out.json").read_text())
    assert found["exit_status"] == 1
    assert {row["fault"]: row["outcome"] for row in found["faults"]} == {
        "loud": "caught",
        "idle": "no case",
        "quiet": "clean",
    }
    status, out, _ = command("faults", "toy:toy", "--only", "loud", "--only", "quiet")
    assert status == 0
    assert "no fault here violates" not in out
    assert "1 of 1 faults caught, 1 of 1 harmless variants clean" in out


def test_a_variant_that_is_flagged_can_be_replayed(command, runs):
    runs.wrong = lambda case, fault: fault == "quiet"
    status, out, _ = command("faults", "toy:toy", "--only", "quiet")
    assert status == 1
    replayed = out.split("replay      ")[1].splitlines()[0]
    assert command(*shlex.split(replayed)[1:])[0] == 1


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (KeyboardInterrupt(), 130, ""),
        (WorldError("the process that ranks are forked from has died"), 3, "nothing could be judged: the process that"),
        (UsageError("case: tied=yes: use tied=no"), 2, "case: tied=yes: use tied=no"),
    ],
)
def test_a_command_that_cannot_go_on_writes_nothing(command, runs, folder, error, expected, text):
    runs.raises = error
    status, out, err = command("check", "toy:toy", "--json", "out.json")
    assert (status, out) == (expected, "")
    assert text in err
    assert "Traceback" not in err
    assert not (folder / "out.json").exists()


@pytest.mark.parametrize("error", [AttributeError("a bug"), SystemExit(0), BrokenPipeError(32, "gone"), EOFError()])
def test_what_nobody_expects_is_no_verdict(command, runs, error):
    runs.raises = error
    for arguments in (["check", "toy:toy"], ["replay", "toy:toy/default"], ["faults", "toy:toy"]):
        status, out, err = command(*arguments)
        assert (status, out) == (3, "")
        assert "Traceback (most recent call last)" in err
        assert err.endswith("nothing could be judged: the error above was not expected\n")


@pytest.mark.parametrize("arguments", [["check", "leaving:target"], ["check", "toy:toy"], ["faults", "toy:toy"]])
def test_a_target_that_ends_the_process_is_a_mistake(command, runs, folder, arguments):
    (folder / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "toy.py").write_text(TOY.replace("        sizes =", "        raise SystemExit\n        sizes ="))
    status, out, err = command(*arguments)
    assert (status, out, runs.made) == (2, "", [])
    assert "SystemExit" in err
    assert len(err.splitlines()) == 1


def test_the_gravest_verdict_is_the_exit_status():
    assert exit_status([]) == exit_status(["refused", "not applicable"]) == 5
    assert exit_status(["refused", "known"]) == exit_status(["holds", "not applicable"]) == 0
    assert exit_status(["holds", "unknown"]) == 3
    assert exit_status(["unknown", "violated", "holds"]) == 1


def test_the_default_is_as_large_a_world_as_a_plan_may_have():
    assert Worlds().largest == campaign.MAX_WORLD
    assert Worlds().options == ""
    assert Worlds("gloo", 2.5).options == "--backend gloo --deadline 2.5"


def test_invariants_of_the_conftest_are_listed_and_judged(command, runs, folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "conftest", raising=False)
    (folder / "conftest.py").write_text(
        "from invariants import Section, invariant\n\n\n"
        "@invariant('own.promise', needs=[Section.LOSSES])\n"
        "def own(evidence):\n    '''Mine holds.'''\n    return ()\n\n\n"
        "def pytest_invariants_register():\n    return [own]\n"
    )
    status, out, _ = command("list")
    assert status == 0
    assert "Mine holds." in out
    assert "replicas.agree" in out
    status, out, _ = command("check", "toy:toy", "--cases", 1, "--only", "own.promise")
    assert status == 0
    assert "own.promise" in out


SCRIPT = """
import sys
from invariants.cli import main
try:
    main()
finally:
    print("LOADED", [name for name in ("torch", "hypothesis") if name in sys.modules])
"""


@pytest.mark.parametrize("arguments", [["check", "nonsense"], ["replay", "torch"], ["replay", "torch/m=0"]])
def test_a_mistake_is_found_without_torch(arguments, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stdout == "LOADED []\n"
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where temporary folders go, of this process and of others."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_real_ranks_are_checked_and_nothing_is_left(command, scratch):
    status, out, err = command("check", "impl.target:target", "--cases", 3)
    assert status == 0, out + err
    assert "replicas.agree" in out
    assert out.splitlines()[-1].startswith("3 cases, 3 runs, ")
    assert list(scratch.iterdir()) == []


def test_a_fault_on_real_ranks_is_caught_and_replayed(command, scratch, folder):
    status, out, err = command("faults", "impl.target:target", "--only", "shards-not-gathered", "--json", "out.json")
    assert status == 0, out + err
    assert "1 of 1 faults caught, 2 runs, " in out
    caught = json.loads((folder / "out.json").read_text())["faults"][0]
    assert caught["marks"]["replicas.agree"] == "violated"
    words = shlex.split(caught["replay"])[1:]
    status, out, _ = command(*words, "--only", "replicas.agree")
    assert status == 1
    assert out.startswith("replicas.agree: violated\n")
    assert list(scratch.iterdir()) == []


def test_more_ranks_than_devices_are_refused_before_a_case_runs(command, scratch):
    if (devices := _devices()) > 1:
        pytest.skip(f"this machine has {devices} GPUs")
    status, out, err = command("replay", "impl.target:target/topology=pp2.dp1", "--backend", "nccl")
    assert (status, out) == (2, "")
    assert "NCCL wants a GPU of its own for each of 2 ranks" in err
    assert list(scratch.iterdir()) == []


def _devices():
    import torch

    return torch.cuda.device_count()


HANGING = """
import os
import time
from pathlib import Path

from toy import Toy


class Hanging(Toy):
    def build(self, case, rank):
        part = Path(__file__).with_name("part")
        part.write_text(str(os.getpid()))
        part.replace(part.with_name("rank"))
        time.sleep(600)


target = Hanging()
"""


def within(seconds, condition):
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def ended_by(number, folder):
    """Run a command whose rank hangs, end it by a signal; returns its status, what it printed, and the rank's pid."""
    (folder / "hanging.py").write_text(HANGING)
    script = "from invariants.cli import main; main()"
    arguments = ["check", "hanging:target", "--deadline", "300", "--json", "out.json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
    )
    try:
        rank = folder / "rank"
        assert within(120, lambda: rank.exists() or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(10)
    assert not (folder / "out.json").exists()
    return process.returncode, out, err, int(rank.read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_nothing(folder, scratch, number):
    status, out, err, pid = ended_by(number, folder)
    assert (status, out) == (130, "")
    assert "Traceback" not in err
    assert within(20, lambda: not psutil.pid_exists(pid))
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_killed_command_leaves_nothing(folder, scratch, number):
    status, out, _, pid = ended_by(number, folder)
    assert (status, out) == (-number, "")
    assert within(20, lambda: not psutil.pid_exists(pid))
    assert within(20, lambda: not list(scratch.iterdir()))
