"""PyTorch's side of scripts/bench_libtorch.

peer_torch_libtorch.py update             fused AdamW on GPT-2's 124M parameters in 148 tensors, f32
peer_torch_libtorch.py recompute STEPS    forward and backward of 12 blocks, each under torch.utils.checkpoint
Prints a JSON line: median and fastest run in milliseconds.
"""
import json
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from peer_torch_ranks import times


def update():
    d = 768
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    weights = [nn.Parameter(torch.randn(shape)) for shape in [(50257, d), (1024, d), *block * 12, (d,), (d,)]]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    return times(optimizer.step, 15)


def recompute(steps):
    blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(12)]
    x = torch.randn(256, 512)

    def step():
        h = x
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=False)
        h.sum().backward()
        for block in blocks:
            block.zero_grad()

    return times(step, int(steps))


torch.manual_seed(1)
print(json.dumps({"update": update, "recompute": recompute}[sys.argv[1]](*sys.argv[2:])))
