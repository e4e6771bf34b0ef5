"""What travels between the controller and its ranks: frames of bytes, functions by value, tensors as plain bytes."""

from __future__ import annotations

import io
import marshal
import os
import pickle
import socket
import struct
import sys
from types import CodeType, ModuleType
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20


def send_frame(sock: socket.socket, payload: bytes) -> None:
    """Send `payload` behind its length."""
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


class FrameReader:
    """Collects one frame at a time from a stream socket, in as many reads as it takes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()

    def read_some(self) -> bytes | None:
        """Read once; the frame if it is complete now, else None. Raises `EOFError` when the other side is gone."""
        self._receive()
        return self._take()

    def read_all(self) -> list[bytes]:
        """Read once; all frames that are complete now, of a sender that waits for no answer."""
        self._receive()
        return list(iter(self._take, None))

    def _receive(self) -> None:
        try:
            chunk = self.sock.recv(_CHUNK)
        except OSError as error:
            if error.errno is None:  # this end's own time limit
                raise
            raise EOFError from error  # reset, or nothing heard over the network for too long
        if not chunk:
            raise EOFError
        self._buffer += chunk

    def _take(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + int(_LENGTH.unpack_from(self._buffer)[0])
        if len(self._buffer) < end:
            return None
        frame = bytes(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        return frame

    def read(self) -> bytes:
        """Read until a frame is complete. Raises `EOFError` when the other side is gone."""
        while (frame := self.read_some()) is None:
            pass
        return frame


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what modules cannot be imported elsewhere by value, and dense tensors as their bytes.

    torch's own reduction would write the whole storage behind a view, and its multiprocessing reducers a file
    descriptor or a shared-memory segment per tensor.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            # cloudpickle drops the file name; tracebacks and coverage want it. Both ends are the same interpreter.
            return marshal.loads, (marshal.dumps(obj),)
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.layout is torch.strided:
            # A copy, not `contiguous`: that leaves any stride to a dimension of one element.
            plain = obj.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            data = bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""
            return _tensor, (data, str(plain.dtype).removeprefix("torch."), tuple(plain.shape))
        return super().reducer_override(obj)


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch  # only where a function gave or took tensors

    kind = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)


def dumps(value: object) -> bytes:
    """Pickle a function with its arguments, or a result; tensors arrive detached, dense, on the CPU."""
    _register_unimportable()
    with io.BytesIO() as file:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


def loads(data: bytes) -> Any:
    """The inverse of `dumps`; only ever fed by our own processes, over a private socket."""
    return pickle.loads(data)


_judged: set[tuple[str, int]] = set()
_newest: list[tuple[int, str, int]] = []


def _register_unimportable() -> None:
    """Have cloudpickle send by value what a rank cannot import: test modules, conftests, scripts."""
    name = next(reversed(sys.modules))
    newest = (len(sys.modules), name, id(sys.modules[name]))
    if _newest == [newest]:
        return  # nothing was imported since; a look at each module costs as much as a small call
    _newest[:] = [newest]
    modules = {(name, id(module)) for name, module in list(sys.modules.items())}
    for name, identity in modules - _judged:
        module = sys.modules.get(name)
        if module is not None and id(module) == identity and _needs_value(name, module):
            cloudpickle.register_pickle_by_value(module)
    _judged.update(modules)


def _needs_value(name: str, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    # Only a module proper: sys.modules also holds lazy objects that answer to any attribute.
    if type(module) is not ModuleType or not isinstance(file, str) or module.__name__ != name or name == "__main__":
        return False
    base = os.path.basename(file)  # noqa: PTH119 - thousands of modules are looked at
    if base == "conftest.py" or base.startswith("test_") or base.endswith("_test.py"):
        return True
    if file.startswith((sys.prefix, sys.base_prefix)):
        return False
    return _origin(name) != file


def _origin(name: str) -> str | None:
    """Where a fresh interpreter with this `sys.path` would find the module."""
    path = None
    spec = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _path_spec(".".join(parts[:end]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return cast("str | None", spec.origin) if spec is not None else None


def _path_spec(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None
