"""peer_state_files.py safetensors|torch FILE ROUNDS: loads the file's tensors and touches every page, which a lazy loader reads then. Prints a JSON
line of milliseconds."""
import json
import sys
import time

import torch


def load(kind, path):
    if kind == "safetensors":
        from safetensors.torch import load_file
        return load_file(path)
    return torch.load(path, weights_only=True)


def touched(values):
    total = 0
    for value in values.values():
        total += touched(value) if isinstance(value, dict) else int(value.flatten().view(torch.uint8)[::4096].sum())
    return total


def main():
    kind, path, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    touched(load(kind, path))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        touched(load(kind, path))
        times.append((time.perf_counter() - start) * 1e3)
    print(json.dumps({"ms": times}))


main()
