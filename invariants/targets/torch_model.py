"""A small pre-norm GPT as a list of layers, and its cut into pipeline stages; input for torch's own parts."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from invariants.case import Case, Model
from invariants.errors import UsageError
from invariants.probes.reference import DTYPES


class Embedding(nn.Module):
    """Token ids [batch, sequence] to vectors [batch, sequence, width], with learned positions."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.sequence, sizes.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens and positions."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        vectors: Tensor = self.token(tokens) + self.position(places)
        return vectors


class Block(nn.Module):
    """Causal self-attention and a two times wider feed-forward, each on a normed residual; keeps its input's shape."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, sequence, width] to the same shape."""
        batch, sequence, width = x.shape
        queries, keys, values = (
            part.view(batch, sequence, self.heads, -1).transpose(1, 2)
            for part in self.attention_in(self.norm1(x)).split(width, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        wider: Tensor = self.narrow(F.gelu(self.widen(self.norm2(x))))
        return x + wider


class Head(nn.Module):
    """Vectors [batch, sequence, width] to logits [batch, sequence, vocabulary]; untied."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.logits = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Norm and project."""
        logits: Tensor = self.logits(self.norm(x))
        return logits


class Stage(nn.Module):
    """Some consecutive layers under their global names, `layers.3.norm1.weight`."""

    def __init__(self, layers: dict[int, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers in order."""
        for layer in self.layers.values():
            x = layer(x)
        return x


def cut(case: Case) -> list[range]:
    """Layer indices of each stage: as `case.split` says, else evenly, earlier stages taking what is left over."""
    layers, stages = case.model.layers + 2, case.topology.size("pp")
    counts = case.split or tuple(layers // stages + (index < layers % stages) for index in range(stages))
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise UsageError(
            f"case: split={'+'.join(map(str, counts))}: expected {stages} stages of 1 or more layers, {layers} in all"
        )
    edges = [0, *accumulate(counts)]
    return [range(left, right) for left, right in pairwise(edges)]


def build_layers(case: Case, device: torch.device) -> dict[int, nn.Module]:
    """Every layer by its index: embedding, blocks, head; values drawn in float32 from `case.seed`, then cast.

    The global generator is left as it was.
    """
    sizes = case.model
    if sizes.width % sizes.heads:
        raise UsageError(f"case: width={sizes.width}: expected a multiple of heads={sizes.heads}")
    everything = sizes.layers + 2
    frozen = set(case.frozen)
    if not frozen < set(range(everything)):
        raise UsageError(
            f"case: frozen={'+'.join(map(str, case.frozen))}: expected indices from 0 to {everything - 1}, and not all"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        layers = [Embedding(sizes), *(Block(sizes) for _ in range(sizes.layers)), Head(sizes)]
    for index in frozen:
        layers[index].requires_grad_(False)
    return {index: layer.to(device, DTYPES[case.precision]) for index, layer in enumerate(layers)}


def activation(case: Case, device: torch.device, *, after: int) -> Tensor:
    """An empty tensor like the output of layer `after` for one microbatch; like the token ids for `after=-1`.

    It needs a gradient if any layer so far is trained.
    """
    sizes = case.model
    shape = (case.microbatch_size, sizes.sequence)
    if after < 0:
        return torch.empty(shape, dtype=torch.int64, device=device)
    last = sizes.vocabulary if after == sizes.layers + 1 else sizes.width
    trained = set(range(after + 1)) - set(case.frozen)
    return torch.empty((*shape, last), dtype=DTYPES[case.precision], device=device, requires_grad=bool(trained))
