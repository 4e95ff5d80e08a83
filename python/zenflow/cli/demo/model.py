"""A small GPT over bytes, in fp32: the model every run of the demo trains."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ByteGPT"]

_VOCABULARY = 256


class _Block(nn.Module):
    """Causal self-attention and a feed-forward part, each after a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + hidden


class ByteGPT(nn.Module):
    """A decoder-only transformer over bytes.

    Args:
        width: of the residual stream, in features.
        blocks: number of transformer blocks.
        heads: attention heads a block; divides ``width``.
        context: longest sequence, in bytes.
        seed: of the initial weights.

    """

    def __init__(self, width: int, blocks: int, heads: int, context: int, seed: int) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's: what is added to the residual stream starts smaller the more blocks add to it.
                residual = name.endswith(("attention_out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * blocks) if residual else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of ``targets`` after ``inputs``, in nats a byte.

        Args:
            inputs: bytes, ``[batch, time]``, int64.
            targets: the byte that follows each, the same shape and dtype.

        """
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
