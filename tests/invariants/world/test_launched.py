"""Under a launcher, for real: one host, and two that are network namespaces with a link between them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

BOUND_S = 90
"""How long a launch may take to end once something has broken: what is silent is lost after 10 s, the rest is slack."""
START_S = 240
"""How long it may take on a loaded machine to start all interpreters and to get to the middle of a test."""


class Job:
    """What one test has launched: all that it starts carries a mark in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._parts = []
        for name in ("tmp", "logs"):
            (folder / name).mkdir()

    def start(self, name, command, **environ):
        """Run `command` with its output in a file."""
        hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST"}
        inherited = {key: value for key, value in os.environ.items() if key not in hidden}
        with self._log(name).open("wb") as log:
            part = subprocess.Popen(
                command,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={
                    **inherited,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(self.folder / "tmp"),
                    "MARK": self.mark,
                    **environ,
                },
            )
        self._parts.append(part)
        return part

    def text(self, name):
        """What `name` has written up to now."""
        return self._log(name).read_text(errors="replace")

    def wait(self, seconds):
        """The exit statuses in the order of the starts."""
        end = time.monotonic() + seconds
        return [part.wait(max(0.1, end - time.monotonic())) for part in self._parts]

    def until(self, condition, seconds):
        """Wait for a condition while the job runs."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "not within its time"
            assert None in [part.poll() for part in self._parts], "ended before"
            time.sleep(0.05)

    def left_behind(self):
        """Processes and temporary folders that outlive it."""
        folders = [path for name in ("worlds-*", "launched-*", "invariants-*") for path in self.folder.rglob(name)]
        return self.processes(), folders

    def is_gone_soon(self):
        """Of a process that was killed, nobody waits for what it had started."""
        end = time.monotonic() + BOUND_S
        while self.left_behind() != ([], []):
            assert time.monotonic() < end, self.left_behind()
            time.sleep(0.1)

    def processes(self):
        """All that the job has started and that lives."""
        return [process for process in psutil.process_iter() if self._marked(process)]

    def close(self):
        """Kill what is left; a failed test shows what was written."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for part in self._parts:
            part.wait(30)
        for log in sorted((self.folder / "logs").iterdir()):
            print(f"---- {log.name}\n{log.read_text(errors='replace')}")

    def _log(self, name):
        return self.folder / "logs" / name

    def _marked(self, process):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return process.environ().get("MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE
        return False


@pytest.fixture
def job(tmp_path):
    running = Job(tmp_path)
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['invariants.plugin']\n")
    yield running
    running.close()


PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-rs")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


class Hosts:
    """Two hosts, each with an address of its own on one link."""

    def __init__(self, name) -> None:
        self.names = (f"{name}a", f"{name}b")
        self.addresses = ("10.77.0.1", "10.77.0.2")
        self.made = []

    def make(self):
        for host in self.names:
            ip("netns", "add", host)
            self.made.append(host)
            ip("-n", host, "link", "set", "lo", "up")
        first, second = self.names
        ip("link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
        for host, address in zip(self.names, self.addresses, strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", host)
            ip("-n", host, "link", "set", host, "up")

    def on(self, number, *command):
        """A command on one of the hosts."""
        return ["ip", "netns", "exec", self.names[number], *command]

    def cut(self):
        """Pull the cable."""
        ip("-n", self.names[0], "link", "set", self.names[0], "down")

    def remove(self):
        for host in self.made:
            ip("netns", "del", host)


@pytest.fixture
def hosts():
    if shutil.which("ip") is None:
        pytest.skip("network namespaces want the program ip")
    both = Hosts(f"inv{os.getpid()}")
    try:
        both.make()
    except subprocess.CalledProcessError as error:
        both.remove()
        pytest.skip(f"network namespaces are not to be had here: {error.stderr.strip()}")
    yield both
    both.remove()


def torchrun(job, hosts, *arguments):
    """One agent of torchrun on each host, each with a pytest."""
    for number in range(2):
        job.start(
            str(number),
            hosts.on(
                number,
                *TORCHRUN,
                "--nnodes=2",
                "--nproc-per-node=1",
                f"--node-rank={number}",
                f"--master-addr={hosts.addresses[0]}",
                "--master-port=29500",
                *PYTEST,
                *arguments,
            ),
        )


GOOD = """
import os
from hypothesis import given, settings, strategies as st
from invariants import suite
from my_target import target

@given(number=st.integers(0, 100))
@settings(max_examples=5, deadline=None)
def test_rank_0_draws(world, number):
    def double(context):
        import torch, torch.distributed as dist
        total = torch.tensor([number])
        dist.all_reduce(total)
        context.state["number"] = number
        return total.item(), context.rank, os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]
    assert world.run(double) == [(2 * number, 0, "0", "0", "2"), (2 * number, 1, "1", "1", "2")]

def test_state_is_reset(world, worlds):
    assert world.run(lambda context: context.state) == [{}, {}]
    assert worlds(2) is world

def test_fewer(worlds):
    assert worlds(1).run(lambda context: (context.rank, context.world_size)) == [(0, 1)]

def test_fresh(worlds):
    fresh = worlds.fresh(2)
    assert not set(fresh.run(lambda context: os.getpid())) & set(worlds(2).run(lambda context: os.getpid()))

def test_more(worlds):
    worlds(3)

def test_tests_start_sessions_of_their_own(pytester):
    pytester.makeconftest("pytest_plugins = ['invariants.plugin']")
    pytester.makepyfile("def test_it(world): assert len(world.pids) == 0")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)

test_suite = suite(target)
"""


def test_one_host_one_report(job):
    examples = Path(__file__).parents[2] / "examples"
    shutil.copy(examples / "my_trainer.py", job.folder / "my_target.py")
    (job.folder / "conftest.py").write_text("pytest_plugins = ['invariants.plugin', 'pytester']\n")
    (job.folder / "test_good.py").write_text(GOOD)
    job.start("all", [*TORCHRUN, "--standalone", "--nproc-per-node=2", *PYTEST, "test_good.py"])
    assert job.wait(START_S) == [0]
    text = job.text("all")
    assert text.count("test session starts") == 1
    assert "invariants: 2 processes of torchrun; rank 0 runs the tests" in text
    assert " 5 passed, " in text
    assert "a world of 3 ranks, and torchrun has started 2 processes" in text
    assert "suites draw worlds of many sizes that share a folder of one machine: run them without a launcher" in text
    assert job.left_behind() == ([], [])


def test_nccl(job):
    import torch

    devices = 0 if torch.version.cuda is None else torch.cuda.device_count()
    if devices < 2:
        pytest.skip(f"NCCL wants a GPU of its own for each of 2 ranks, and there are {devices}")
    (job.folder / "test_nccl.py").write_text(
        """
def test_nccl(world):
    def total(context):
        import torch, torch.distributed as dist
        ones = torch.ones(3, device=context.device)
        dist.all_reduce(ones)
        return context.device.index, ones
    assert [(index, ones.tolist()) for index, ones in world.run(total)] == [(0, [2.0] * 3), (1, [2.0] * 3)]
"""
    )
    job.start("all", [*TORCHRUN, "--standalone", "--nproc-per-node=2", *PYTEST, "--backend=nccl", "test_nccl.py"])
    assert job.wait(START_S) == [0]
    assert " 1 passed" in job.text("all")


BAD = """
import os, time
import pytest

def waits(context):
    import torch, torch.distributed as dist
    if context.rank:
        raise ValueError("the third layer")
    dist.all_reduce(torch.ones(1))

def test_raises(world):
    world.run(waits)

def test_prints_and_is_killed(world):
    def killed(context):
        print("last words of", context.rank, flush=True)
        if context.rank:
            os.kill(os.getpid(), 9)
    world.run(killed)

@pytest.mark.worlds(deadline=3)
def test_hangs(world):
    def hang(context):
        while context.rank:
            time.sleep(0.1)
    world.run(hang)

def test_deadlock(world):
    def cross(context):
        import torch, torch.distributed as dist
        dist.send(torch.ones(3), 1 - context.rank)
        dist.recv(torch.ones(3), 1 - context.rank)
    world.run(cross, deadline_s=500)

def test_goes_on(world):
    def interface(context):
        import torch, torch.distributed as dist
        dist.barrier()
        return os.environ["GLOO_SOCKET_IFNAME"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    names = os.environ["HOSTS"].split()
    assert world.run(interface) == [(names[0], "0", "1"), (names[1], "0", "1")]
"""


def test_ranks_of_two_hosts_that_fail_are_named_and_replaced(job, hosts, monkeypatch):
    monkeypatch.setenv("HOSTS", " ".join(hosts.names))
    (job.folder / "test_bad.py").write_text(BAD)
    torchrun(job, hosts, "test_bad.py")
    assert job.wait(START_S) == [1, 1]
    text = job.text("0")
    assert "4 failed, 1 passed" in text
    assert "deadlock: ranks 0 -> 1 -> 0 wait for each other" in text
    assert re.search(r"rank 1 waits in send of float32\[3\] to rank 0, test_bad.py:\d+", text)
    assert "rank 1 raised ValueError: the third layer (world of 2)" in text
    assert "rank 1 died: killed by SIGKILL (world of 2)" in text
    assert "last words of 1" in text
    assert "rank 1 was not done after 3 s (world of 2); rank 0 had finished by then" in text
    assert "in hang" in text  # its stack came over the network
    assert "test session starts" not in job.text("1")
    assert job.left_behind() == ([], [])


STEP = """
import os, pathlib, time

def step(context, folder):
    import torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1))
    own = pathlib.Path(folder) / f"rank{context.rank}"
    own.touch()
    while True:
        dist.all_reduce(torch.ones(1))

def test_before(world):
    assert world.run(lambda context: context.rank) == [0, 1]

def test_step(world):
    world.run(step, os.getcwd(), deadline_s=500)

def test_after(world):
    (pathlib.Path.cwd() / "after").touch()
"""


def launched_pytest(job, host):
    """The pytest of torchrun's agent on `host`."""
    return next(
        process
        for process in psutil.Process(job._parts[host].pid).children(recursive=True)
        if "pytest" in process.cmdline() and "torch.distributed.run" not in process.cmdline()
    )


BREAKS = {
    "link": (lambda job, hosts: hosts.cut(), "nothing was heard from it for 10 s"),
    "process": (lambda job, hosts: launched_pytest(job, 1).kill(), "its pytest process has ended"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_lost_process_is_named_and_ends_the_job_on_every_host(job, hosts, what):
    (job.folder / "test_step.py").write_text(STEP)
    torchrun(job, hosts, "test_step.py")
    job.until(lambda: all((job.folder / f"rank{rank}").exists() for rank in range(2)), START_S)
    break_it, reason = BREAKS[what]
    break_it(job, hosts)
    statuses = job.wait(BOUND_S)
    assert 0 not in statuses
    text = job.text("0")
    assert f"rank 1 died: {reason} (process " in text
    assert f"rank 1 is lost: {reason} (process " in text
    assert f"{hosts.addresses[1]})" in text
    assert "1 failed, 1 passed" in text
    assert not (job.folder / "after").exists()
    assert job.left_behind() == ([], [])


def test_a_lost_controller_ends_the_job_on_every_host(job, hosts):
    (job.folder / "test_step.py").write_text(STEP)
    torchrun(job, hosts, "test_step.py")
    job.until(lambda: all((job.folder / f"rank{rank}").exists() for rank in range(2)), START_S)
    launched_pytest(job, 0).kill()
    assert job.wait(BOUND_S) == [1, 1]
    assert "rank 1: rank 0, the way to it or this process's launcher is lost" in job.text("1")
    job.is_gone_soon()


def test_srun_with_a_launcher_that_is_killed(job, hosts):
    """Each process has a parent of its own, as under slurmstepd; that of rank 1 is killed."""
    (job.folder / "test_step.py").write_text(STEP)
    starts = f"import subprocess, sys; sys.exit(subprocess.call({[sys.executable, *PYTEST, 'test_step.py']!r}))"
    for rank in range(2):
        job.start(
            str(rank),
            hosts.on(rank, sys.executable, "-c", starts),
            SLURM_PROCID=str(rank),
            SLURM_NTASKS="2",
            SLURM_LOCALID="0",
            MASTER_ADDR=hosts.addresses[0],
            MASTER_PORT="29500",
        )
    job.until(lambda: all((job.folder / f"rank{rank}").exists() for rank in range(2)), START_S)
    os.kill(job._parts[1].pid, signal.SIGKILL)
    assert job.wait(BOUND_S) == [1, -signal.SIGKILL]
    assert "invariants: 2 processes of srun; rank 0 runs the tests" in job.text("0")
    assert "rank 1 died: its launcher has ended (process " in job.text("0")
    job.is_gone_soon()
    assert "rank 1: rank 0, the way to it or this process's launcher is lost" in job.text("1")
