"""The vision transformer as one device would run it."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from legoai.specs.models.configs import ViTConfig
from legoai.specs.models.layers import INIT_STD, Linear, residual_std
from legoai.specs.models.reads import Images


class PatchEmbedding(nn.Module):
    """Cuts an image into patches, projects each, puts a class token before them and adds learned positions."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        side = config.patch_size
        self.projection = nn.Conv2d(config.n_channels, config.dim, kernel_size=side, stride=side)
        self.class_token = nn.Parameter(torch.empty(1, 1, config.dim))
        self.positions = nn.Parameter(torch.empty(1, config.n_tokens, config.dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise class token and positions in place."""
        nn.init.zeros_(self.class_token)
        nn.init.normal_(self.positions, std=INIT_STD)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Turn images [B, n_channels, image_size, image_size] into tokens [B, n_tokens, dim]."""
        patches_bpd = self.projection(images).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(len(images), -1, -1)
        return torch.cat((class_token, patches_bpd), dim=1) + self.positions


class Attention(nn.Module):
    """Multi-head attention of every token to every other."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_heads
        self.head_dim = config.head_size
        self.wq = Linear(config.dim, config.dim, bias=True)
        self.wk = Linear(config.dim, config.dim, bias=True)
        self.wv = Linear(config.dim, config.dim, bias=True)
        self.wo = Linear(config.dim, config.dim, bias=True, init_std=residual_std(config.n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix tokens: [B, T, dim] to [B, T, dim]."""
        b, t, _ = x.shape
        q_bhtd = self.wq(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        k_bhtd = self.wk(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        v_bhtd = self.wv(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        mixed_bhtd = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd)
        return self.wo(mixed_bhtd.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """`down(gelu(up x))`."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.up = Linear(config.dim, config.hidden_dim, bias=True)
        self.down = Linear(config.hidden_dim, config.dim, bias=True, init_std=residual_std(config.n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each token independently: [..., dim] to [..., dim]."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Advance the residual stream by one block: [B, T, dim] to [B, T, dim]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ViT(nn.Module):
    """The vision transformer (Dosovitskiy et al. 2021), from images to logits [B, n_classes].

    Modules: `embedding.projection`, `layers.N.{attention_norm, attention.{wq,wk,wv,wo}, mlp_norm, mlp.{up,down}}`,
    `norm`, `head`. The class token is token 0.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = PatchEmbedding(config)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.head = Linear(config.dim, config.n_classes, bias=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Classify images.

        Args:
            images: [B, n_channels, image_size, image_size]; on a pipeline stage without `embedding`, the residual
                stream [B, n_tokens, dim].

        Returns:
            Logits [B, n_classes]; on a pipeline stage without `head`, the residual stream [B, n_tokens, dim].
        """
        h = self.embedding(images) if self.embedding is not None else images
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm is not None else h
        return self.head(h[:, 0]) if self.head is not None else h

    @property
    def reads(self) -> Images:
        """The images that the config names."""
        config = self.config
        return Images(
            channels=config.n_channels, height=config.image_size, width=config.image_size, classes=config.n_classes
        )

    def example_inputs(self) -> tuple[torch.Tensor]:
        """Return one image, of zeros, on the default device."""
        side = self.config.image_size
        return (torch.zeros(1, self.config.n_channels, side, side),)
