"""Process groups and handles of operations that tell a recorder what they are asked to do.

Methods of a group call its backend and not their `super`: torch's trampoline would hold the interpreter lock while the
backend enqueues, and gloo's threads, which free tensors, wait for that lock while they hold the queue's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from invariants.communication import POINT_TO_POINT
from invariants.world.calls import CALLS, Identity, described

if TYPE_CHECKING:
    from invariants.world.recorder import Recorder

c10d = dist.distributed_c10d
_NONE = timedelta(0)


class Seen(dist.Work):
    """A backend's handle of an operation, whose waits are noted."""

    def __init__(
        self, inner: Any, number: int, recorder: Recorder, done: Callable[[], None] | None, *, limited: bool
    ) -> None:
        super().__init__()
        self.inner, self._number, self._recorder, self._done = inner, number, recorder, done
        self._limited = limited

    def get_future(self) -> Any:
        """As the handle's. What a program hangs on it runs in a thread that is not known before it communicates."""
        if torch._C._current_graph_task_id() == -1:  # else it is DDP's reducer, which waits for it
            self._recorder.beware()
        return self.inner.get_future()

    def wait(self, timeout: Any = None) -> bool:
        """As the handle's. One with a time limit of its own is no wait for ever."""
        given = (timeout,) if timeout else ()
        recorder, completes = self._recorder, False
        for_ever = not (given or self._limited)
        if for_ever:
            recorder.begin_wait(self._number)
        try:
            result = bool(self.inner.wait(*given))
            completes = True
        finally:
            if for_ever:
                recorder.end_wait(self._number, completes=completes)
            elif completes:
                recorder.note_completion(self._number)
        if self._done is not None:
            done, self._done = self._done, None
            done()
        return result


class _Several:
    """Handles of operations that were issued as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, *timeout: Any) -> bool:
        for work in self._works:
            work.wait(*timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])


def _forwarding(name: str) -> Callable[..., Any]:
    def forward(self: Seen, *args: Any) -> Any:
        return getattr(self.inner, name)(*args)

    return forward


for _name in set(vars(dist.Work)) - {"wait", "get_future", "unbox", "_pybind11_conduit_v1_"}:
    if not _name.startswith("__"):
        setattr(Seen, _name, _forwarding(_name))


def recorded_group(recorder: Recorder) -> Any:
    """A subclass of torch's `ProcessGroup` that notes in `recorder` what its objects are asked to do."""
    base: Any = c10d.ProcessGroup

    class Meta(type(base)):  # type: ignore[misc]
        # torch asks by this name whether something is a group; those that C++ made are as well.
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, base)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, base)

    class RecordedGroup(base, metaclass=Meta):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int) -> None:
            # The only constructor that pybind11 has for a subclass; the store is asked for by Python alone.
            super().__init__(rank, size)
            self._store = store
            self._identity: Identity | None = None
            self._backends: dict[str, Any] = {}
            self._limited: bool | None = None

        def get_group_store(self) -> Any:
            return self._store

        def identity(self) -> Identity:
            # Asked for with each operation; torch gives a group its name and members after it is made.
            if self._identity is None:
                self._identity = Identity.of(str(self.group_name), dist.get_process_group_ranks(self))
            return self._identity

        def backend(self, device: str) -> Any:
            if device not in self._backends:
                self._backends[device] = self._get_backend(torch.device(device))
            return self._backends[device]

        def limited(self) -> bool:
            # A group that gives up before the world does may have been made to.
            if self._limited is None:
                whole = c10d._get_default_group()
                limits = [
                    min(group._get_backend(d).options._timeout for d in group._device_types) for group in (self, whole)
                ]
                self._limited = limits[0] < limits[1]
            return self._limited

    for name in CALLS:
        if hasattr(base, name):
            setattr(RecordedGroup, name, _recorded(recorder, name, base))
    return RecordedGroup


def _limit(group: Any) -> timedelta:
    limits: list[timedelta] = [group._get_backend(device).options._timeout for device in group._device_types]
    return min(limits)


def _has_limit(args: Sequence[Any]) -> bool:
    """Whether the options of an operation bring a time limit."""
    return any(getattr(each, "timeout", _NONE) > _NONE for each in args)


def _recorded(recorder: Recorder, name: str, base: Any) -> Callable[..., Any]:
    form = CALLS[name]
    kind = form.kind

    def method(self: Any, *args: Any, **options: Any) -> Any:
        try:
            call = described(form, self, args, options)
            do = getattr(self.backend(call.device), form.backend)
        except Exception:
            # Arguments by name, or none of torch's; a device that the group has no backend for: torch knows what to do.
            recorder.give_up()
            return getattr(base, name)(self, *args, **options)
        number = recorder.post(kind, self.identity(), call)
        if kind == "monitored_barrier":  # waits by itself, and not for ever
            return do(*args, **options)
        done = None
        if recorder.buffers is not None and kind in POINT_TO_POINT:
            done = recorder.buffers.posted(kind, number, args[0])
        try:
            if "coalesced" in name and "single" in name:  # no backend offers it to Python
                outputs, inputs, *rest = args
                work: Any = _Several([do(*pair, *rest) for pair in zip(outputs, inputs, strict=True)])
            else:
                work = do(*args, **options)
        except Exception:
            recorder.withdraw(number)
            raise
        recorder.note_backward(number)
        return Seen(work, number, recorder, done, limited=self.limited() or _has_limit(args))

    method.__name__ = name
    return method
