#!/usr/bin/env python3
"""Writes torch_*.pt and torch_files.safetensors: what torch.save makes, and the same values flat, for tests/checkpointing.

Needs torch, numpy and safetensors (made with torch 2.x, CPU):  python tests/golden/make_torch_files.py
  torch_values.pt    everything that a state may hold: dtypes, strides, shared storages, parameters, numbers, text, lists, numpy scalars
  torch_training.pt  {"model", "optimizer", "amp", "scaler", "epoch"}: a net and AdamW after 5 steps (amp as Apex has it)
  torch_sgd.pt       the same net's SGD with momentum
  torch_protocol4.pt torch_values.pt's numbers and text by pickle protocol 4
torch_files.safetensors: "FILE.name" for each tensor and number of these files; "x", "target" and "weight8.NAME", "sgd8.NAME":
the net's values after three more steps on that batch.
"""
import collections
import pathlib

import numpy
import torch
from safetensors.torch import save_file

FOLDER = pathlib.Path(__file__).parent
torch.manual_seed(12)
flat = {}


def flatten(value, name):
    if isinstance(value, dict):
        for key, child in value.items():
            flatten(child, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        flatten(dict(enumerate(value)), name)
    elif isinstance(value, torch.Tensor):
        flat[name] = value.detach().clone().contiguous()
    elif isinstance(value, (bool, int, numpy.integer)):
        flat[name] = torch.tensor(int(value), dtype=torch.int64)
    elif isinstance(value, float):
        flat[name] = torch.tensor(float(value), dtype=torch.float64)


def save(value, name, **options):
    torch.save(value, FOLDER / f"{name}.pt", **options)
    flatten(value, name)


base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
numbers = {"int": 7, "negative": -3, "large": 2**40, "least": -2**63, "float": 0.1, "true": True, "false": False,
           "none": None, "numpy": numpy.float64(0.3), "numpy_int": numpy.int64(-5), "inf": float("inf")}
text = {"word": "naïve", "empty": "", "dtype": torch.bfloat16, "device": torch.device("cuda", 1)}
values = {
    "dtypes": {str(t).split(".")[1]: torch.tensor([0, 1, 1, 0, 1]).to(t)
               for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int32,
                         torch.int64, torch.uint8, torch.bool)},
    "strides": {"base": base, "transposed": base.t(), "slice": base[1:3, ::2], "expanded": base[0, :2].expand(3, 2),
                "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)},
    "shapes": {"scalar": torch.tensor(2.5), "none": torch.zeros(3, 0)}, "parameter": torch.nn.Parameter(torch.ones(2)),
    "numbers": numbers, "text": text, "lists": [1, [2.5, "x"], (torch.ones(1), {}), []], "size": torch.Size([2, 3]),
    5: {"ordered": collections.OrderedDict(a=1)},
}
save(values, "torch_values")
save({"numbers": numbers, "text": text}, "torch_protocol4", pickle_protocol=4)

x, target = torch.randn(6, 4), torch.randn(6, 3)


def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Tanh(),
                               torch.nn.Linear(8, 3))


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()


def case(make, file, after, extra):
    model = net()
    optimizer = make(model)
    train(model, optimizer, 5)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **extra}, file)
    train(model, optimizer, 3)
    for name, value in model.state_dict().items():
        flat[f"{after}.{name}"] = value.clone()


scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
scaler.scale(torch.ones(1))
case(lambda m: torch.optim.AdamW([{"params": m[0].parameters()},
                                  {"params": [*m[1].parameters(), *m[3].parameters()], "lr": 5e-3}], lr=1e-2,
                                 weight_decay=0.1), "torch_training", "weight8",
     {"amp": collections.OrderedDict(loss_scaler0={"loss_scale": 512.0, "unskipped": 17}),
      "scaler": scaler.state_dict(), "epoch": 3})
case(lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9), "torch_sgd", "sgd8", {})
flat.update(x=x, target=target)
save_file({name: value.contiguous() for name, value in flat.items()}, FOLDER / "torch_files.safetensors")
print(f"{len(flat)} values, torch {torch.__version__}")
