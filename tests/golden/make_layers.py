#!/usr/bin/env python3
"""Writes layers.safetensors: PyTorch's values and gradients of layers and their operations, for tests/nn.

Needs torch and safetensors (made with torch 2.x, CPU):  python tests/golden/make_layers.py
Entries of a case NAME: a, b where it has two inputs, others; y, and da, db of sum(y * weight), with `weight` beside them.
Of a module NAME: a (and b), y, weight, da (and db); parameter.P and gradient.P with the names of Cairn's modules.
"""
import pathlib
import zlib

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

out = {}


def random(name, *shape):
    """Of its own seed, so that a new case changes no other."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def case(name, f, a, b=None, **others):
    a = a.clone().requires_grad_()
    b = b.clone().requires_grad_() if b is not None else None
    y = f(a) if b is None else f(a, b)
    weight = random(name + ".weight", *y.shape)
    (y * weight).sum().backward()
    values = {"a": a.detach(), "y": y.detach(), "weight": weight, "da": a.grad}
    if b is not None:
        values |= {"b": b.detach(), "db": b.grad}
    out.update({f"{name}.{key}": value.clone().contiguous() for key, value in (values | others).items()})


def cairn_name(name):
    return name.replace("in_proj_", "qkv.").replace("out_proj", "out")


def module(name, model, a, b=None, call=None):
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(0.5 * random(f"{name}.{key}", *parameter.shape))
    case(name, call or model, a, b)
    for key, parameter in model.named_parameters():
        out[f"{name}.parameter.{cairn_name(key)}"] = parameter.detach().clone()
        out[f"{name}.gradient.{cairn_name(key)}"] = parameter.grad.clone()


x = random("sequence", 2, 6, 11)
case("conv1d", lambda a, b: F.conv1d(a, b, None, stride=2, padding=3, dilation=2, groups=3), x,
     random("kernel", 9, 2, 4))
module("conv1d_module", nn.Conv1d(6, 4, 3, padding=1), x)
module("batch_norm1d", nn.BatchNorm1d(6), x)
module("batch_norm3d", nn.BatchNorm3d(3), random("volumes", 2, 3, 4, 3, 5))
module("instance_norm", nn.InstanceNorm2d(3, affine=True), random("images", 2, 3, 4, 5))
case("instance_norm_plain", F.instance_norm, x)

sequence, memory = random("tokens", 2, 5, 8), random("memory", 2, 7, 8)
attention = nn.MultiheadAttention(8, 2, batch_first=True)
module("cross_attention", attention, sequence, memory,
       lambda q, m: attention(q, m, m.flip(1).contiguous() * 0.5, need_weights=False)[0])
for norm_first in (False, True):
    options = {"dim_feedforward": 12, "dropout": 0.0, "norm_first": norm_first, "batch_first": True}
    last = "pre" if norm_first else "post"
    module(f"encoder_{last}", nn.TransformerEncoderLayer(8, 2, activation="gelu", **options).train(), sequence)
    decoder = nn.TransformerDecoderLayer(8, 2, **options).train()
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    module(f"decoder_{last}", decoder, sequence, memory, lambda q, m: decoder(q, m, tgt_mask=mask))

images = random("images", 2, 3, 4, 5)
for height, width in ((8, 10), (7, 3), (2, 9), (1, 1)):
    size = f"{height}x{width}"
    case(f"nearest.{size}", lambda a: F.interpolate(a, (height, width)), images)
    case(f"bilinear.{size}", lambda a: F.interpolate(a, (height, width), mode="bilinear"), images)
    case(f"aligned.{size}", lambda a: F.interpolate(a, (height, width), mode="bilinear", align_corners=True), images)
    case(f"adaptive_avg.{size}", lambda a: F.adaptive_avg_pool2d(a, (height, width)), images)
    case(f"adaptive_max.{size}", lambda a: F.adaptive_max_pool2d(a, (height, width)), images)

a, b, c = random("a", 4, 6), random("b", 4, 6), random("c", 4, 6)
case("cosine_similarity", F.cosine_similarity, a, b)
case("cosine_similarity.0", lambda x, y: F.cosine_similarity(x, y, dim=0), a, b)
labels = torch.tensor([1, -1, 1, -1])
for reduction in ("none", "mean", "sum"):
    case(f"cosine_embedding_loss.{reduction}",
         lambda x, y: F.cosine_embedding_loss(x, y, labels, margin=-0.5, reduction=reduction), a, b)
    case(f"triplet_margin_loss.{reduction}",
         lambda x, y: F.triplet_margin_loss(x, y, c, margin=2.0, reduction=reduction), a, b, c=c)
case("triplet_margin_loss.swap", lambda x, y: F.triplet_margin_loss(x, y, c, margin=4.0, p=3.0, swap=True), a, b)
case("topk", lambda x: x.topk(3).values, a, index=a.topk(3).indices)
case("topk.smallest", lambda x: x.topk(2, largest=False).values, a, index=a.topk(2, largest=False).indices)
case("cumsum", lambda x: x.cumsum(-1), a)
case("cumsum.0", lambda x: x.cumsum(0), a)
bilinear = nn.Bilinear(6, 6, 3)
module("bilinear", bilinear, a, b)

logits = random("logits", 9, 4, 5)
targets = torch.tensor([[1, 2, 2, 1], [3, 4, 0, 0], [4, 4, 4, 4], [2, 0, 0, 0]])
input_lengths, target_lengths = torch.tensor([9, 5, 6, 4]), torch.tensor([4, 2, 4, 0])
for reduction in ("none", "mean", "sum"):
    case(f"ctc_loss.{reduction}",
         lambda x: F.ctc_loss(F.log_softmax(x, -1), targets, input_lengths, target_lengths, reduction=reduction,
                              zero_infinity=True), logits)

case("conv3d", lambda x, k: F.conv3d(x, k, None, stride=(2, 1, 2), padding=(1, 0, 1), dilation=(1, 2, 1), groups=2),
     random("volume", 2, 4, 5, 6, 7), random("kernel3", 6, 2, 3, 2, 3))
case("conv3d.dilated", lambda x, k: F.conv3d(x, k, None, stride=(3, 1, 1), padding=(2, 0, 0), dilation=(2, 1, 1)),
     random("volume", 2, 4, 5, 6, 7), random("kernel4", 2, 4, 2, 3, 3))
module("conv3d_module", nn.Conv3d(4, 3, (1, 3, 2)), random("volume", 2, 4, 5, 6, 7))

save_file(out, pathlib.Path(__file__).with_name("layers.safetensors"))
