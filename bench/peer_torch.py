"""The PyTorch side of scripts/bench_vs_torch and scripts/gpu_check: the same works under the same names as bench/*_works.cpp.

peer_torch.py NAME SECONDS times a work and prints a JSON line: the fastest and the median run in milliseconds and the peak of memory: on a
GPU that of tensors, on the CPU how much the process grew (VmHWM). NAME "-": lines "NAME SECONDS" are read and answered. --compile: what a work
computes goes through torch.compile, where that is possible (COMPILED).
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


COMPILE = False  # --compile


def compiled(function):
    return torch.compile(function) if COMPILE else function


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
    forward = compiled(layer)
    x, dy = torch.randn(2048, 768, requires_grad=True), torch.randn(2048, 768)

    def run():
        x.grad = layer.weight.grad = layer.bias.grad = None
        forward(x).backward(dy)
    return run


def gelu():
    forward = compiled(F.gelu)
    x, dy = torch.randn(2048, 3072, requires_grad=True), torch.randn(2048, 3072)

    def run():
        x.grad = None
        forward(x).backward(dy)
    return run


def cross_entropy():
    logits = torch.randn(2048, 50257, requires_grad=True)
    target = torch.arange(2048) * 7919 % 50257
    loss = compiled(F.cross_entropy)

    def run():
        logits.grad = None
        loss(logits, target).backward()
    return run


class ConvNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


def training(model, x, target, dtype):
    """Steps with fused AdamW; autocast where dtype is bf16."""
    forward = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def run():
        optimizer.zero_grad()
        with autocast(dtype):
            loss = F.cross_entropy(forward(x).flatten(0, -2), target.flatten())
        loss.backward()
        optimizer.step()
    return run


def images(make_model, shape, dtype):
    """The better of PyTorch's two storage orders."""
    def make(channels_last):
        torch.manual_seed(1)
        model, x = make_model(), torch.randn(shape)
        if channels_last:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        return training(model, x, torch.arange(shape[0]) % 10, dtype)

    def fastest(run):
        run(), run()
        return min(timed(run) for _ in range(5))
    layout = fastest(make(True)) < fastest(make(False))
    forget()
    return make(layout)


def convnet(dtype, batch=100):
    return images(ConvNet, (batch, 1, 28, 28), dtype)


class ResidualBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                                                                 nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """For images of 32 x 32: a 3 x 3 stem, no pooling before the stages."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        self.blocks = nn.Sequential(*(ResidualBlock(i, o, 1 if i == o else 2) for i, o in zip(widths, widths[1:])))
        self.head = nn.Linear(512, 10)

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


def resnet(dtype):
    return images(ResNet18, (32, 3, 32, 32), dtype)


class LanguageModel(nn.Module):
    def __init__(self, words, width, layers):
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(words, width), nn.LSTM(
            width, width, layers), nn.Linear(width, words)

    def forward(self, index):
        return self.head(self.lstm(self.embedding(index))[0])


def lstm(dtype):
    torch.manual_seed(1)
    x, y = torch.randint(0, 10000, (250, 8)), torch.randint(0, 10000, (250, 8))
    return training(LanguageModel(10000, 512, 2), x, y, dtype)


def vocabulary(loss):
    """The last layer and the loss of a language model of 40,000 words, on 32 x 250 tokens."""
    x, weight = torch.randn(8000, 512).requires_grad_(), (0.05 * torch.randn(40000, 512)).requires_grad_()
    target = torch.arange(8000) * 7919 % 40000
    loss = compiled(loss)

    def run():
        x.grad = weight.grad = None
        loss(x, weight, target).backward()
    return run


def plain_loss(x, weight, target):
    return F.cross_entropy(F.linear(x, weight), target)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, d // self.heads).transpose(1, 2)
                   for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
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
    return training(model, x, y, dtype)


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


def attention(batch, heads, tokens, width, backward=True):
    def part():
        return torch.randn(batch, tokens, heads, width, dtype=torch.bfloat16).transpose(1, 2).requires_grad_(backward)
    q, k, v = part(), part(), part()
    dy = torch.randn(batch, tokens, heads, width, dtype=torch.bfloat16).transpose(1, 2)

    def run():
        q.grad = k.grad = v.grad = None
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if backward:
            y.backward(dy)
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
    "resnet18_step_f32": lambda: resnet(torch.float32),
    "resnet18_step_bf16": lambda: resnet(torch.bfloat16),
    "resnet18_step_o2": lambda: resnet(torch.bfloat16),
    "lstm_step_f32": lambda: lstm(torch.float32),
    "lstm_step_bf16": lambda: lstm(torch.bfloat16),
    "lstm_step_o2": lambda: lstm(torch.bfloat16),
    "gpt_step_f32": lambda: gpt(torch.float32),
    "gpt_step_bf16": lambda: gpt(torch.bfloat16),
    "gpt_t1024_step_f32": lambda: gpt(torch.float32, batch=2, tokens=1024),
    "gpt_t1024_step_bf16": lambda: gpt(torch.bfloat16, batch=2, tokens=1024),
    "vocabulary_40k_plain": lambda: vocabulary(plain_loss),
    "vocabulary_40k": lambda: vocabulary(F.linear_cross_entropy),
    "vocabulary_40k_recompute": lambda: vocabulary(F.linear_cross_entropy),
    "adamw_124m_f32": adamw,
    "o2_update_124m_bf16": o2_update,
    "o2_update_124m_compact": o2_update,  # has no such state
}
COMPILED = [name for name in WORKS
            if "_step_" in name or name.startswith(("layer_norm", "gelu", "cross_entropy", "vocabulary_40k_plain"))]
GPU_WORKS = {  # O1 and O2 beside autocast to bf16
    "o2_update_124m_bf16": o2_update,
    "o2_update_1558m_bf16": lambda: o2_update(48, 1600),
    "o2_update_124m_compact": o2_update,
    "o2_update_1558m_compact": lambda: o2_update(48, 1600),
    "adamw_124m_f32": adamw,
    "gpt2_124m_o0": lambda: gpt2(torch.float32),
    "gpt2_124m_o1": lambda: gpt2(torch.bfloat16),
    "gpt2_124m_o2": lambda: gpt2(torch.bfloat16),
    "attention_gpt2_forward_bf16": lambda: attention(16, 12, 1024, 64, backward=False),
    "attention_gpt2_bf16": lambda: attention(16, 12, 1024, 64),
    "attention_8192x128_bf16": lambda: attention(2, 16, 8192, 128),
    "convnet_o0": lambda: convnet(torch.float32, 4096),
    "convnet_o1": lambda: convnet(torch.bfloat16, 4096),
    "convnet_o2": lambda: convnet(torch.bfloat16, 4096),
}


def wait():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def process_memory(field):
    """The process's own memory in bytes: VmRSS now, VmHWM at most since forget()."""
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith(field))


def forget():
    """What the last work left: memory that is cached, and the peak."""
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
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
    before = process_memory("VmRSS")
    with torch.device(DEVICE):  # for the data alone: it costs every call a little
        run = (WORKS if DEVICE.type == "cpu" else GPU_WORKS)[name]()
    run()
    if name != "matmul_2048_f16":  # half a minute a run
        run()
    process_bytes = process_memory("VmHWM") - before
    repeats = repeats_of(run)
    times = [timed(run, repeats)]
    while sum(times) * repeats < seconds * 1000 or (len(times) < 5 and times[0] < 5000):
        times.append(timed(run, repeats))
    times.sort()
    row = {"work": name, "fastest_ms": times[0], "ms": times[len(times) // 2], "process_bytes": process_bytes}
    if DEVICE.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def answer(name, seconds="1"):
    print(json.dumps(measure(name, float(seconds))), flush=True)


def main():
    global COMPILE, DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("seconds", nargs="?", default="1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    COMPILE, DEVICE = options.compile, torch.device(options.device)
    if options.name != "-":
        answer(options.name, options.seconds)
        return
    for line in sys.stdin:
        answer(*line.split())


if __name__ == "__main__":
    main()
