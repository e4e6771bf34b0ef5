"""Whatever ends a session, it ends soon, and no process, port, shared memory or temporary folder of it is left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

EXIT_S = 5
"""How long a session may take to end, from what ends it."""
WAIT_S = 180
"""How long it may take to get there."""
MARK = "SESSION_UNDER_TEST"

CONFTEST = """
import os, time
from pathlib import Path
import pytest

pytest_plugins = ["invariants.plugin"]
HERE = Path(__file__).parent

def stay(context, name):
    "Every rank says that it is here; rank 0 waits for rank 1, which does not come, and leaves things to clear up."
    import subprocess, tempfile
    import torch
    import torch.distributed as dist
    from multiprocessing import shared_memory
    tempfile.mkdtemp()
    context.state["memory"] = shared_memory.SharedMemory(create=True, size=1000)
    dist.barrier()
    subprocess.Popen(["sleep", "1000"], start_new_session=bool(context.rank))
    (HERE / f"{name}{context.rank}.tmp").write_text(str(os.getpid()))
    os.rename(HERE / f"{name}{context.rank}.tmp", HERE / f"{name}{context.rank}")
    if context.rank + 1 == context.world_size:
        time.sleep(1000)
    dist.recv(torch.ones(1), 1)

def fail(context):
    if context.rank:
        raise ValueError("of rank 1")

@pytest.fixture
def event():
    return (HERE / "event").touch
"""


class Session:
    """A pytest session in a folder of its own, with what it had and what there was before."""

    def __init__(self, folder: Path, *arguments: str, stdin: int = subprocess.DEVNULL):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.shared_memory = set(Path("/dev/shm").iterdir())
        self.listening: set[tuple[str, int]] = set()
        self.scratch = folder / "scratch"
        self.scratch.mkdir(exist_ok=True)
        self.started = time.monotonic()
        (folder / "conftest.py").write_text(CONFTEST)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", f"--basetemp={folder / 'base'}", "-W", "error", *arguments],
            cwd=folder,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                MARK: self.mark,
                "TMPDIR": str(self.scratch),
                "PYTHONPATH": os.pathsep.join(sys.path),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            start_new_session=True,
        )

    def processes(self) -> list[psutil.Process]:
        """All that descend from it, whoever is their parent now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def wait_for(self, *names: str) -> list[int]:
        """Until files of these names are there; the numbers in them."""
        paths = [self.folder / name for name in names]
        until(lambda: all(path.exists() for path in paths) or self.process.poll() is not None, WAIT_S)
        assert all(path.exists() for path in paths), self.process.communicate()[0]
        pids = {process.pid for process in self.processes()}
        self.listening |= {
            tuple(connection.laddr)
            for connection in psutil.net_connections("inet")
            if connection.pid in pids and connection.status == psutil.CONN_LISTEN
        }
        return [int(path.read_text() or 0) for path in paths]

    def assert_ends(self, status: int, typed: str | None = None) -> str:
        """With this exit status, soon after now and what is `typed` to it, and with nothing left; its output."""
        now = time.monotonic()
        # On a machine where the start alone took long, the end may too.
        limit = now + max(EXIT_S, (now - self.started) / 2)
        output = self.process.communicate(typed, timeout=WAIT_S)[0]
        assert self.process.returncode == status, output
        until(lambda: not self.processes(), limit - time.monotonic())
        until(lambda: set(Path("/dev/shm").iterdir()) <= self.shared_memory, limit - time.monotonic())
        until(lambda: not [*self.scratch.iterdir(), *self.folder.rglob("worlds-*")], limit - time.monotonic())
        listening = {tuple(each.laddr) for each in psutil.net_connections("inet") if each.status == psutil.CONN_LISTEN}
        assert not self.listening & listening
        return output


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within its time"
        time.sleep(0.05)


def write(folder, text):
    (folder / "test_it.py").write_text(f"from conftest import *\n{text}")


STUCK = """
def test_stuck(world):
    world.run(stay, "rank")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_in_the_middle_of_a_call(tmp_path, number):
    write(tmp_path, STUCK)
    session = Session(tmp_path)
    session.wait_for("rank0", "rank1")
    assert len(session.processes()) == 7  # pytest, the server, its helper, two ranks, and what each of them has started
    assert session.listening  # gloo's
    session.process.send_signal(number)
    output = session.assert_ends(pytest.ExitCode.INTERRUPTED if number == signal.SIGINT else -number)
    assert ("KeyboardInterrupt" in output) == (number == signal.SIGINT)


def test_ctrl_c_while_ranks_start(tmp_path):
    write(tmp_path, "def test_start(worlds, event):\n    event()\n    worlds(4).run(stay, 'rank')\n")
    session = Session(tmp_path)
    session.wait_for("event")
    session.process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in session.assert_ends(pytest.ExitCode.INTERRUPTED)


UNDER_XDIST = """
def report(name):
    (HERE / f"{name}.tmp").write_text(str(os.getpid()))
    os.rename(HERE / f"{name}.tmp", HERE / name)

@pytest.mark.parametrize("number", range(2))
def test_stuck(worlds, worker_id, number):
    report(f"worker-{worker_id}")
    worlds(1).run(stay, worker_id)

def test_goes_on(worlds):
    worlds(1).run(lambda context: None)
    report("went-on")
"""


def test_a_killed_worker_leaves_nothing_while_the_rest_goes_on_until_ctrl_c(tmp_path):
    write(tmp_path, UNDER_XDIST)
    session = Session(tmp_path, "-n", "2")
    worker, *_ = session.wait_for("worker-gw0", "gw00", "gw10")
    of_worker = psutil.Process(worker).children(recursive=True)
    assert len(of_worker) == 4  # the server, its helper, a rank, and what that has started
    os.kill(worker, signal.SIGKILL)
    until(lambda: not any(process.is_running() for process in of_worker), EXIT_S)
    until(lambda: not [*tmp_path.rglob("popen-gw0/worlds-*")], EXIT_S)
    session.wait_for("went-on")
    session.process.send_signal(signal.SIGINT)
    output = session.assert_ends(pytest.ExitCode.INTERRUPTED)
    assert "worker 'gw0' crashed while running" in output
    assert "1 failed, 1 passed" in output


FAILING = """
def test_before(worlds):
    worlds(1).run(lambda context: None)

def test_fails(worlds, event):
    worlds(1).run(lambda context: None)
    event()
    worlds(2).run(fail)

def test_after(worlds):
    worlds(1).run(lambda context: None)
"""


def test_the_first_failure_ends_it_and_the_last_failed_ends_in_the_debugger(tmp_path):
    write(tmp_path, FAILING)
    session = Session(tmp_path, "-x")
    session.wait_for("event")
    output = session.assert_ends(pytest.ExitCode.TESTS_FAILED)
    assert "1 failed, 1 passed" in output
    (tmp_path / "event").unlink()
    session = Session(tmp_path, "--lf", "--pdb", stdin=subprocess.PIPE)
    session.wait_for("event")
    output = session.assert_ends(pytest.ExitCode.INTERRUPTED, "p 'alive:', len(worlds(1).pids)\nq\n")
    assert "('alive:', 1)" in output
    assert "rerun previous 1 failure" in output
    assert "1 failed in" in output


EXIT = """
def test_exits(worlds, event):
    worlds(2).run(lambda context: None)
    event()
    pytest.exit("seen enough", 7)
"""


def test_a_test_that_calls_for_the_end(tmp_path):
    write(tmp_path, EXIT)
    session = Session(tmp_path)
    session.wait_for("event")
    assert "seen enough" in session.assert_ends(7)
