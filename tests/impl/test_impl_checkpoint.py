"""A checkpoint is the old set or the new one, has the bytes that were saved, and fits the run that loads it."""

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impl import checkpoint
from impl.checkpoint import CheckpointError
from impl.config import Config
from impl.grid import ConfigurationError, Grid
from impl.model import GPT
from impl.trainer import Trainer
from impl.zero1 import Rule

ALONE = Grid(1, 1, 0, torch.device("cpu"))
HEADER = {"step": 1, "grid": {"pp": 1, "dp": 1}}


class Crash(BaseException):
    """The process is gone: nothing that would clean up runs."""


def save(folder, value):
    return checkpoint.save(folder, {"x": torch.full((3,), value)}, [], {**HEADER, "step": int(value)}, ALONE)


def saved(folder):
    manifest, tensors = checkpoint.load(folder, HEADER, ALONE)
    assert manifest["step"] == tensors["x"][0]
    return tensors["x"].tolist()


def operations(stop_at, error):
    """Count operations on files, and fail at number `stop_at`."""
    count = 0

    def counted(original):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count == stop_at:
                raise error
            return original(*arguments, **options)

        return call

    patches = mock.patch.multiple(
        Path, replace=counted(Path.replace), open=counted(Path.open), unlink=counted(Path.unlink)
    )
    return patches, mock.patch.object(os, "fsync", counted(os.fsync))


@pytest.mark.parametrize("stop_at", range(1, 14))
@pytest.mark.parametrize("error", [OSError("disk is full"), Crash()])
def test_a_save_that_stops_anywhere_leaves_the_old_set_or_the_new_one(tmp_path, stop_at, error):
    save(tmp_path, 1.0)
    paths, syncs = operations(stop_at, error)
    with paths, syncs:
        try:
            save(tmp_path, 2.0)
            outcome = "saved"
        except (RuntimeError, Crash):
            outcome = "failed"
    assert saved(tmp_path) in ([1.0] * 3, [2.0] * 3)
    assert saved(tmp_path) == [2.0] * 3 or outcome == "failed"
    save(tmp_path, 3.0)
    assert saved(tmp_path) == [3.0] * 3
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("generation-")) == [
        "manifest.json"
    ]
    assert len(list(tmp_path.iterdir())) == 2, "old generations are removed"


def test_the_last_operation_is_within_the_range_above(tmp_path):
    save(tmp_path, 1.0)
    paths, syncs = operations(14, Crash())
    with paths, syncs:
        save(tmp_path, 2.0)
    assert saved(tmp_path) == [2.0] * 3


def test_a_reader_between_two_saves_takes_the_new_set(tmp_path):
    """The manifest is read, then a save replaces the set and removes the old files, then the files are opened."""
    save(tmp_path, 1.0)
    original = checkpoint.fits

    def overtaken(*arguments):
        if not (tmp_path / "generation-2-rank-0.safetensors").exists():
            save(tmp_path, 2.0)
        original(*arguments)

    with mock.patch.object(checkpoint, "fits", overtaken):
        assert saved(tmp_path) == [2.0] * 3


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_changed_byte_is_noticed(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    manifest = save(folder, 1.0)
    path = folder / manifest["shards"][0]["file"]
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match=f"{path.name}: is damaged"):
        checkpoint.load(folder, HEADER, ALONE)
    path.write_bytes(content[:position])
    with pytest.raises(RuntimeError, match=f"{path.name}: is damaged: {position} bytes"):
        checkpoint.load(folder, HEADER, ALONE)


def test_what_is_missing_or_foreign_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no such file: nothing was saved in this folder"):
        checkpoint.read_manifest(tmp_path)
    manifest = save(tmp_path, 1.0)
    (tmp_path / manifest["shards"][0]["file"]).unlink()
    with pytest.raises(RuntimeError, match=r"is missing, though manifest.json lists it"):
        checkpoint.load(tmp_path, HEADER, ALONE)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="expected a manifest of format 1"):
        checkpoint.read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"pp": 2}, "world_size"),
        ({"model": GPT(layers=1)}, "split"),
        ({"model": GPT(tied=True)}, "model"),
        ({"precision": "float64"}, "precision"),
        ({"rule": Rule("sgd")}, "optimizer"),
        ({"frozen": (0,)}, "frozen"),
    ],
)
def test_another_run_is_refused(tmp_path, change, key):
    manifest = Trainer(Config(), ALONE).save(tmp_path)
    with pytest.raises(ConfigurationError, match=f"checkpoint has {key}=.*, this run .*: load it with the settings"):
        checkpoint.fits(manifest, Config(**change).describe())


def test_a_manifest_lists_shards_that_cover_each_stage(worlds, tmp_path):
    def write(context, folder):
        from impl.target import target
        from invariants.case import Case, Topology

        trainer = target.build(Case(topology=Topology.of(pp=2, dp=2)), context)
        return trainer.trainer.save(folder)

    manifests = worlds(4).run(write, tmp_path)
    assert manifests == [checkpoint.read_manifest(tmp_path)] * 4
    manifest = manifests[0]
    assert (manifest["world_size"], manifest["grid"], manifest["step"]) == (4, {"pp": 2, "dp": 2}, 0)
    for replicas in (manifest["shards"][:2], manifest["shards"][2:]):
        (first,), (second,) = (shard["layout"] for shard in replicas)
        assert first["shard"][0] == 0
        assert first["shard"][1] == second["shard"][0]
        assert first["elements"] <= second["shard"][1] == first["padded"]


def test_failures_on_one_rank_reach_all_and_change_nothing(worlds, tmp_path):
    """One rank cannot write, then one file is damaged: no rank waits, and none goes on with half a checkpoint."""

    def run(context, folder):
        import contextlib
        from pathlib import Path
        from unittest import mock

        from impl.target import target
        from invariants.case import Case, Topology

        trainer = target.build(Case(topology=Topology.of(pp=1, dp=2)), context).trainer
        trainer.save(folder)
        messages = []
        broken = mock.patch.object(Path, "replace", side_effect=OSError("disk is full"))
        with broken if context.rank == 1 else contextlib.nullcontext():
            try:
                trainer.save(folder)
            except RuntimeError as error:
                messages.append(str(error))
        trainer.load(folder)
        trainer.save(folder)
        if context.rank == 1:
            (file,) = folder.glob("*rank-1*")
            file.write_bytes(file.read_bytes()[:-1])
        before = trainer.digest()
        try:
            trainer.load(folder)
        except RuntimeError as error:
            messages.append(str(error).partition(folder.name)[2])
        return messages, trainer.digest() == before

    results = worlds(2).run(run, tmp_path)
    assert results[0] == results[1]
    (full, damaged), unchanged = results[0]
    assert full == "rank 1: disk is full"
    assert "rank-1.safetensors: is damaged" in damaged
    assert unchanged


@pytest.mark.parametrize(("pp", "dp", "kind"), [(1, 1, "adam"), (2, 1, "adamw"), (2, 2, "adam"), (1, 3, "sgd")])
def test_resumed_in_fresh_processes_it_ends_with_the_same_bits(worlds, tmp_path, pp, dp, kind):
    def train(context, case, folder, resumed):
        import random

        import torch

        from impl.cli import synthetic_batch
        from impl.target import target

        trainer = target.build(case, context).trainer
        torch.manual_seed(context.rank + 100 * resumed)
        random.seed(context.rank + 100 * resumed)
        if resumed:
            trainer.load(folder)
        while trainer.steps < 5:
            trainer.step([synthetic_batch(trainer.config, trainer.steps, index) for index in range(2)])
            torch.rand(1)
            random.gauss(0, 1)
            if trainer.steps == 2 and not resumed:
                trainer.save(folder)
        moments = {name: tensor.tolist() for name, tensor in trainer.optimizer.tensors().items()}
        return trainer.digest(), moments, torch.rand(3).tolist(), random.gauss(0, 1)

    from invariants.case import Case, Model, OptimizerSpec, Topology

    case = Case(
        topology=Topology.of(pp=pp, dp=dp), microbatches=2, schedule="1f1b", model=Model(tied=True), frozen=(1,)
    )
    case = replace(case, optimizer=OptimizerSpec(kind))
    whole = worlds(pp * dp).run(train, case, tmp_path, False)
    world = worlds.fresh(pp * dp)
    assert world.run(train, case, tmp_path, True) == whole
    world.close()
