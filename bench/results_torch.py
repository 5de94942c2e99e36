"""PyTorch's side of scripts/results: the programs fashion and char_lm once more, with the same net, schedule and data.

results_torch.py fashion|text --seed S [--bf16] [the program's flags]    prints a JSON line: test_accuracy or test_loss, and seconds
"""
import argparse
import gzip
import json
import math
import pathlib
import time

import numpy
import torch
import torch.nn.functional as F
from peer_torch import Gpt, ResidualBlock
from torch import nn


def residual_net():
    return nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                         *(ResidualBlock(width, 2 * width, 2) for width in (16, 32, 64, 128)),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def autocast(options):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16)


def idx(folder, name):
    path = pathlib.Path(folder, name)
    data = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(name + ".gz").read_bytes())
    dims = data[3]
    shape = [int.from_bytes(data[4 + 4 * d:8 + 4 * d], "big") for d in range(dims)]
    return torch.from_numpy(numpy.frombuffer(data, numpy.uint8, offset=4 + 4 * dims).reshape(shape).copy())


def augmented(images):
    """Random windows of images with a margin of a pixel, and half of them flipped; [N, H, W] bytes."""
    count, height, width = images.shape
    rows = torch.arange(height) + torch.randint(0, 3, (count, 1))
    columns = torch.arange(width) + torch.randint(0, 3, (count, 1))
    columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
    return F.pad(images, (1, 1, 1, 1))[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


def normalized(images):
    return ((images.float() / 255 - 0.2860) / 0.3530).unsqueeze(1).contiguous(memory_format=torch.channels_last)


def fashion(options):
    images, labels = idx(options.data, "train-images-idx3-ubyte"), idx(options.data, "train-labels-idx1-ubyte").long()
    images, labels = images[:options.train_size], labels[:options.train_size]
    model = residual_net().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=options.weight_decay, fused=True)
    per_epoch = len(images) // options.batch_size
    total = options.steps or options.epochs * per_epoch
    up = total // 6
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(max(0.0, 1 - 20 / total)), use_buffers=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / (up + 1) if step < up else (1 + math.cos(math.pi * (step - up) / (total - up))) / 2)
    step = 0
    while step < total:
        for chosen in torch.randperm(len(images))[:per_epoch * options.batch_size].split(options.batch_size):
            with autocast(options):
                loss = F.cross_entropy(model(normalized(augmented(images[chosen]))), labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            step += 1
            if step == total:
                break
    images, labels = idx(options.data, "t10k-images-idx3-ubyte"), idx(options.data, "t10k-labels-idx1-ubyte").long()
    images, labels = images[:options.test_size], labels[:options.test_size]
    average.eval()
    with torch.no_grad(), autocast(options):
        right = sum((average(normalized(x)).argmax(1) == y).sum().item() for x, y in zip(images.split(250), labels.split(250)))
    return {"test_accuracy": right / len(images)}


def text(options):
    data = torch.frombuffer(bytearray(pathlib.Path(options.text).read_bytes()), dtype=torch.uint8).long()
    tokens, stride = options.tokens, options.tokens // 2
    windows = data.unfold(0, tokens + 1, stride)
    training, test = windows[:int(0.9 * len(windows))], windows[int(0.9 * len(windows)):]
    model = Gpt(256, tokens, options.width, options.layers, options.heads)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, 0.0, 0.02)
        elif name.endswith(("qkv.bias", "out.bias")):
            nn.init.zeros_(parameter)  # as MultiheadAttention begins
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=options.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / options.steps)) / 2)

    def loss_of(batch):
        with autocast(options):
            return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    order = iter(())
    for _ in range(options.steps):
        chosen = next(order, None)
        if chosen is None or len(chosen) < options.batch_size:
            order = iter(torch.randperm(len(training)).split(options.batch_size))
            chosen = next(order)
        optimizer.zero_grad()
        loss_of(training[chosen]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return {"test_loss": sum(loss_of(batch).item() * len(batch) for batch in test.split(16)) / len(test)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["fashion", "text"])
    parser.add_argument("--bf16", action="store_true", help="under autocast")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--text")
    parser.add_argument("--lr", type=float, default=0.1)
    for name, value in {"epochs": 5, "batch-size": 128, "steps": 0, "train-size": 60000, "test-size": 10000, "tokens": 64, "layers": 4,
                        "width": 128, "heads": 4, "sample": 0}.items():
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    begin = time.monotonic()
    told = {"fashion": fashion, "text": text}[options.task](options)
    print(json.dumps({**told, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
