"""The loop of a rank: it joins its world, runs what the controller sends, reports, and forgets."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from invariants.world import guard
from invariants.world.attach import Breakpoint
from invariants.world.context import RankContext
from invariants.world.notices import Relay
from invariants.world.recorder import Recorder
from invariants.world.starter import Meeting
from invariants.world.state import Baseline, leave
from invariants.world.wire import FrameReader, dumps, loads, send_frame

_END = object()


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its number, its world's size and backend, the world's private folder.

    `meeting` is None where the world is this machine's alone, and meets in its folder.
    `relay`: the controller wants to hear of warnings and log records. `live`: somebody reads along what ranks write.
    """

    rank: int
    size: int
    backend: str
    folder: Path
    timeout_s: float
    meeting: Meeting | None = None
    relay: bool = False
    live: bool = False


def serve(sock: socket.socket, place: Place) -> None:
    """Run commands until the controller closes the socket, or one of them fails.

    A failed rank leaves: its peers, which may wait for it, then see a closed connection instead of silence.
    """
    stack = (place.folder / f"{place.rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable()
    reader = FrameReader(sock)
    try:
        context = _join(place)
        guard.refuse_given(place.size)
        relay = Relay(place.folder, place.rank)
        if place.relay:
            relay.install()
        stop = Breakpoint(place.folder, place.rank, live=place.live, limit_s=place.timeout_s)
        baseline = Baseline(place.rank)
        _answer(sock, "ok", dumps(None))
        while (command := _next(reader)) is not _END:
            if command is None:
                baseline.restore(context)
                result = dumps(leave(context))
            else:
                path, levels, cargo = command
                with relay.during_call(levels), stop.during_call():
                    result = _call(context, path, cargo)
            _flush()
            _answer(sock, "ok", result)
    except BaseException as error:
        with contextlib.suppress(Exception):  # whatever the function made of its streams
            _flush()
        _answer(sock, "raised", *describe(error))


def _next(reader: FrameReader) -> Any:
    """The next command, or `_END`: the controller asks for no more."""
    try:
        return pickle.loads(reader.read())
    except EOFError:
        return _END


def _answer(sock: socket.socket, *answer: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more; the next command is the end
        send_frame(sock, pickle.dumps(answer))


def _join(place: Place) -> RankContext:
    local_rank, local_size = place.rank, place.size
    if place.meeting is not None:
        local_rank, local_size = place.meeting.local_rank, place.meeting.local_size
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(place.size),
        LOCAL_WORLD_SIZE=str(local_size),
    )
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if place.backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    recorder = Recorder(place.folder / f"{place.rank}.record", place.rank)
    recorder.install()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if place.backend == "nccl" else "gloo",
        store=_store(place),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=place.timeout_s),
    )
    recorder.joined()
    generator = torch.Generator(device)
    return RankContext(place.rank, place.size, device, place.backend, generator, recorder)


def _store(place: Place) -> Any:
    if place.meeting is None:
        return dist.FileStore(str(place.folder / "store"), place.size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=place.timeout_s)
    # Not its master: whoever hosts the store outlives worlds.
    store = dist.TCPStore(place.meeting.host, place.meeting.port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    return dist.PrefixStore(place.meeting.prefix, store)  # type: ignore[attr-defined]


def _call(context: RankContext, path: list[str], cargo: bytes) -> bytes:
    sys.path[:] = path
    context.generator.manual_seed(context.rank)
    function, arguments = loads(cargo)
    result: Any = function(context, *arguments)
    context.recorder.idle()
    try:
        return dumps(result)
    except Exception as error:
        reason = "".join(traceback.format_exception_only(error)).strip()
        raise TypeError(f"result of type {type(result).__qualname__} cannot be pickled: {reason}") from None


def describe(error: BaseException) -> tuple[str, str, str]:
    """Qualified type name, message and traceback, also of exceptions that can be neither pickled nor printed."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    # The first frames are this file's.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    told = traceback.TracebackException(kind, error, trace)
    return name, str(told), "".join(told.format())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:  # the function may have done either
            stream.flush()
