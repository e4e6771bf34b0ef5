"""A tiny GPT as a list of layers, any contiguous run of which is a pipeline stage.

Layer 0 is the embedding, layers 1..L are the blocks, layer L+1 is the head.
Shapes: B samples, S tokens, width W, vocabulary V.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GPT:
    """Sizes of the model. A tied head shares the weight of the token embedding."""

    layers: int = 2
    width: int = 32
    heads: int = 4
    vocabulary: int = 64
    sequence: int = 16
    tied: bool = False

    @property
    def depth(self) -> int:
        """Number of layers, the embedding and the head counted."""
        return self.layers + 2

    @property
    def tied_name(self) -> str | None:
        """Global name of the weight that the first and the last layer share; it belongs to layer 0."""
        return "0.token.weight" if self.tied else None


class Embedding(nn.Module):
    """Token plus position."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.token = nn.Embedding(gpt.vocabulary, gpt.width)
        self.position = nn.Embedding(gpt.sequence, gpt.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, S] to [B, S, W]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(positions)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.heads = gpt.heads
        self.qkv = nn.Linear(gpt.width, 3 * gpt.width)
        self.projection = nn.Linear(gpt.width, gpt.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] to [B, S, W]."""
        batch, sequence, width = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, S, W / heads]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, sequence, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(gpt.width)
        self.attention = Attention(gpt)
        self.mlp_norm = nn.LayerNorm(gpt.width)
        self.up = nn.Linear(gpt.width, 4 * gpt.width)
        self.down = nn.Linear(4 * gpt.width, gpt.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] to [B, S, W]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Final norm and projection onto the vocabulary."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(gpt.width)
        self.linear = nn.Linear(gpt.width, gpt.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] to logits [B, S, V]."""
        return self.linear(self.norm(x))  # type: ignore[no-any-return]


class Stage(nn.ModuleDict):
    """A contiguous run of layers, keyed by their global index, so that parameter names are global."""

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [B, S] or activations [B, S, W] to activations, or to logits [B, S, V] after the head."""
        for layer in self.values():
            x = layer(x)
        return x


def build_layer(gpt: GPT, index: int, seed: int) -> nn.Module:
    """Layer `index` in float32 on the CPU; its values depend on (seed, index) alone, whoever builds it.

    Matrices are normal with variance 1 / (last dimension), norms 1, biases 0. torch's global random state is untouched.
    """
    kind = Embedding if index == 0 else Head if index == gpt.depth - 1 else Block
    with torch.random.fork_rng(devices=[]):  # it draws its own values, which are overwritten
        layer: nn.Module = kind(gpt)
    generator = torch.Generator().manual_seed(seed * 100_003 + index)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    return layer


def build_stage(
    gpt: GPT, indices: Iterable[int], seed: int, *, frozen: Iterable[int] = (), dtype: torch.dtype = torch.float32
) -> Stage:
    """The layers `indices`, with those in `frozen` not trained, in `dtype`.

    A stage that holds the head of a tied model without the embedding gets its own copy of the embedding's weight.
    """
    stage = Stage({str(index): build_layer(gpt, index, seed) for index in indices})
    head = dict(stage.items()).get(str(gpt.depth - 1))
    if gpt.tied and isinstance(head, Head):
        embedding = stage["0"] if "0" in stage else build_layer(gpt, 0, seed)
        assert isinstance(embedding, Embedding)
        head.linear.weight = embedding.token.weight
    stage.to(dtype)
    frozen = set(frozen)
    for name, parameter in named_parameters(stage, gpt).items():
        parameter.requires_grad_(int(name.split(".")[0]) not in frozen)
    return stage


def named_parameters(stage: Stage, gpt: GPT) -> dict[str, nn.Parameter]:
    """Parameters of a stage by global name, each once; a tied head's weight goes by the embedding's name."""
    tied = {f"{gpt.depth - 1}.linear.weight": gpt.tied_name} if gpt.tied_name else {}
    return {tied.get(name) or name: parameter for name, parameter in stage.named_parameters()}


def summed_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Sum of the cross entropies of the tokens that count: logits [B, S, V], targets and mask [B, S], to a scalar."""
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * mask.flatten().to(losses.dtype)).sum()
