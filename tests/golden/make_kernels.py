#!/usr/bin/env python3
"""Writes kernels.safetensors: PyTorch's activations, norms, losses, attention and updates, as values for tests/kernels.

Needs torch and safetensors (made with torch 2.x, CPU):  python tests/golden/make_kernels.py
Every entry was computed in f64 from inputs that are exact in f32, and stored as f32 (inputs) or f64 (results).
"""
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

torch.manual_seed(11)
out = {}


def given(name, *shape, scale=1.0):
    value = torch.randn(shape) * scale
    out[name] = value.clone()
    return value.double().requires_grad_()


def result(name, value):
    out[name] = value.detach().clone(memory_format=torch.contiguous_format).double()


def gradients(prefix, value, inputs):
    dy = given(prefix + ".dy", *value.shape).detach()
    for name, gradient in zip(inputs, torch.autograd.grad(value, inputs.values(), dy)):
        result(f"{prefix}.d{name}", gradient)


x = given("activation.x", 257, scale=3.0)
for name, function in {
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}.items():
    y = function(x)
    result(f"{name}.y", y)
    result(f"{name}.dx", torch.autograd.grad(y.sum(), x)[0])

x, weight, bias = given("norm.x", 5, 33, scale=2.0), given("norm.weight", 33), given("norm.bias", 33)
y = F.layer_norm(x, (33,), weight, bias, eps=1e-5)
result("layer_norm.y", y)
gradients("layer_norm", y, {"x": x, "weight": weight, "bias": bias})
y = F.rms_norm(x, (33,), weight, eps=1e-6)
result("rms_norm.y", y)
gradients("rms_norm", y, {"x": x, "weight": weight})

logits = given("cross_entropy.logits", 6, 19, scale=3.0)
target = torch.tensor([0, 18, 7, -100, 3, 3])
out["cross_entropy.target"] = target
for name, smoothing in {"plain": 0.0, "smooth": 0.1}.items():
    loss = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing, ignore_index=-100)
    result(f"cross_entropy.{name}.loss", loss)
    mean = F.cross_entropy(logits, target, label_smoothing=smoothing, ignore_index=-100)
    result(f"cross_entropy.{name}.dlogits_of_mean", torch.autograd.grad(mean, logits)[0])

x, t = given("pair.x", 41, scale=4.0), given("pair.target", 41)
out["pair.probability"] = torch.rand(41)
p = out["pair.probability"].double()
for name, value in {
    "mse": F.mse_loss(x, t, reduction="none"),
    "bce": F.binary_cross_entropy_with_logits(x, p, reduction="none"),
}.items():
    result(f"{name}.loss", value)
    result(f"{name}.dx", torch.autograd.grad(value.sum(), x, retain_graph=True)[0])

UPDATES = {
    "adam": (torch.optim.Adam, dict(lr=1e-2, weight_decay=0.02)),
    "adamw": (torch.optim.AdamW, dict(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)),
    "sgd": (torch.optim.SGD, dict(lr=0.1, weight_decay=0.05)),
    "momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.25, weight_decay=0.05)),
    "nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=True)),
}
start = given("update.weight", 67).detach()
steps = [given(f"update.gradient.{k}", 67).detach() for k in range(4)]
for name, (make, options) in UPDATES.items():
    parameter = start.clone().requires_grad_()
    optimizer = make([parameter], **options)
    for gradient in steps:
        parameter.grad = gradient.clone()
        optimizer.step()
    result(f"{name}.weight", parameter)

B, H, D = 2, 3, 8
for name, queries, keys, causal in [("attention.all", 5, 9, False), ("attention.causal", 7, 7, True),
                                    ("attention.causal_after", 4, 9, True)]:
    q, k, v = given(name + ".q", B, H, queries, D), given(name + ".k", B, H, keys, D), given(name + ".v", B, H, keys, D)
    seen = torch.ones(queries, keys).tril(keys - queries).bool() if causal else None  # the last query sees the last key
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    result(name + ".y", y)
    gradients(name, y, {"q": q, "k": k, "v": v})

save_file(out, pathlib.Path(__file__).with_name("kernels.safetensors"))
