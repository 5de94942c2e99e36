#!/usr/bin/env python3
"""Writes losses.safetensors: PyTorch's values and gradients of losses and small operations, for tests/nn.

Needs torch and safetensors (made with torch 2.x, CPU):  python tests/golden/make_losses.py
Entries of a case NAME: a, b where it has two inputs, index; y, and da, db of sum(y * weight), with `weight` beside them.
"""
import pathlib

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

torch.manual_seed(13)
out = {}


def case(name, f, a, b=None, **others):
    a = a.clone().requires_grad_()
    b = b.clone().requires_grad_() if b is not None else None
    y = f(a) if b is None else f(a, b)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    values = {"a": a.detach(), "y": y.detach(), "weight": weight, "da": a.grad}
    if b is not None:
        values |= {"b": b.detach(), "db": b.grad}
    out.update({f"{name}.{key}": value.clone().contiguous() for key, value in (values | others).items()})


x, t = 2 * torch.randn(4, 5), torch.randn(4, 5)
for reduction in ("none", "mean", "sum"):
    case(f"l1_loss.{reduction}", lambda a, b: F.l1_loss(a, b, reduction=reduction), x, t)
    case(f"smooth_l1_loss.{reduction}", lambda a, b: F.smooth_l1_loss(a, b, reduction=reduction, beta=0.7), x, t)
    case(f"huber_loss.{reduction}", lambda a, b: F.huber_loss(a, b, reduction=reduction, delta=0.7), x, t)
    p = torch.softmax(t, -1)
    case(f"kl_div.{reduction}", lambda a, b: F.kl_div(a, b, reduction=reduction), F.log_softmax(x, -1), p)
    case(f"kl_div_log.{reduction}", lambda a, b: F.kl_div(a, b, reduction=reduction, log_target=True),
         F.log_softmax(x, -1), p.log())
    labels = torch.tensor([3, -100, 0, 4])
    case(f"nll_loss.{reduction}", lambda a: F.nll_loss(a, labels, reduction=reduction), F.log_softmax(x, -1),
         index=labels)
case("clamp", lambda a: a.clamp(-1, 0.5), x)
case("abs", torch.abs, x)
case("rsqrt", torch.rsqrt, x.abs() + 0.1)
case("square", torch.square, x)
case("minimum", torch.minimum, x, t)
case("where", lambda a, b: torch.where(a > b, a, b * b), x, t)
case("add_relu", lambda a, b: F.relu(a + b), x, t)
places = torch.tensor([[0, 0, 3], [4, 1, 2], [2, 2, 2], [1, 4, 0]])
case("gather", lambda a: a.gather(-1, places), x, index=places)
case("select", lambda a: a.select(1, 2), x)
case("group_norm", lambda a, b: F.group_norm(a, 2, b, 0.5 * b), torch.randn(3, 4, 5), torch.randn(4))

save_file(out, pathlib.Path(__file__).with_name("losses.safetensors"))
