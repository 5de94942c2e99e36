#!/usr/bin/env python3
"""Writes distributed_sampler.txt: what torch.utils.data.DistributedSampler and torch.randperm give. Run with torch installed.

Lines: "sampler N R rank seed epoch shuffle drop_last : indices..." and "randperm n seed : hash", the hash being
FNV-1a (64 bits) over the permutation as little-endian int64.
"""
import itertools
import pathlib
import struct

import torch
from torch.utils.data import DistributedSampler


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def sampler_lines():
    sizes, worlds = (0, 1, 2, 5, 10, 17, 101), (1, 2, 3, 8)
    orders = [(seed, epoch, True) for seed in (0, 2**40 + 3) for epoch in (0, 3)] + [(0, 0, False)]
    for n, world, (seed, epoch, shuffle), drop in itertools.product(sizes, worlds, orders, (False, True)):
        for rank in range(world):
            sampler = DistributedSampler(range(n), world, rank, shuffle, seed, drop)
            sampler.set_epoch(epoch)
            indices = " ".join(map(str, sampler))
            yield f"sampler {n} {world} {rank} {seed} {epoch} {int(shuffle)} {int(drop)} : {indices}".rstrip()


def randperm_lines():
    for n, seed in ((1, 0), (2, 1), (1000, 7), (60000, 2**63 + 5), (100000, 12345)):
        generator = torch.Generator()
        generator.manual_seed(seed)
        order = torch.randperm(n, generator=generator).tolist()
        yield f"randperm {n} {seed} : {fnv1a(struct.pack(f'<{n}q', *order))}"


if __name__ == "__main__":
    path = pathlib.Path(__file__).with_name("distributed_sampler.txt")
    path.write_text("\n".join([f"# torch {torch.__version__}", *sampler_lines(), *randperm_lines()]) + "\n")
