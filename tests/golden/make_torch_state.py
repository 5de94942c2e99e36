#!/usr/bin/env python3
"""Writes torch_state.safetensors: states of torch.optim in the middle of a training, for tests/optim.

Needs torch and safetensors (made with torch 2.x, CPU):  python tests/golden/make_torch_state.py
Entries: init.P, gradient.K.P (parameter P, step K, the same for every case); CASE.weight5.P, CASE.weight10.P;
CASE.state and CASE.param_groups: the optimizer's state_dict() after 5 steps, nested names joined by dots, numbers as tensors.

flatten and unflatten are what a Python program needs to exchange states with Cairn (docs/optim.md). That torch continues
from what Cairn writes is checked here: without the keys that Cairn leaves out, and back from the flat form.
"""
import pathlib

import torch
from safetensors.torch import save_file

SHAPES = {"matrix": (3, 5), "vector": (7,), "scalar": ()}
LEFT_OUT = {"foreach", "capturable", "differentiable", "fused"}  # how torch computes


def flatten(value, name="", out=None):
    out = {} if out is None else out
    if isinstance(value, dict):
        for key, child in value.items():
            flatten(child, f"{name}.{key}" if name else str(key), out)
    elif isinstance(value, (list, tuple)):
        flatten(dict(enumerate(value)), name, out)
    elif isinstance(value, torch.Tensor):
        out[name] = value.detach().clone().contiguous()
    elif value is not None:
        integer = isinstance(value, (bool, int))
        out[name] = torch.tensor(int(value) if integer else value, dtype=torch.int64 if integer else torch.float64)
    return out


def unflatten(flat):
    root = {}
    for name, value in flat.items():
        at, *path = root, *name.split(".")
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    groups = []
    for _, group in sorted(root["param_groups"].items(), key=lambda item: int(item[0])):
        group = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        group["params"] = [int(index) for index in group["params"].values()]
        if "betas" in group:
            group["betas"] = tuple(float(beta) for beta in group["betas"].values())
        groups.append(group)
    return {"state": {int(index): entry for index, entry in root.get("state", {}).items()}, "param_groups": groups}


O = torch.optim
CASES = {
    "adam": (O.Adam, dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05)),
    "adamw": (O.AdamW, dict(lr=1e-2, weight_decay=0.1)),
    "sgd": (O.SGD, dict(lr=0.1, weight_decay=0.05)),
    "sgd_momentum": (O.SGD, dict(lr=0.1, momentum=0.9, dampening=0.25, weight_decay=0.05)),
    "sgd_nesterov": (O.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
    "rmsprop": (O.RMSprop, dict(lr=0.02, alpha=0.9)),
    "rmsprop_momentum": (O.RMSprop, dict(lr=0.02, alpha=0.9, momentum=0.8, weight_decay=0.05)),
    "adagrad": (O.Adagrad, dict(lr=0.1, lr_decay=0.02, weight_decay=0.05, initial_accumulator_value=0.1)),
}

torch.manual_seed(8)
init = {name: torch.randn(shape) for name, shape in SHAPES.items()}
gradients = [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(10)]
out = {f"init.{name}": value for name, value in init.items()}
for k, step in enumerate(gradients):
    out.update({f"gradient.{k}.{name}": value for name, value in step.items()})


def train(optimizer, parameters, steps):
    for step in steps:
        for name, parameter in parameters.items():
            # the scalar's gradient comes late: its state begins at step 3
            late = name == "scalar" and step is not None and any(step is g for g in gradients[:3])
            parameter.grad = None if late else step[name].clone()
        optimizer.step()


for case, (make, options) in CASES.items():
    parameters = {name: value.clone().requires_grad_() for name, value in init.items()}
    groups = [{"params": [parameters["matrix"]]}, {"params": [parameters["vector"], parameters["scalar"]], "lr": 0.05}]
    optimizer = make(groups, **options)
    train(optimizer, parameters, gradients[:5])
    flat = flatten(optimizer.state_dict())
    out.update({f"{case}.{name}": value.clone() for name, value in flat.items()})  # torch trains on in what it loads
    middle = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    train(optimizer, parameters, gradients[5:])
    for name, parameter in parameters.items():
        out[f"{case}.weight5.{name}"] = middle[name]
        out[f"{case}.weight10.{name}"] = parameter.detach().clone()

    again = {name: value.clone().requires_grad_() for name, value in middle.items()}
    resumed = make([{"params": [again["matrix"]]}, {"params": [again["vector"], again["scalar"]]}], lr=1.0)
    resumed.load_state_dict(unflatten({n: v for n, v in flat.items() if n.split(".")[-1] not in LEFT_OUT}))
    train(resumed, again, gradients[5:])
    for name, parameter in parameters.items():
        assert torch.equal(parameter, again[name]), (case, name)

target = pathlib.Path(__file__).with_name("torch_state.safetensors")
save_file({name: value.contiguous() for name, value in out.items()}, target)
print(f"{target.name}: {len(out)} tensors, {target.stat().st_size} bytes, torch {torch.__version__}")
