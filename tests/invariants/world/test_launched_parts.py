"""What a launch is read from, who is let in, and what the controller makes of those who come, stay away or leave."""

import os
import pickle
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError, WorldError
from invariants.world.launched import channel, crew, launch
from invariants.world.launched.channel import Door, Entrance
from invariants.world.launched.fleet import Fleet
from invariants.world.launched.launch import NUMBERS, Hidden, Launch
from invariants.world.pool import WorldPool
from invariants.world.wire import FrameReader, send_frame

PLACE = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpirun of MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun --mpi=pmi2": ("PMI_RANK", "PMI_SIZE", "SLURM_LOCALID"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@given(size=st.integers(2, 10_000), data=st.data())
def test_each_launcher_is_understood(launcher, size, data):
    rank, local = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 15))
    numbers = dict(zip(LAUNCHERS[launcher], map(str, (rank, size, local)), strict=True))
    read = Launch.read({**PLACE, **numbers})
    assert (read.rank, read.size, read.local_rank, read.host, read.port) == (rank, size, local, "node0", 29500)
    assert not read.agent_store


def test_the_innermost_launcher_counts():
    outer = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    inner = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    read = Launch.read({**PLACE, **outer, **inner, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (read.launcher, read.rank, read.agent_store, read.prefix) == ("torchrun", 5, True, "invariants/2")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        PLACE,
        {"RANK": "0", "WORLD_SIZE": "2"},  # a container's: nobody is to be met
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script's
        {**PLACE, "RANK": "0", "WORLD_SIZE": "1"},
        {**PLACE, "RANK": "0"},
    ],
)
def test_what_is_no_launch(environ):
    assert Launch.read(environ) is None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"RANK": "one"}, "RANK is 'one': expected a number of 0 or more; or use --launcher=none"),
        ({"RANK": "2"}, "RANK=2: expected less than WORLD_SIZE=2"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is ''"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
    ],
)
def test_wrong_numbers_are_one_clear_line(wrong, told):
    environ = {**PLACE, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **wrong}
    with pytest.raises(UsageError) as error:
        Launch.read(environ)
    assert told in str(error.value)


def test_numbers_are_hidden_from_what_tests_start(monkeypatch):
    for name in NUMBERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    hidden = Hidden()
    assert not NUMBERS & os.environ.keys()
    hidden.restore()
    assert NUMBERS & os.environ.keys() == {"RANK", "SLURM_NTASKS"}


@pytest.fixture(scope="module")
def server():
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def launched(server, request):
    """A launch of three processes on this host, whose store is another's."""
    return Launch("torchrun", 0, 3, 0, "127.0.0.1", server.port, agent_store=True, attempt=request.node.name)


@pytest.fixture
def door(launched):
    opened = Door(launched, launched.store())
    yield opened
    opened.sock.close()


def in_thread(function, *arguments):
    """What it returns or raises, in a list, once the thread has ended."""
    results = []

    def run():
        try:
            results.append(function(*arguments))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_who_has_read_the_store_is_let_in(launched, door):
    entrance = Entrance.find(launched, launched.store())
    assert entrance == door.entrance
    thread, results = in_thread(entrance.enter, "agent", 1)
    ours, hello = door.admit()
    thread.join(30)
    with ours, results[0] as theirs:
        assert hello == ("agent", 1)
        send_frame(theirs, b"first")
        assert FrameReader(ours).read() == b"first"
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * channel.LOST_S


def test_who_has_not_is_not_and_nothing_of_it_is_unpickled(launched, door, monkeypatch):
    monkeypatch.setattr(channel, "PROOF_S", 0.2)
    monkeypatch.setattr(pickle, "loads", lambda data: pytest.fail("unpickled"))
    stranger = Entrance("127.0.0.1", door.entrance.port, bytes(32))
    thread, results = in_thread(stranger.enter, "agent", 1)
    assert door.admit() is None
    thread.join(30)
    assert "is not the controller of this launch" in str(results[0])
    with socket.create_connection(("127.0.0.1", door.entrance.port)) as silent:
        assert door.admit() is None
        assert silent.recv(1) == b""
    with socket.create_connection(("127.0.0.1", door.entrance.port)) as liar:
        liar.sendall(bytes(32) + bytes(32) + b"\0\0\0\1.")
        assert door.admit() is None


def test_an_impostor_behind_the_door_is_given_no_proof(door):
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        entrance = Entrance("127.0.0.1", impostor.getsockname()[1], door.entrance.secret)
        thread, results = in_thread(entrance.enter, "agent", 1)
        sock, _ = impostor.accept()
        with sock:
            sock.sendall(bytes(64))
            assert len(sock.recv(32)) == 32  # its challenge
            thread.join(30)
            assert "is not the controller of this launch" in str(results[0])
            assert sock.recv(1) == b""


def test_a_name_that_stands_for_loopback_here_is_listened_to_from_everywhere(monkeypatch):
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(channel.socket, "getaddrinfo", lambda *_, **__: here)
    with channel._listen("node0", 1) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"
    with channel._listen("127.0.1.1", 1) as sock:
        assert sock.getsockname()[0] == "127.0.1.1"


class Agents:
    """The launched processes 1 and 2, played by this test."""

    def __init__(self, launched):
        self.launched = launched
        self.socks = {}

    def come(self, fleet, rank, local_rank):
        entrance = Entrance.find(self.launched, self.launched.store())
        thread, results = in_thread(entrance.enter, "agent", rank, local_rank, f"process {rank}")
        fleet.note_exit(30)
        thread.join(30)
        self.socks[rank] = results[0]

    def tell(self, fleet, rank, *news):
        send_frame(self.socks[rank], pickle.dumps(news))
        fleet.note_exit(30)

    def orders(self, rank):
        return pickle.loads(FrameReader(self.socks[rank]).read())


@pytest.fixture
def agents(launched):
    played = Agents(launched)
    yield played
    for sock in played.socks.values():
        sock.close()


@pytest.fixture
def fleet(launched, monkeypatch):
    monkeypatch.setattr(crew, "START_S", 0.2)
    monkeypatch.setattr(crew, "END_S", 0.2)
    made = Fleet(launched)
    yield made
    made.end(0)


def test_devices_are_those_of_the_local_ranks(fleet, agents, tmp_path):
    for rank, local_rank, devices in ((1, 1, 2), (2, 2, 2)):
        agents.come(fleet, rank, local_rank)
        agents.tell(fleet, rank, "ready", devices)
    # Rank 0 is this process, which has not been asked to serve.
    assert fleet.devices() == 1
    either, nccl = (WorldPool(tmp_path, backend=backend, starter=fleet) for backend in ("auto", "nccl"))
    assert [either.backend(size) for size in (1, 2)] == ["nccl", "gloo"]
    assert nccl.backend(1) == "nccl"
    with pytest.raises(UsageError, match="NCCL wants a GPU of its own for each of 2 ranks, and there are 1: use"):
        nccl.backend(2)
    assert fleet.lacking(3) is None
    assert fleet.lacking(4) == "a world of 4 ranks, and torchrun has started 3 processes"


def test_who_does_not_come_is_named(fleet, agents, tmp_path):
    agents.come(fleet, 2, 0)
    with pytest.raises(WorldError, match=r"3 processes launched, but not come within \d+ s: 1$"):
        fleet.muster(tmp_path)


def test_who_leaves_is_named_and_its_words_are_kept(fleet, agents, tmp_path):
    for rank in (1, 2):
        agents.come(fleet, rank, 0)
    agents.tell(fleet, 1, "gone", "its launcher has ended")
    agents.socks[2].close()
    assert fleet.look() == [
        "rank 1 is lost: its launcher has ended (process 1, 127.0.0.1)",
        "rank 2 is lost: its pytest process has ended (process 2, 127.0.0.1)",
    ]
    with pytest.raises(WorldError, match="rank 1 is lost: its launcher has ended"):
        fleet.muster(tmp_path)
    assert fleet.end(0) == 1


def test_who_does_not_answer_is_lost(fleet, agents, monkeypatch):
    monkeypatch.setattr(crew, "ANSWER_S", 0.2)
    for rank in (1, 2):
        agents.come(fleet, rank, 0)
    thread, results = in_thread(fleet._crew.ask, fleet._crew.members.values(), "settle")
    order, number, question = agents.orders(1)
    assert (order, question) == ("ask", "settle")
    send_frame(agents.socks[1], pickle.dumps(("answer", number, "all")))
    thread.join(30)
    assert results == [{1: "all"}]
    assert fleet.lost == ["rank 2 is lost: it did not answer within 0.2 s (process 2, 127.0.0.1)"]


def test_all_end_with_the_status_of_rank_0(fleet, agents):
    for rank in (1, 2):
        agents.come(fleet, rank, 0)
    thread, results = in_thread(fleet.end, 5)
    for rank in (1, 2):
        assert agents.orders(rank) == ("end", 5)
        send_frame(agents.socks[rank], pickle.dumps(("ended",)))
    thread.join(30)
    assert results == [5]


def test_who_does_not_end_makes_a_good_session_fail(fleet, agents):
    for rank in (1, 2):
        agents.come(fleet, rank, 0)
    assert fleet.end(0) == 1
    assert "it did not end within" in fleet.lost[0]


def test_a_store_that_is_not_there_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(launch, "START_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(WorldError, match=f"rank 1 of 2 cannot reach the store at MASTER_ADDR=127.0.0.1, .*={port}"):
        Launch("srun", 1, 2, 0, "127.0.0.1", port, agent_store=False, attempt="0").store()


def test_without_the_launcher_each_process_is_alone_and_may_not_draw(pytester, monkeypatch):
    pytester.makeconftest("pytest_plugins = ['invariants.plugin']")
    pytester.makepyfile(
        """
        from hypothesis import given, strategies as st
        def test_plain(): pass
        @given(st.integers())
        def test_drawn(number): pass
        """
    )
    for name, value in {**PLACE, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--launcher=none")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*@given was entered on one of 2 ranks*"])


def test_workers_of_xdist_are_refused_in_one_line(pytester, monkeypatch, server):
    pytester.makeconftest("pytest_plugins = ['invariants.plugin']")
    monkeypatch.setattr(crew, "START_S", 0.2)
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    for name, value in {**environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-n2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: workers of xdist under torchrun: rank 0 runs the tests; drop -n and --tx"])
    assert os.environ["RANK"] == "0"
