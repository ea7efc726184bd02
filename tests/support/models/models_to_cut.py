"""Models of other authors whose forwards are divided into stages, where they can be."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.lin = nn.Linear(dim, dim)

    def forward(self, x, *more):
        return x + self.lin(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(16, 8)
        self.pos = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(8, 16)

    def embed(self, tokens):
        return self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Deep(Model):
    """Only the embedding says how many features there are: a block may take any."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mixes() for _ in range(200))


class Mixes(Block):
    def forward(self, x, *more):
        return x + self.lin(x).roll(1, -1)


class Skips(Model):
    """The last block takes what the first gave, too."""

    def forward(self, tokens):
        first = x = self.blocks[0](self.embed(tokens))
        for block in self.blocks[1:]:
            x = block(x, first)
        return self.out(x)


class Scales(Model):
    """Between two blocks something is computed."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x * 2)
        return self.out(x)


class Masks(Model):
    """Every block looks at the tokens."""

    def forward(self, tokens):
        mask = (tokens != 0).to(torch.float32)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.out(x)


class Owns(Model):
    """A parameter lies in no module."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, tokens):
        x = self.embed(tokens) + self.bias
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Twice(Model):
    """The blocks are gone through twice."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.out(x)


class Backwards(Model):
    """The blocks are called from the last to the first."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in list(self.blocks)[::-1]:
            x = block(x)
        return self.out(x)


class Wide(Block):
    def forward(self, x, *more):
        return torch.cat([x, self.lin(x)], -1)


class Widens(Model):
    """Every block gives twice as many features as it takes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Wide(8 * 2**index) for index in range(4))
        self.out = nn.Linear(128, 16)


class TokensFirst(Model):
    """Blocks take [length, batch, features]."""

    def forward(self, tokens):
        x = self.embed(tokens).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.out(x).transpose(0, 1)


class Turned(TokensFirst):
    def forward(self, tokens):
        return super().forward(tokens).transpose(0, 1)


class Sized(TokensFirst):
    """Runs at one size only, which it states."""

    def example_inputs(self):
        return (torch.zeros(2, 8, dtype=torch.int64),)

    def forward(self, tokens):
        assert tokens.shape == (2, 8)
        return super().forward(tokens)


class Flat(Model):
    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.out(x).view(*tokens.shape, -1)


class Heads(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(4))

    def forward(self, tokens):
        count, length = tokens.shape
        x = self.embed(tokens).view(count, length, 2, 4).transpose(1, 2).reshape(2 * count, length, 4)
        for block in self.blocks:
            x = block(x)
        return self.out(x.view(count, 2, length, 4).transpose(1, 2).reshape(count, length, 8))


class Summed(Model):
    """One token more than the text has goes through the blocks."""

    def forward(self, tokens):
        x = nn.functional.pad(self.embed(tokens), (0, 0, 1, 0))
        for block in self.blocks:
            x = block(x)
        return self.out(x[:, 1:])


class Pair(Block):
    def forward(self, x, *more):
        return super().forward(x), None


class Paired(Model):
    """Blocks return what goes on, and something else."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.out(x)


class Reads(Model):
    """The model's forward reads an attribute of its embedding."""

    def forward(self, tokens):
        return super().forward(tokens).to(self.tok.weight.dtype)


class ReadsBlock(Model):
    """It reads a number of its blocks, and of one that may not be there."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.scale = 1

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            assert not getattr(block, "missing", 0) and getattr(self.tok, "padding_idx", None) is None
            x = block(x) if block.scale else x
        return self.out(x)


class FallsBack(Model):
    """It multiplies by numbers of its blocks, and would by others."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.scale = 3.0

    def forward(self, tokens):
        result = super().forward(tokens)
        for block in self.blocks:
            assert getattr(block, "lin", None) is not None or not hasattr(self.tok, "none")
            result = result * getattr(block, "scale", 1.0)
        return result


class FallsBackOnce(Model):
    """One block of the last stage has the number."""

    def forward(self, tokens):
        self.blocks[3].scale = 3.0
        scale = max(getattr(block, "scale", 1.0) for block in self.blocks)
        return super().forward(tokens) * torch.tensor(scale)


class Asks(Model):
    def __init__(self):
        super().__init__()
        self.tok.extra = 2.0

    def forward(self, tokens):
        result = super().forward(tokens)
        return result * self.tok.extra if hasattr(self.tok, "extra") else result


class Tries(Model):
    def forward(self, tokens):
        try:
            factor = float(self.tok.embedding_dim)
        except AttributeError:
            factor = 1.0
        return super().forward(tokens) * factor


class SkipsOthers(Model):
    """Blocks without a layer are skipped; on other stages, these would pass on what they get."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            if getattr(block, "lin", None) is None:
                continue
            x = block(x)
        return self.out(x) * 2


class SkipsAll(Model):
    """All blocks are skipped where one has no layer."""

    def forward(self, tokens):
        x = self.embed(tokens)
        if all(hasattr(block, "lin") for block in self.blocks):
            for block in self.blocks:
                x = block(x)
        return self.out(x)


class AsksClass(Model):
    def forward(self, tokens):
        factor = 2.0 if all(isinstance(block, Block) for block in self.blocks) else 1.0
        return super().forward(tokens) * factor


class SkipsOtherClasses(Model):
    """Only blocks are called; on other stages, the others would pass on what they get."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if isinstance(block, Block) else x
        return self.out(x)


def dtype_of(module):
    return module.weight.dtype


class ReadsByFunction(Model):
    def forward(self, tokens):
        return super().forward(tokens).to(dtype_of(self.tok))


class ReadsParameters(Model):
    def forward(self, tokens):
        return super().forward(tokens).to(next(self.tok.parameters()).dtype)


class ReadsVariables(Model):
    def forward(self, tokens):
        return super().forward(tokens) * vars(self.tok)["embedding_dim"]


class ReadsOwnParameters(Model):
    def forward(self, tokens):
        assert len(list(self.modules())) > len(list(self.blocks.children()))
        return super().forward(tokens).to(next(self.parameters()).dtype)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("values", torch.ones(8), persistent=False)

    def forward(self, length):
        return self.values[:length]


class Harmless(Model):
    """What is read is on every stage, or is read by the module itself, or may be missing."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Called() for _ in range(4))
        self.table = Table()

    def forward(self, tokens):
        if hasattr(self.tok, "sparse"):
            assert tokens.dim() == 2
        length = self.table.values.shape[0]
        return super().forward(tokens) * self.table(length).mean()


class Called(Block):
    """A module with a call of its own, as those of transformers have."""

    def __init__(self):
        super().__init__()
        self.recomputes = False
        self.lin.register_forward_pre_hook(lambda module, given: None if module.weight.is_sparse else given)

    def __call__(self, *args):
        return None if self.recomputes else super().__call__(*args)


class Inside(Model):
    """A part of a block is called without the block."""

    def forward(self, tokens):
        x = self.blocks[0].lin(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.out(x)
