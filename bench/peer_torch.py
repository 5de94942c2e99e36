"""The PyTorch side of scripts/bench_vs_torch: the same works under the same names as bench/*_works.cpp.

peer_torch.py NAME SECONDS prints the fastest and the median run in milliseconds.
"""
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


def matmul(dtype):
    a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    y = torch.empty(2048, 2048, dtype=dtype)
    return lambda: torch.matmul(a, b, out=y)


def conv():
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
    x = torch.randn(16, 64, 56, 56).to(memory_format=torch.channels_last).requires_grad_()
    dy = torch.randn(16, 64, 56, 56).to(memory_format=torch.channels_last)

    def run():
        x.grad = layer.weight.grad = None
        layer(x).backward(dy)
    return run


def layer_norm():
    layer = nn.LayerNorm(768)
    x, dy = torch.randn(2048, 768, requires_grad=True), torch.randn(2048, 768)

    def run():
        x.grad = layer.weight.grad = layer.bias.grad = None
        layer(x).backward(dy)
    return run


def gelu():
    x, dy = torch.randn(2048, 3072, requires_grad=True), torch.randn(2048, 3072)

    def run():
        x.grad = None
        F.gelu(x).backward(dy)
    return run


def cross_entropy():
    logits = torch.randn(2048, 50257, requires_grad=True)
    target = torch.arange(2048) * 7919 % 50257

    def run():
        logits.grad = None
        F.cross_entropy(logits, target).backward()
    return run


class ConvNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


def convnet(dtype):
    """The better of PyTorch's two storage orders; the optimizer is part of the step."""
    def make(channels_last):
        torch.manual_seed(1)
        model = ConvNet()
        x = torch.randn(100, 1, 28, 28)
        if channels_last:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        target = torch.arange(100) % 10
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def run():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = F.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
        return run

    def fastest(run):
        run(), run()
        return min(timed(run) for _ in range(20))
    return min((make(False), make(True)), key=fastest)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, d // self.heads).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary, tokens, width, layers, heads):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, index):
        x = self.token(index) + self.position(torch.arange(index.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def gpt(dtype):
    torch.manual_seed(1)
    model = Gpt(vocabulary=256, tokens=256, width=384, layers=6, heads=6)
    x = torch.randint(0, 256, (8, 256))
    y = torch.randint(0, 256, (8, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def run():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
    return run


def gpt2_shapes():
    """GPT-2 small's 148 tensors, 124M parameters."""
    d = 768
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d)] + block * 12 + [(d,), (d,)]


def adamw():
    parameters = [torch.randn(s).mul_(0.02).requires_grad_() for s in gpt2_shapes()]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    return optimizer.step


def o2_update():
    """GradScaler.unscale_ + clip_grad_norm_ + fused AdamW on f32 masters + copies, gradients and weights bf16."""
    weights = [torch.randn(s).mul_(0.02).bfloat16() for s in gpt2_shapes()]
    grads = [torch.randn(s).mul_(0.01).bfloat16() for s in gpt2_shapes()]
    masters = [w.float().requires_grad_() for w in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**9)
    scaler.scale(torch.ones(1))
    for master in masters:
        master.grad = torch.empty_like(master)

    def run():
        torch._foreach_copy_([master.grad for master in masters], grads)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
    return run


WORKS = {
    "matmul_2048_f32": lambda: matmul(torch.float32),
    "matmul_2048_bf16": lambda: matmul(torch.bfloat16),
    "matmul_2048_f16": lambda: matmul(torch.float16),
    "conv3x3_64_16x56x56_f32": conv,
    "layer_norm_2048x768": layer_norm,
    "gelu_2048x3072": gelu,
    "cross_entropy_2048x50257": cross_entropy,
    "convnet_step_f32": lambda: convnet(torch.float32),
    "convnet_step_bf16": lambda: convnet(torch.bfloat16),
    "gpt_step_f32": lambda: gpt(torch.float32),
    "gpt_step_bf16": lambda: gpt(torch.bfloat16),
    "adamw_124m_f32": adamw,
    "o2_update_124m_bf16": o2_update,
    "o2_update_124m_compact": o2_update,  # has no such state
}


def timed(run):
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1000


def main():
    name, seconds = sys.argv[1], float(sys.argv[2])
    run = WORKS[name]()
    run()
    if name != "matmul_2048_f16":  # half a minute a run
        run()
    times = [timed(run)]
    while sum(times) < seconds * 1000 or (len(times) < 5 and times[0] < 5000):
        times.append(timed(run))
    times.sort()
    print(times[0], times[len(times) // 2])


if __name__ == "__main__":
    main()
