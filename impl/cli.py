"""The command line of the trainer: `python -m impl.trainer --pp 2 --dp 2 --steps 20`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from impl import checkpoint, launch
from impl.config import PRECISIONS, Config
from impl.grid import ConfigurationError, Grid
from impl.model import GPT
from impl.partition import measured_costs
from impl.trainer import Trainer
from impl.zero1 import Rule


class Batch(NamedTuple):
    """Token ids, targets and mask, each [B, S]."""

    tokens: Tensor
    targets: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    config: Config
    steps: int
    window: int
    folder: Path
    save_at: int
    resume: bool
    measure: bool


def synthetic_batch(config: Config, step: int, index: int) -> Batch:
    """A batch that depends on (seed, step, index) alone: each token fixes the next, a fifth do not count."""
    gpt = config.model
    generator = torch.Generator().manual_seed((config.seed * 1_000_003 + step) * 1_009 + index)
    ids = [torch.randint(gpt.vocabulary, (config.batch_size,), generator=generator)]
    for _ in range(gpt.sequence):
        ids.append((3 * ids[-1] + 1) % gpt.vocabulary)
    sequences = torch.stack(ids, dim=1)
    mask = torch.rand(config.batch_size, gpt.sequence, generator=generator) > 0.2
    return Batch(sequences[:, :-1], sequences[:, 1:], mask)


def train(device: torch.device, options: Options) -> None:
    """One rank of the run; rank 0 prints."""
    config = options.config
    grid = Grid.create(config.pp, config.dp, device)
    torch.manual_seed(config.seed * 1_000_003 + grid.rank)
    if options.measure:
        costs = measured_costs(config.model, config.microbatch_size, grid, config.dtype)
        config = replace(config, costs=costs)
    trainer = Trainer(config, grid)
    if options.resume:
        trainer.load(options.folder)
    say: Callable[..., None] = print if grid.rank == 0 else _silent
    say(f"pp={config.pp} dp={config.dp} {config.schedule} layers/stage={[len(stage) for stage in config.stages()]}")
    say(f"{'step':>6}  {'loss':>10}")
    manifest = None
    while trainer.steps < options.steps:
        step = trainer.steps + 1
        loss = trainer.step([synthetic_batch(config, step, index) for index in range(options.window)])
        say(f"{step:>6}  {loss:>10.6f}")
        if step == options.save_at:
            manifest = trainer.save(options.folder)
    _report(trainer, say)
    if manifest is not None:
        say(f"checkpoint of step {manifest['step']}: {options.folder / checkpoint.MANIFEST}")
        say((options.folder / checkpoint.MANIFEST).read_text(), end="")
    say(f"parameters after step {trainer.steps}: blake2b {trainer.digest()}")


def _report(trainer: Trainer, say: Callable[..., None]) -> None:
    grid, optimizer = trainer.grid, trainer.optimizer
    elements = sum(group.elements for group in optimizer.groups)
    row = [grid.pp_index, grid.dp_index, elements, optimizer.state_bytes(), optimizer.formula_bytes()]
    rows = grid.gather(row)
    say("optimizer state, bytes (step counters aside); ZeRO-1: moments x element size x ceil(P/D), D = dp")
    say("  rank  stage  replica  trainable P     held   ZeRO-1")
    for rank, (stage, replica, count, held, formula) in enumerate(rows):
        say(f"{rank:>6} {stage:>6} {replica:>8} {count:>12} {held:>8} {formula:>8}")


def _silent(*_args: object, **_options: object) -> None:
    """What ranks other than 0 print."""


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; a `ConfigurationError` says in one line what is wrong."""
    parser = _Parser(prog="python -m impl.trainer", description=__doc__)
    for name, default, text in (
        ("pp", 1, "pipeline stages"),
        ("dp", 1, "data-parallel replicas"),
        ("steps", 20, "optimizer steps in all, those before a --resume counted"),
        ("microbatches", 4, "microbatches of a replica in one batch"),
        ("batch-size", 16, "samples of one global batch"),
        ("window", 1, "global batches that one step accumulates"),
        ("save-at", 10, "step after which a checkpoint is saved"),
        ("layers", 2, "blocks of the model"),
        ("width", 32, "width of the model"),
        ("heads", 4, "attention heads"),
        ("vocabulary", 64, "token ids"),
        ("sequence", 16, "tokens of a sample"),
        ("seed", 0, "of parameters and data"),
    ):
        parser.add_argument(f"--{name}", default=default, help=f"{text} ({default})", type=int, metavar="N")
    parser.add_argument("--schedule", default="1f1b", help="gpipe or 1f1b (1f1b)")
    parser.add_argument("--precision", default="float32", help=f"{' or '.join(PRECISIONS)} (float32)")
    parser.add_argument("--optimizer", default="adam", help="adam, adamw or sgd (adam)")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate (0.01)")
    parser.add_argument("--weight-decay", type=float, default=0.0, help="weight decay (0)")
    parser.add_argument("--tied", action="store_true", help="share the weight of embedding and head")
    parser.add_argument("--frozen", type=layers, default=(), help="layers that are not trained, such as 0,1")
    parser.add_argument("--split", type=layers, help="layers of each stage, such as 2,2; else balanced by cost")
    parser.add_argument("--costs", help="of the layers, such as 1,2,2,3, or 'measured'; else estimated multiply-adds")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"), help="folder (checkpoint)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --checkpoint")
    return _options(parser.parse_args(argv))


def _options(given: argparse.Namespace) -> Options:
    world = launch.torchrun_world()
    if world is not None and given.pp * given.dp != world:
        raise ConfigurationError(
            f"--pp {given.pp} --dp {given.dp} needs {given.pp * given.dp} ranks: the world has {world}"
        )
    for name in ("pp", "dp", "steps", "microbatches", "batch_size", "window"):
        if getattr(given, name) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} {getattr(given, name)}: expected 1 or more")
    if given.batch_size % (given.dp * given.microbatches):
        raise ConfigurationError(
            f"--batch-size {given.batch_size}: expected a multiple of dp x microbatches ="
            f" {given.dp} x {given.microbatches} = {given.dp * given.microbatches}"
        )
    manifest = _manifest(given) if given.resume else None
    measure = given.costs == "measured"
    config = Config(
        pp=given.pp,
        dp=given.dp,
        schedule=given.schedule,
        microbatches=given.microbatches,
        microbatch_size=given.batch_size // (given.dp * given.microbatches),
        model=GPT(given.layers, given.width, given.heads, given.vocabulary, given.sequence, given.tied),
        # A measurement may differ from run to run: a resumed run takes the split that its checkpoint was saved with.
        split=tuple(manifest["split"]) if manifest and measure else given.split,
        costs=None if measure or given.costs is None else _floats(given.costs),
        precision=given.precision,
        rule=Rule(given.optimizer, given.lr, given.weight_decay),
        frozen=given.frozen,
        seed=given.seed,
    )
    if manifest:
        checkpoint.fits(manifest, config.describe())
    return Options(config, given.steps, given.window, given.checkpoint, given.save_at, given.resume, measure)


def _manifest(given: argparse.Namespace) -> dict[str, Any]:
    manifest = checkpoint.read_manifest(given.checkpoint)
    if manifest["step"] >= given.steps:
        raise ConfigurationError(f"--steps {given.steps}: expected more than {manifest['step']}, where --resume starts")
    return manifest


def layers(text: str) -> tuple[int, ...]:
    """Numbers between commas."""
    return tuple(int(part) for part in text.split(","))


def _floats(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(f"--costs {text}: expected 'measured' or numbers such as 1,2,2,3") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 trained, 1 a rank failed, 2 bad arguments (one line), 130 interrupted."""
    try:
        options = parse(argv)
    except (ConfigurationError, checkpoint.CheckpointError) as error:
        if launch.own_rank() == 0:
            print(f"impl.trainer: {error}", file=sys.stderr)
        return 2
    config = options.config
    try:
        if launch.torchrun_world() is not None:
            launch.in_torchrun(train, options)
        else:
            launch.in_own_processes(config.pp * config.dp, train, options)
    except KeyboardInterrupt:
        print("impl.trainer: interrupted", file=sys.stderr)
        return 130
    except launch.RankFailed as error:
        print(f"impl.trainer: {error}", file=sys.stderr)
        return 1
    return 0
