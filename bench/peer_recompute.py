"""PyTorch's side of bench/recompute_works.cpp: the same GPT of 24 blocks with torch.utils.checkpoint.checkpoint_sequential. peer_recompute.py SEGMENTS
ROUNDS prints a JSON line: milliseconds of each step, forward and backward. SEGMENTS 0: plain."""
import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

BLOCKS, WIDTH, HEADS, TOKENS, SAMPLES, WORDS = 24, 128, 4, 128, 8, 256


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)

    def forward(self, index):
        return self.token(index) + self.position(torch.arange(TOKENS))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        n, t, _ = x.shape
        heads = [part.view(n, t, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(WIDTH, dim=2)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def main():
    segments, rounds = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(1)
    model = nn.Sequential(Embedding(), *[Block() for _ in range(BLOCKS)], nn.LayerNorm(WIDTH),
                          nn.Linear(WIDTH, WORDS, bias=False))
    index = (torch.arange(SAMPLES * TOKENS) * 7919 % WORDS).view(SAMPLES, TOKENS)
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        y = checkpoint_sequential(model, segments, index, use_reentrant=False) if segments else model(index)
        F.cross_entropy(y.view(-1, WORDS), index.view(-1)).backward()
        times.append(1e3 * (time.perf_counter() - begin))
        model.zero_grad(set_to_none=True)
    print(json.dumps({"ms": times[1:]}))


if __name__ == "__main__":
    main()
