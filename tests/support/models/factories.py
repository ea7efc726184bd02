"""A model of another author: blocks in a ModuleList, and parts that are called with keywords."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Mixer(nn.Module):
    """Adds up the past, scaled: a causal mixing of positions without heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down(F.gelu(self.up(hidden.cumsum(dim=1) * scale)))


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mixer = Mixer(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(hidden=self.norm(x), scale=0.1)


class Decoder(nn.Module):
    def __init__(self, depth: int, dim: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList([Layer(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(depth: int = 2, dim: int = 16) -> nn.Module:
    return Decoder(depth, dim)


class TokensFirst(Decoder):
    """Blocks take [tokens, samples, dim], and weights of earlier tokens that are made once for all of them."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        length = x.shape[1]
        earlier = torch.ones(length, length, dtype=x.dtype, device=x.device).tril() / length
        x = x.transpose(0, 1)
        for block in self.blocks:
            x = block(x, earlier)
        return self.head(x).transpose(0, 1)


class Weighing(Layer):
    def forward(self, x: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        return x + self.mixer.down(F.gelu(self.mixer.up(torch.einsum("ts,sbd->tbd", earlier, self.norm(x)))))


def build_tokens_first(depth: int = 2, dim: int = 16) -> nn.Module:
    model = TokensFirst(depth, dim)
    model.blocks = nn.ModuleList([Weighing(dim) for _ in range(depth)])
    return model


class Summed(Layer):
    """The gradient of the last weight is computed transposed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.gelu(self.mixer.up(self.norm(x)))
        return x + torch.einsum("bsw,dw->bsd", wide, self.mixer.down.weight)


def build_summed(depth: int = 2, dim: int = 16) -> nn.Module:
    model = Decoder(depth, dim)
    model.blocks = nn.ModuleList([Summed(dim) for _ in range(depth)])
    return model


def build_flat(depth: int = 2, dim: int = 16) -> nn.Module:
    """A model whose blocks take the tokens of all samples in one dim."""

    class Flat(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embeddings(tokens).flatten(0, 1)
            for block in self.blocks:
                x = block(x)
            return self.head(x).view(*tokens.shape, -1)

    class Alone(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    model = Flat(depth, dim)
    model.blocks = nn.ModuleList([Alone(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(depth)])
    return model


def build_random(depth: int = 2, dim: int = 16, drop: float = 0.1) -> nn.Module:
    model = Decoder(depth, dim)
    for block in model.blocks:
        block.mixer.down = nn.Sequential(block.mixer.down, nn.Dropout(drop))
    return model


class Dropping(nn.Module):
    """Attention of two heads, and dropout of its weights (`heads`), in its kernel, or of its result (`rest`)."""

    def __init__(self, dim: int, drops: str) -> None:
        super().__init__()
        self.norm, self.drops = nn.LayerNorm(dim), drops
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.drop = nn.Dropout(0.5 if drops == "rest" else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, width = self.norm(x), self.q.weight.shape[1] // 2
        q, k, v = (layer(y).view(*x.shape[:2], -1, width).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.drops == "heads":
            mixed = F.dropout((q @ k.mT).softmax(-1), 0.5, self.training) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 * (self.drops == "kernel"))
        return x + self.drop(self.o(mixed.transpose(1, 2).flatten(2)))


def build_dropping(drops: str, depth: int = 2, dim: int = 16) -> nn.Module:
    model = Decoder(depth, dim)
    model.blocks = nn.ModuleList([Dropping(dim, drops) for _ in range(depth)])
    return model


def build_unfollowed(depth: int = 2, dim: int = 16) -> nn.Module:
    class Reads(nn.Embedding):
        """Asks for a value, which a tensor on the meta device does not have."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens + int(tokens.max() < 0))

    model = Decoder(depth, dim)
    model.embeddings = Reads(256, dim)
    return model


def build_without_residual(depth: int = 2, dim: int = 16) -> nn.Module:
    """A model whose blocks return what their last product gives, in its dtype."""
    model = Decoder(depth, dim)
    model.blocks = nn.ModuleList(
        [nn.Sequential(nn.LayerNorm(dim), nn.GELU(), nn.Linear(dim, dim)) for _ in range(depth)]
    )
    return model


def build_upcast(depth: int = 2, dim: int = 16) -> nn.Module:
    """A model whose blocks return fp32, whatever they compute in."""

    class Upcast(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).float()

    model = Decoder(depth, dim)
    model.blocks = nn.ModuleList([Upcast(dim) for _ in range(depth)])
    return model


def build_half_frozen(depth: int = 4, dim: int = 16) -> nn.Module:
    """A model whose embedding and first half of the blocks are not trained."""
    model = Decoder(depth, dim)
    for module in (model.embeddings, *model.blocks[: depth // 2]):
        module.requires_grad_(False)
    return model


def build_shared(depth: int = 3, dim: int = 16) -> nn.Module:
    """A model all of whose blocks are one."""
    model = Decoder(depth, dim)
    model.blocks = nn.ModuleList([Layer(dim)] * depth)
    return model


def build_sharing(depth: int = 3, dim: int = 16) -> nn.Module:
    """A model whose blocks share a layer."""
    model = Decoder(depth, dim)
    for block in model.blocks[1:]:
        block.mixer.up = model.blocks[0].mixer.up
    return model


class Table(nn.Module):
    """Numbers for the positions, as rotary embeddings have."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.linspace(0, 1, 512)[:, None].repeat(1, dim), persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        return self.rows[:length]


def build_with_table(depth: int = 2, dim: int = 16) -> nn.Module:
    """A model whose blocks add rows of a table, which has no weights and is made from no token."""

    class Shifted(Layer):
        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(x + rows)

    class WithTable(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x, rows = self.embeddings(tokens), self.table(tokens.shape[1])
            for block in self.blocks:
                x = block(x, rows)
            return self.head(x)

    model = WithTable(depth, dim)
    model.table = Table(dim)
    model.blocks = nn.ModuleList([Shifted(dim) for _ in range(depth)])
    return model


def build_in_two_lists(first: int, second: int, dim: int = 16) -> nn.Module:
    """A model whose blocks stand in two lists, one after the other."""

    class InTwoLists(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embeddings(tokens)
            for block in (*self.blocks, *self.others):
                x = block(x)
            return self.head(x)

    model = InTwoLists(first, dim)
    model.others = nn.ModuleList([Layer(dim) for _ in range(second)])
    return model


def build_passing(way: str, depth: int = 10, dim: int = 16) -> nn.Module:
    """A model whose forward does with some of its blocks, or between them, what ``way`` says.

    Most ways are about the block in the middle.
    """

    class Passing(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embeddings(tokens)
            return self.head(self.through(x))

        def through(self, x: torch.Tensor) -> torch.Tensor:
            middle, first, results = len(self.blocks) // 2, x, []
            for place, block in enumerate(self.blocks):
                if way == "step before one" and place == middle:
                    x = torch.tanh(x)
                if way == "skips" and place >= middle:
                    x = x * results.pop().sigmoid()
                if way == "residual outside":
                    x = x + block(torch.tanh(x))
                elif way == "first input added":
                    x = block(x) + first
                elif way == "every second in a residual" and place % 2:
                    x = x + block(x)
                elif way == "parts":
                    x = x + block[1](block[0](x))
                elif way == "beside each other":
                    x = x + block(first)
                else:
                    x = block(x)
                if way == "one called twice" and place == middle:
                    x = block(x)
                if way == "each called twice":
                    x = block(x)
                if way == "last not called" and place == depth - 2:
                    return x
                if way != "skips" or place < middle:
                    results.append(x)
            if way == "result of one":
                return x + results[middle]
            return torch.stack(results).mean(0) if way == "results of all" else x

    class PassingTwice(Passing):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.body(self.embeddings(tokens))))

    class Body(Passing):
        forward = Passing.through

    if way == "list passed twice":
        model = PassingTwice(0, dim)
        model.body = Body(depth, dim)
        return model
    model = Passing(depth, dim)
    if way == "parts":
        model.blocks = nn.ModuleList([nn.ModuleList([nn.LayerNorm(dim), Mixer(dim)]) for _ in range(depth)])
    return model


def build_sequence(depth: int = 2, dim: int = 16) -> nn.Module:
    return nn.Sequential(nn.Embedding(256, dim), *[Layer(dim) for _ in range(depth)], nn.Linear(dim, 256, bias=False))


class Zoo:
    """Factories that are reached through a class, or bear a name that the program uses."""

    small = staticmethod(build)


trainer = build


class Attention(nn.Module):
    """Causal attention of four heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        q, k, v = (one(hidden).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2)) * scale


class Placed(nn.Module):
    """A decoder with attention that is told the positions of its tokens."""

    def __init__(self, depth: int, dim: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(256, dim)
        self.places = nn.Embedding(4096, dim)
        self.blocks = nn.ModuleList([Layer(dim) for _ in range(depth)])
        for block in self.blocks:
            block.mixer = Attention(dim)
        self.head = nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x = self.embeddings(tokens) + self.places(at)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_placed(depth: int = 2, dim: int = 32) -> nn.Module:
    return Placed(depth, dim)
