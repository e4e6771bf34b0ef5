"""`python -m impl.trainer`: trains, saves, resumes with the same bits, ends by itself, and leaves nothing."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from impl import launch
from impl.checkpoint import read_manifest
from impl.cli import main, parse, synthetic_batch

ROOT = Path(__file__).parents[2]
LIMIT_S = 90


def start(tmp_path, *arguments, program=("-m", "impl.trainer")):
    """The command in a process group of its own, with a private folder for temporary files."""
    private = tmp_path / "temporary"
    private.mkdir(exist_ok=True)
    hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"TMPDIR": str(private), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *program, *arguments, "--checkpoint", str(tmp_path / "checkpoint")],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process, tmp_path):
    """Wait; returns status, output and errors once nothing that it started is left."""
    output, errors = process.communicate(timeout=LIMIT_S)
    left = [other for other in psutil.process_iter() if _session(other) == process.pid]
    assert psutil.wait_procs(left, timeout=10)[1] == [], "processes are left"
    folders = [path.name for path in (tmp_path / "temporary").iterdir() if path.name.startswith("impl-")]
    assert folders == [], "a rendezvous is left"
    return process.returncode, output, errors


def _session(process):
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def losses(output):
    return dict(re.findall(r"^ +(\d+)  +(\d+\.\d+)$", output, re.MULTILINE))


def digest(output):
    return re.search(r"parameters after step 20: blake2b (\w{32})", output)[1]


def test_trains_saves_and_resumes_with_the_same_bits(tmp_path):
    grid = ("--pp", "2", "--dp", "2", "--steps", "20")
    status, whole, errors = finish(start(tmp_path, *grid), tmp_path)
    assert (status, errors) == (0, "")
    assert list(losses(whole)) == [str(step) for step in range(1, 21)]
    assert float(losses(whole)["20"]) < 0.5 * float(losses(whole)["1"])
    rows = re.findall(r"^ +(\d) +(\d) +(\d) +(\d+) +(\d+) +(\d+)$", whole, re.MULTILINE)
    assert [row[:3] for row in rows] == [("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0"), ("3", "1", "1")]
    assert all(int(held) == int(formula) == 8 * -(-int(count) // 2) for *_, count, held, formula in rows)
    manifest = read_manifest(tmp_path / "checkpoint")
    assert manifest["step"] == 10
    assert all(shard["hash"] in whole for shard in manifest["shards"])

    later = {step: loss for step, loss in losses(whole).items() if int(step) > 10}
    status, resumed, errors = finish(start(tmp_path, *grid, "--resume"), tmp_path)
    assert (status, errors) == (0, "")
    assert losses(resumed) == later
    assert digest(resumed) == digest(whole)


def test_runs_in_torchruns_world(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "impl.trainer")
    status, output, errors = finish(
        start(tmp_path, "--pp", "2", "--steps", "2", "--save-at", "2", program=torchrun), tmp_path
    )
    assert status == 0, errors
    assert list(losses(output)) == ["1", "2"]
    assert read_manifest(tmp_path / "checkpoint")["grid"] == {"pp": 2, "dp": 1}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_signal(tmp_path, number):
    process = start(tmp_path, "--dp", "2", "--steps", "1000000")
    for line in process.stdout:
        if line.split()[:1] == ["3"]:
            break
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    if number == signal.SIGKILL:
        process.wait(LIMIT_S)
        for path in (tmp_path / "temporary").glob("impl-*"):  # a folder that nobody can remove any more
            path.rename(tmp_path / path.name)
    status, _, _ = finish(process, tmp_path)
    assert status == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[number]


def test_a_rank_that_fails_is_named(tmp_path):
    (tmp_path / "checkpoint").write_text("not a folder")
    status, _, errors = finish(start(tmp_path, "--dp", "2", "--save-at", "1"), tmp_path)
    assert status == 1
    assert re.search(r"^impl.trainer: rank [01] failed", errors, re.MULTILINE)
    assert "rank 0: [Errno 17] File exists" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pp 5", "pp=5: expected at most 4, the number of layers with embedding and head"),
        ("--pp 0", "--pp 0: expected 1 or more"),
        ("--dp 3", "--batch-size 16: expected a multiple of dp x microbatches = 3 x 4 = 12"),
        ("--microbatches 0", "--microbatches 0: expected 1 or more"),
        ("--schedule zigzag", "schedule=zigzag: expected one of gpipe, 1f1b"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--heads 5", "width=32: expected a multiple of heads=5"),
        ("--costs 1,a", "--costs 1,a: expected 'measured' or numbers such as 1,2,2,3"),
        ("--costs 1,2", "costs=[1.0, 2.0]: expected 4, one a layer"),
        ("--split 1,2 --pp 2", "split=1+2: expected 2 stages of 1 or more layers, 4 in all"),
        ("--optimizer lion", "optimizer=lion: expected one of adam, adamw, sgd"),
        ("--resume --checkpoint nowhere", "nowhere/manifest.json: no such file: nothing was saved in this folder"),
        ("--frozen x", "argument --frozen: invalid layers value: 'x'"),
    ],
)
def test_bad_arguments_get_one_line_before_anything_starts(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(launch, "in_own_processes", None)
    monkeypatch.setattr(launch, "in_torchrun", None)
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err == f"impl.trainer: {message}\n"


def test_a_grid_that_does_not_fit_torchruns_world(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, lines in ((0, 1), (1, 0)):
        monkeypatch.setenv("RANK", str(rank))
        assert main(["--pp", "2", "--dp", "2"]) == 2
        error = capsys.readouterr().err
        assert error == "impl.trainer: --pp 2 --dp 2 needs 4 ranks: the world has 3\n" * lines


def test_a_checkpoint_of_another_grid_is_refused(tmp_path, capsys):
    import torch

    from impl.grid import Grid
    from impl.trainer import Trainer

    Trainer(parse([]).config, Grid(1, 1, 0, torch.device("cpu"))).save(tmp_path)
    assert main(["--dp", "2", "--resume", "--checkpoint", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "impl.trainer: checkpoint has world_size=1, this run 2: load it with the settings that it was saved with\n"
    )
    assert main(["--steps", "0", "--resume", "--checkpoint", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "impl.trainer: --steps 0: expected 1 or more\n"


def test_data_depends_on_seed_step_and_index_alone():
    config = parse([]).config
    first = synthetic_batch(config, 3, 0)
    assert all(a.equal(b) for a, b in zip(first, synthetic_batch(config, 3, 0), strict=True))
    others = [
        synthetic_batch(config, 4, 0),
        synthetic_batch(config, 3, 1),
        synthetic_batch(parse(["--seed", "1"]).config, 3, 0),
    ]
    assert not any(first.tokens.equal(other.tokens) for other in others)
