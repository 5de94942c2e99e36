#!/usr/bin/env python3
"""Writes nn.safetensors: two small PyTorch models with their gradients, as values for tests/nn.

Needs torch and safetensors (made with torch 2.x, CPU):  python tests/golden/make_nn.py
Entries: MODEL.x, MODEL.target, MODEL.y, MODEL.loss, MODEL.dx; MODEL.parameter.NAME and
MODEL.gradient.NAME with the names of Cairn's modules; conv.buffer.NAME after the step.
"""
import pathlib

import torch
from safetensors.torch import save_file
from torch import nn

torch.manual_seed(11)
out = {}


def keep(prefix, model, x, target, renamed):
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    out.update({f"{prefix}.x": x.detach().clone(), f"{prefix}.target": target})
    for name, parameter in model.named_parameters():
        out[f"{prefix}.parameter.{renamed(name)}"] = parameter.detach().clone()
    y = model(x)
    loss = nn.functional.cross_entropy(y.flatten(0, -2), target.flatten(), label_smoothing=0.1)
    loss.backward()
    out.update({f"{prefix}.y": y.detach(), f"{prefix}.loss": loss.detach()})
    if x.is_floating_point():
        out[f"{prefix}.dx"] = x.grad
    for name, parameter in model.named_parameters():
        out[f"{prefix}.gradient.{renamed(name)}"] = parameter.grad
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            out[f"{prefix}.buffer.{name}"] = buffer


conv = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
                     nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), nn.SiLU(),
                     nn.Conv2d(6, 4, 3, stride=2, groups=2, bias=False), nn.LeakyReLU(0.1), nn.AvgPool2d(2),
                     nn.Flatten(), nn.Linear(4, 5))
keep("conv", conv, torch.randn(3, 2, 7, 6), torch.tensor([1, 4, -100]), lambda name: name)


class Gpt(nn.Module):
    """One block: x + attention(norm(x)), x + mlp(norm(x)); the head shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(8), nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-6)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, index):
        x = self.token(index)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        x = x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return self.norm3(x) @ self.token.weight.T


def cairn_name(name):
    return (name.replace("in_proj_", "qkv.").replace("out_proj", "out"))


gpt = Gpt()
with torch.no_grad():
    for parameter in gpt.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
keep("gpt", gpt, torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 5)), cairn_name)

save_file({name: value.contiguous() for name, value in out.items()},
          pathlib.Path(__file__).with_name("nn.safetensors"))
