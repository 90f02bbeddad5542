"""Networks that the measurements on a GPU train: a ResNet-50 and GPT-like transformers; tiny ones for a
dry run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.gpu import HERE

Batch = tuple[Tensor, Tensor]  # inputs and targets


class Bottleneck(nn.Module):
    """Three convolutions (1x1, 3x3, 1x1) beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.layers = nn.Sequential(
            *convolution(before, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, after, 1),
        )
        self.shortcut = nn.Identity() if before == after else nn.Sequential(*convolution(before, after, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x))


def convolution(before: int, after: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """Return a convolution and its normalization."""
    return nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(after)


class ResNet(nn.Module):
    """A residual network; with ``blocks`` = (3, 4, 6, 3), ``width`` = 64 and 1000 classes the ResNet-50."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        layers, before = [], width
        for stage, count in enumerate(blocks):
            for block in range(count):
                layers.append(Bottleneck(before, width << stage, 2 if stage and not block else 1))
                before = 4 * (width << stage)
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return output


class Layer(nn.Module):
    """One layer of a transformer: causal attention and two linear maps, each after a normalization and
    beside a shortcut.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_maps = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.maps = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        three = self.attention(self.before_attention(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = three.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(rows, length, width))
        output: Tensor = x + self.maps(self.before_maps(x))
        return output


class Transformer(nn.Module):
    """A GPT-like model: learnt positions, and one matrix for the embedding and the outputs."""

    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        return functional.linear(self.norm(x), self.embedding.weight)


@dataclass(frozen=True)
class Case:
    """A model, and data for it on the present device.

    With ``rows`` samples the host is the slower one, with ``many`` the GPU. ``unit``: of the samples, in words.
    """

    label: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    rows: int
    many: int
    unit: str

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def resnet(label: str, blocks: tuple[int, ...], width: int, classes: int, rows: int, many: int, pixels: int) -> Case:
    def build() -> nn.Module:
        model = ResNet(blocks, width, classes)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def batch(rows: int) -> Batch:
        images = torch.randn(rows, 3, pixels, pixels).contiguous(memory_format=torch.channels_last)
        return images, torch.randint(0, classes, (rows,))

    return Case(label, build, batch, rows, many, "images")


def transformer(label: str, layers: int, width: int, words: int, rows: int, many: int, length: int) -> Case:
    def build() -> nn.Module:
        return Transformer(layers, width, width // 64, words, length)

    def batch(rows: int) -> Batch:
        tokens = torch.randint(0, words, (rows, length + 1))
        return tokens[:, :-1], tokens[:, 1:]

    return Case(label, build, batch, rows, many, f"rows of {length} tokens")


if HERE:
    RESNET = resnet("ResNet-50, 25.6 M parameters", (3, 4, 6, 3), 64, 1000, 32, 256, 224)
    TRANSFORMER = transformer("transformer, 111 M parameters", 12, 768, 32768, 8, 64, 512)
    COMPACT = transformer("transformer, 42 M parameters", 12, 512, 8192, 16, 16, 512)  # less to reduce
else:
    RESNET = resnet("tiny ResNet", (1, 1), 8, 10, 2, 4, 32)
    TRANSFORMER = transformer("tiny transformer", 2, 64, 256, 2, 4, 32)
    COMPACT = transformer("compact transformer", 4, 512, 256, 2, 2, 32)
