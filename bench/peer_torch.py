"""The PyTorch side of scripts/bench_vs_torch and scripts/gpu_check: the same works under the same names as bench/*_works.cpp.

peer_torch.py NAME SECONDS times a work and prints a JSON line: the fastest and the median run in milliseconds and, on a GPU, the peak of the
memory that tensors held. NAME "-": lines "NAME SECONDS" are read and answered.
"""
import argparse
import json
import math
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


DEVICE = torch.device("cpu")  # where tensors are made; --device sets it


def autocast(dtype):
    return torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


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


def convnet(dtype, batch=100):
    """The better of PyTorch's two storage orders; the optimizer is part of the step."""
    def make(channels_last):
        torch.manual_seed(1)
        model = ConvNet()
        x = torch.randn(batch, 1, 28, 28)
        if channels_last:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        target = torch.arange(batch) % 10
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def run():
            optimizer.zero_grad()
            with autocast(dtype):
                loss = F.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
        return run

    def fastest(run):
        run(), run()
        return min(timed(run) for _ in range(20))
    layout = fastest(make(True)) < fastest(make(False))
    forget()
    return make(layout)


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
        x = self.token(index) + self.position(torch.arange(index.shape[1], device=index.device))
        return self.head(self.norm(self.blocks(x)))


def gpt(dtype, batch=8, vocabulary=256, tokens=256, width=384, layers=6, heads=6):
    """Attention is scaled_dot_product_attention, which is fused."""
    torch.manual_seed(1)
    model = Gpt(vocabulary, tokens, width, layers, heads)
    x = torch.randint(0, vocabulary, (batch, tokens))
    y = torch.randint(0, vocabulary, (batch, tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def run():
        optimizer.zero_grad()
        with autocast(dtype):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
    return run


def gpt2(dtype):
    return gpt(dtype, batch=16, vocabulary=50257, tokens=1024, width=768, layers=12, heads=12)


def gpt2_shapes(layers=12, d=768):
    """GPT-2 small's 148 tensors, 124M parameters; with 48 layers of 1600, 1.56G."""
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d)] + block * layers + [(d,), (d,)]


def adamw():
    parameters = [torch.randn(s).mul_(0.02).requires_grad_() for s in gpt2_shapes()]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    return optimizer.step


def o2_update(layers=12, width=768):
    """GradScaler.unscale_ + clip_grad_norm_ + fused AdamW on f32 masters + copies, gradients and weights bf16."""
    shapes = gpt2_shapes(layers, width)
    weights = [torch.randn(s).mul_(0.02).bfloat16() for s in shapes]
    grads = [torch.randn(s).mul_(0.01).bfloat16() for s in shapes]
    masters = [w.float().requires_grad_() for w in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=10**9)
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
GPU_WORKS = {  # O1 and O2 beside autocast to bf16
    "o2_update_124m_bf16": o2_update,
    "o2_update_1558m_bf16": lambda: o2_update(48, 1600),
    "o2_update_124m_compact": o2_update,
    "o2_update_1558m_compact": lambda: o2_update(48, 1600),
    "adamw_124m_f32": adamw,
    "gpt2_124m_o0": lambda: gpt2(torch.float32),
    "gpt2_124m_o1": lambda: gpt2(torch.bfloat16),
    "gpt2_124m_o2": lambda: gpt2(torch.bfloat16),
    "convnet_o0": lambda: convnet(torch.float32, 4096),
    "convnet_o1": lambda: convnet(torch.bfloat16, 4096),
    "convnet_o2": lambda: convnet(torch.bfloat16, 4096),
}


def wait():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def forget():
    """What the last work left: memory that is cached, and the peak."""
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(run, repeats=1):
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - start) * 1000 / repeats


def repeats_of(run):
    """As cairn_works: on a GPU so many that it is busy for 10 ms between two waits."""
    if DEVICE.type == "cpu":
        return 1
    return min(1000, max(1, math.ceil(10 / timed(run, 3))))


def measure(name, seconds):
    forget()
    with torch.device(DEVICE):  # for the data alone: it costs every call a little
        run = (WORKS if DEVICE.type == "cpu" else GPU_WORKS)[name]()
    run()
    if name != "matmul_2048_f16":  # half a minute a run
        run()
    repeats = repeats_of(run)
    times = [timed(run, repeats)]
    while sum(times) * repeats < seconds * 1000 or (len(times) < 5 and times[0] < 5000):
        times.append(timed(run, repeats))
    times.sort()
    row = {"work": name, "fastest_ms": times[0], "ms": times[len(times) // 2]}
    if DEVICE.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def answer(name, seconds="1"):
    print(json.dumps(measure(name, float(seconds))), flush=True)


def main():
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("seconds", nargs="?", default="1")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    DEVICE = torch.device(options.device)
    if options.name != "-":
        answer(options.name, options.seconds)
        return
    for line in sys.stdin:
        answer(*line.split())


if __name__ == "__main__":
    main()
