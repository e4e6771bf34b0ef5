"""An ordinary data-parallel trainer, and the adapter that has it judged: `invariants check my_trainer:target`.

The trainer knows nothing of the adapter. It has no pipeline and keeps its optimizer state on every rank.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from invariants import MISSING, GlobalBatch, Held, Kind, Moment, Promises, StepResult
from invariants.strategies import data_parallel_cases

FEATURES, CLASSES = 5, 3


class MyTrainer:
    """Classifies points; each replica takes every dp-th sample of a batch, `batches` are accumulated into one step."""

    def __init__(self, seed, dtype, lr, group=None):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES)).to(dtype)
        self.ddp = DistributedDataParallel(self.model, process_group=group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)
        self.steps = 0

    def train_step(self, batches, before_update=lambda: None):
        rank, replicas = dist.get_rank(), dist.get_world_size()
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for number, (points, labels) in enumerate(batches, start=1):
            with contextlib.nullcontext() if number == len(batches) else self.ddp.no_sync():
                loss = nn.functional.cross_entropy(self.ddp(points[rank::replicas]), labels[rank::replicas])
                loss = loss / len(batches)
                loss.backward()
            total += loss.detach() / replicas
        before_update()
        self.optimizer.step()
        self.steps += 1
        dist.all_reduce(total)
        return float(total)

    def save(self, path):
        if dist.get_rank() == 0:
            path.mkdir()
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}
            torch.save(state, path / "state.pt")
        torch.save(torch.get_rng_state(), path.with_name(f"rng.{dist.get_rank()}.pt"))
        dist.barrier()

    def load(self, path):
        state = torch.load(path / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        torch.set_rng_state(torch.load(path.with_name(f"rng.{dist.get_rank()}.pt"), weights_only=True))


class Adapter:
    """`MyTrainer` as `invariants.target.Trainer`."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.save, self.load = trainer.save, trainer.load

    def step(self, window, observe):
        batches = [(batch.tokens, batch.targets) for batch in window]
        return StepResult(self.trainer.train_step(batches, lambda: observe(Moment.REDUCED)))

    def held(self, kind):
        for name, parameter in self.trainer.model.named_parameters():
            shape = tuple(parameter.shape)
            if kind is Kind.PARAMETER:
                yield Held(name, parameter, shape)
            elif kind is Kind.GRADIENT:
                yield Held(name, MISSING if parameter.grad is None else parameter.grad, shape)
            elif kind is Kind.OPTIMIZER:
                for key, value in self.trainer.optimizer.state[parameter].items():
                    role = "counter" if key == "step" else "value"
                    yield Held(name, value, tuple(value.shape), state_key=key, role=role)

    def steps_done(self):
        return self.trainer.steps


class MyTarget:
    """What `invariants` judges. Without `reference`, the trainer itself, alone in float64, says what is right."""

    name = "my-trainer"
    promises = Promises(layout="replicated", resume="tolerance")

    def cases(self):
        return data_parallel_cases(optimizers=("adamw",))

    def build(self, case, rank):
        dtype = getattr(torch, case.precision)
        return Adapter(MyTrainer(case.seed, dtype, case.optimizer.lr))

    def window(self, case, step):
        generator = torch.Generator().manual_seed(1000 * case.seed + step)
        size, dtype = case.batch_size, getattr(torch, case.precision)
        for _ in range(case.windows[step]):
            points = torch.randn(size, FEATURES, generator=generator).to(dtype)
            labels = torch.randint(CLASSES, (size,), generator=generator)
            yield GlobalBatch(points, labels, torch.ones(size))


target = MyTarget()
