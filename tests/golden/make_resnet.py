#!/usr/bin/env python3
"""Writes resnet.safetensors: logits of torchvision's ResNets, for tests/examples/resnet_test.cpp.

Needs torchvision and safetensors (made with torchvision 0.29, CPU):  python tests/golden/make_resnet.py
Entries: ARCH.logits [2, 10]; ARCH/NAME: the shape of this part of its state. Parts and images hold the values of value() below, whose number is the
part's place among the sorted names.
"""
import pathlib

import numpy
import torch
import torchvision
from safetensors.torch import save_file

IMAGES = 1000  # their number


def value(number, shape, name=""):
    """Even in [0, 1), then moved to where this kind of part lies."""
    i = numpy.arange(numpy.prod(shape), dtype=numpy.uint64)
    u = ((i * 2654435761 + number * 97531 + 12345) % 2**32 >> 8) / 2.0**24
    if name == "images":
        u = 4 * u - 2
    elif len(shape) == 4 or name == "fc.weight":
        u = (2 * u - 1) * numpy.sqrt(6 / numpy.prod(shape[1:]))
    elif name.endswith((".weight", "running_var")):
        u = 0.5 + u
    else:  # biases, running means
        u = 0.2 * (2 * u - 1)
    return torch.from_numpy(u.astype(numpy.float32).reshape(shape))


out = {}
for arch in ("resnet18", "resnet50"):
    model = torchvision.models.get_model(arch, num_classes=10).eval()
    parts = {name: part for name, part in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    for number, name in enumerate(sorted(parts)):
        parts[name].copy_(value(number, parts[name].shape, name))
        out[f"{arch}/{name}"] = torch.tensor(parts[name].shape)
    with torch.no_grad():
        out[f"{arch}.logits"] = model(value(IMAGES, (2, 3, 64, 64), "images"))

save_file(out, pathlib.Path(__file__).with_name("resnet.safetensors"))
