"""A sharded checkpoint: one file a rank and one manifest, which alone decides what the checkpoint is.

    manifest.json                    step, world size, grid, ...; of each rank: file, bytes, hash, shard offsets
    generation-3-rank-0.safetensors  what rank 0 is responsible for
    generation-3-rank-1.safetensors  ...

A save writes new files beside the old ones, makes them durable, and then replaces the manifest in one atomic rename, by
one rank. So a reader sees the old set or the new one, at whatever point the save dies. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from impl.grid import ConfigurationError, Grid

MANIFEST = "manifest.json"
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged or made by another format; the message names the file."""


def save(
    folder: Path, tensors: Mapping[str, Tensor], layout: object, header: Mapping[str, Any], grid: Grid
) -> dict[str, Any]:
    """Write `tensors` of this rank; collective. Returns the manifest once the set is committed, on every rank.

    `layout` describes this rank's shards and `header` the whole run, both as JSON. A rank that cannot write makes every
    rank raise, and the checkpoint that was in `folder` stays the valid one.
    """

    def write() -> dict[str, Any]:
        generation = _generation(folder) + 1
        folder.mkdir(parents=True, exist_ok=True)
        _sync(folder.parent)
        data = safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})
        file = f"generation-{generation}-rank-{grid.rank}.safetensors"
        replace(folder / file, data)
        return {"rank": grid.rank, "file": file, "bytes": len(data), "hash": _hash(data), "layout": layout}

    shards = grid.together(write)
    generation = int(shards[0]["file"].split("-")[1])
    manifest = {"format": FORMAT, "generation": generation, **header, "shards": shards}

    def commit() -> None:
        if grid.rank == 0:
            replace(folder / MANIFEST, _text(manifest).encode())
            for path in (*folder.glob("generation-*"), *folder.glob("*.tmp")):
                if not path.name.startswith(f"generation-{generation}-"):
                    path.unlink()

    grid.together(commit)
    return manifest


def load(folder: Path, header: Mapping[str, Any], grid: Grid) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the manifest and this rank's tensors (on the CPU); collective.

    Raises on every rank, before anything is returned on any, where the checkpoint was made by another run (`fits`), or
    a file is missing or has other bytes than those that were saved.
    """
    found: list[tuple[dict[str, Any], dict[str, Tensor]]] = []

    def read() -> int:
        found.append(_read(folder, header, grid.rank))
        return int(found[0][0]["generation"])

    generations = grid.together(read)
    if len(set(generations)) > 1:
        raise CheckpointError(f"{folder}: was replaced while it was read (generations {generations}): load again")
    return found[0]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in `folder`; a `CheckpointError` where there is none that can be read."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file: nothing was saved in this folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: expected a manifest of format {FORMAT}")
    return manifest


def fits(manifest: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another grid, split, model, precision or optimizer; steps may differ."""
    for key, ours in header.items():
        if key != "step" and manifest.get(key) != ours:
            raise ConfigurationError(
                f"checkpoint has {key}={json.dumps(manifest.get(key))}, this run {json.dumps(ours)}:"
                " load it with the settings that it was saved with"
            )


def replace(path: Path, data: bytes) -> None:
    """Put `data` at `path`, durably and at once: readers see the old file or the new one, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Make the names in `folder` durable: to sync a file does not sync the entry that leads to it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(folder: Path, header: Mapping[str, Any], rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    while True:
        manifest = read_manifest(folder)
        fits(manifest, header)
        shard = manifest["shards"][rank]
        path = folder / shard["file"]
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            if read_manifest(folder) != manifest:
                continue  # a save has just replaced the set that we were about to read
            raise CheckpointError(f"{path}: is missing, though {MANIFEST} lists it") from None
        if _hash(data) != shard["hash"]:
            raise CheckpointError(
                f"{path}: is damaged: {len(data)} bytes with hash {_hash(data)},"
                f" {MANIFEST} lists {shard['bytes']} bytes with hash {shard['hash']}"
            )
        try:
            return manifest, safetensors.torch.load(data)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _generation(folder: Path) -> int:
    return int(read_manifest(folder)["generation"]) if (folder / MANIFEST).exists() else 0


def _hash(data: bytes) -> str:
    return "blake2b:" + hashlib.blake2b(data, digest_size=16).hexdigest()


def _text(manifest: Mapping[str, Any]) -> str:
    """JSON with one line a setting and one a shard, so that people can read it."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items() if key != "shards"]
    shards = ",\n".join(f"    {json.dumps(shard)}" for shard in manifest["shards"])
    return "{\n" + ",\n".join([*lines, f'  "shards": [\n{shards}\n  ]']) + "\n}\n"
