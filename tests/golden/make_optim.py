#!/usr/bin/env python3
"""Writes optim.safetensors: PyTorch's optimizers and schedules, as values for tests/optim.

Needs torch and safetensors (made with torch 2.x, CPU):  python tests/golden/make_optim.py
Entries: init.P, gradient.K.P (parameter P, step K, the same for every case); CASE.norm.K (before
clipping), CASE.weight.P, CASE.STATE.P (after the last step); schedule.NAME (factor after k steps, f64).
"""
import pathlib

import torch
from safetensors.torch import save_file

SHAPES = {"matrix": (3, 5), "vector": (7,), "scalar": ()}
STEPS = 10

torch.manual_seed(7)
init = {name: torch.randn(shape) for name, shape in SHAPES.items()}
gradients = [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)]
out = {f"init.{name}": value for name, value in init.items()}
for k, step in enumerate(gradients):
    out.update({f"gradient.{k}.{name}": value for name, value in step.items()})

CASES = {  # constructor, options, clipping norm (0: none), its type (2)
    "adam": (torch.optim.Adam, dict(lr=1e-2), 0),
    "adam_l2": (torch.optim.Adam, dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05), 0),
    "adamw": (torch.optim.AdamW, dict(lr=1e-2, weight_decay=0.1), 0),
    "adamw_clipped": (torch.optim.AdamW, dict(lr=1e-2, weight_decay=0.1), 3.0),
    "adamw_clipped_inf": (torch.optim.AdamW, dict(lr=1e-2, weight_decay=0.1), 1.5, float("inf")),
    "sgd_clipped_1": (torch.optim.SGD, dict(lr=0.1), 10.0, 1.0),
    "sgd_clipped_3": (torch.optim.SGD, dict(lr=0.1), 2.0, 3.0),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.1), 0),
    "adagrad_decay": (torch.optim.Adagrad, dict(lr=0.1, lr_decay=0.05, weight_decay=0.05,
                                                initial_accumulator_value=0.2, eps=1e-6), 0),
    "rmsprop": (torch.optim.RMSprop, dict(lr=0.01), 0),
    "rmsprop_momentum": (torch.optim.RMSprop, dict(lr=0.02, alpha=0.9, eps=1e-6, momentum=0.8, weight_decay=0.05), 0),
    "sgd": (torch.optim.SGD, dict(lr=0.1), 0),
    "sgd_decay": (torch.optim.SGD, dict(lr=0.1, weight_decay=0.05), 0),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.25, weight_decay=0.05), 0),
    "sgd_nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=True), 0),
}
for case, (make, options, max_norm, *norm_type) in CASES.items():
    parameters = {name: value.clone().requires_grad_() for name, value in init.items()}
    optimizer = make(parameters.values(), **options)
    for k, step in enumerate(gradients):
        for name, parameter in parameters.items():
            parameter.grad = step[name].clone()
        if max_norm:
            out[f"{case}.norm.{k}"] = torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm, *norm_type).clone()
        optimizer.step()
    for name, parameter in parameters.items():
        out[f"{case}.weight.{name}"] = parameter.detach().clone()
        for key, value in optimizer.state[parameter].items():
            if key != "step" and value is not None:
                out[f"{case}.{key}.{name}"] = value.clone()


def factors(make, steps=30):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = make(optimizer)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return torch.tensor(values, dtype=torch.float64)


S = torch.optim.lr_scheduler
out["schedule.step_decay"] = factors(lambda o: S.StepLR(o, step_size=7, gamma=0.3))
out["schedule.cosine"] = factors(lambda o: S.CosineAnnealingLR(o, T_max=30, eta_min=0.1))
out["schedule.linear"] = factors(lambda o: S.LinearLR(o, start_factor=1.0, end_factor=0.2, total_iters=20))

target = pathlib.Path(__file__).with_name("optim.safetensors")
save_file({name: value.contiguous() for name, value in out.items()}, target)
print(f"{target.name}: {len(out)} tensors, {target.stat().st_size} bytes, torch {torch.__version__}")
