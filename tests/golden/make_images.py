#!/usr/bin/env python3
"""Writes images.safetensors: PyTorch's convolutions, batch norms and pools, as values for tests/kernels.

Needs torch and safetensors (made with torch 2.x, CPU):  python tests/golden/make_images.py
Every entry was computed in f64 from inputs that are exact in f32, and stored as f32 (inputs) or f64 (results).
"""
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

torch.manual_seed(13)
out = {}


def given(name, *shape):
    value = torch.randn(shape)
    out[name] = value.clone()
    return value.double().requires_grad_()


def result(name, value):
    out[name] = value.detach().clone().double()


def gradients(case, y, inputs):
    result(f"{case}.y", y)
    dy = given(f"{case}.dy", *y.shape).detach()
    for name, gradient in zip(inputs, torch.autograd.grad(y, inputs.values(), dy)):
        result(f"{case}.d{name}", gradient)


CONVS = {  # image, weight, options
    "conv": ((2, 3, 6, 7), (4, 3, 3, 2), dict(stride=(2, 1), padding=(1, 0))),
    "conv_groups": ((2, 4, 7, 6), (6, 2, 3, 3), dict(padding=1, dilation=2, groups=2)),
}
for case, (image, kernel, options) in CONVS.items():
    x, weight, bias = given(f"{case}.x", *image), given(f"{case}.weight", *kernel), given(f"{case}.bias", kernel[0])
    gradients(case, F.conv2d(x, weight, bias, **options), {"x": x, "weight": weight, "bias": bias})

TRANSPOSED = {  # image, weight, outputs, options
    "transposed": ((2, 4, 5, 3), (4, 3, 3, 2), 3, dict(stride=(2, 3), padding=(1, 0), output_padding=(1, 2))),
    "transposed_groups": ((1, 4, 4, 5), (4, 3, 2, 3), 6, dict(stride=2, dilation=(1, 2), groups=2)),
}
for case, (image, kernel, outputs, options) in TRANSPOSED.items():
    x, weight, bias = given(f"{case}.x", *image), given(f"{case}.weight", *kernel), given(f"{case}.bias", outputs)
    gradients(case, F.conv_transpose2d(x, weight, bias, **options), {"x": x, "weight": weight, "bias": bias})

for case, shape in {"norm2d": (3, 4, 5, 2), "norm1d": (9, 4)}.items():
    x, weight, bias = given(f"{case}.x", *shape), given(f"{case}.weight", 4), given(f"{case}.bias", 4)
    mean, var = given(f"{case}.running_mean", 4).detach(), given(f"{case}.running_var_root", 4).detach() ** 2
    result(f"{case}.eval.y", F.batch_norm(x, mean, var, weight, bias, training=False, eps=1e-3))
    y = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.3, eps=1e-3)
    result(f"{case}.new_mean", mean)
    result(f"{case}.new_var", var)
    gradients(case, y, {"x": x, "weight": weight, "bias": bias})

x = given("pool.x", 2, 3, 7, 5)
y, index = F.max_pool2d(x, (3, 2), stride=2, padding=(1, 1), return_indices=True)
out["max.index"] = index
gradients("max", y, {"x": x})
gradients("avg", F.avg_pool2d(x, (3, 2), stride=(2, 1), padding=(1, 1)), {"x": x})

target = pathlib.Path(__file__).with_name("images.safetensors")
save_file({name: value.contiguous() for name, value in out.items()}, target)
print(f"{target.name}: {len(out)} tensors, {target.stat().st_size} bytes, torch {torch.__version__}")
