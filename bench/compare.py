"""Runs cairn_works and peer_torch.py alternately and prints a table: for each work the fastest median of all rounds and their ratio."""
import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys

import torch

GOALS = {  # Cairn's speed over PyTorch's
    "matmul_2048_f32": 1.8, "matmul_2048_bf16": 0.95, "matmul_2048_f16": None, "conv3x3_64_16x56x56_f32": 1.0, "layer_norm_2048x768": 1.0,
    "gelu_2048x3072": 1.5, "cross_entropy_2048x50257": 8.0, "convnet_step_f32": 1.3, "convnet_step_bf16": 1.3, "gpt_step_f32": 1.7,
    "gpt_step_bf16": 1.15, "adamw_124m_f32": 1.0, "o2_update_124m_bf16": 2.3,
}


def median_ms(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return float(done.stdout.split()[1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("works", nargs="*")
    parser.add_argument("--cairn", required=True)
    parser.add_argument("--json", help="file for one line a work")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()

    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    peer = [sys.executable, str(pathlib.Path(__file__).with_name("peer_torch.py"))]
    names = args.works or subprocess.run([args.cairn, "--list"], capture_output=True, text=True, check=True).stdout.split()
    print(f"PyTorch {torch.__version__}, {os.environ['OMP_NUM_THREADS']} threads, {platform.machine()}; milliseconds, fastest median of {args.rounds} rounds\n")
    print(f"{'work':<28}{'Cairn':>10}{'PyTorch':>10}{'ratio':>8}{'goal':>7}")
    rows = []
    for name in names:
        ours, theirs = [], []
        for _ in range(1 if name == "matmul_2048_f16" else args.rounds):
            ours.append(median_ms([args.cairn, name, str(args.seconds)]))
            theirs.append(median_ms([*peer, name, str(args.seconds)]))
        row = {"work": name, "cairn_ms": min(ours), "peer_ms": min(theirs), "ratio": min(theirs) / min(ours), "goal": GOALS.get(name)}
        rows.append(row)
        goal = f"{row['goal']:.2f}" if row["goal"] else "-"
        missed = "  missed" if row["goal"] and row["ratio"] < row["goal"] else ""
        print(f"{name:<28}{row['cairn_ms']:>10.2f}{row['peer_ms']:>10.2f}{row['ratio']:>8.2f}{goal:>7}{missed}", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
