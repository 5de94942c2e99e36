"""Runs cairn_works and peer_torch.py in turn and prints a table: for each work the medians over all rounds, and the median of the rounds' ratios."""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

import torch

from peer_torch import WORKS

GOALS = {  # Cairn's speed over PyTorch's
    "matmul_2048_f32": 1.8, "matmul_2048_bf16": 0.95, "matmul_2048_f16": None, "conv3x3_64_16x56x56_f32": 1.0, "layer_norm_2048x768": 1.0,
    "gelu_2048x3072": 1.5, "cross_entropy_2048x50257": 8.0, "convnet_step_f32": 1.3, "convnet_step_bf16": 1.3, "gpt_step_f32": 1.7,
    "gpt_step_bf16": 1.15, "adamw_124m_f32": 1.0, "o2_update_124m_bf16": 2.3, "o2_update_124m_compact": 3.2,
}
SHARE_GOALS = {"amp_step_124m_bf16": 0.97}  # of the speed of the same update without a scaler
SHARE_GOAL = 0.9  # else: of the bandwidth of a loop over the same bytes


def figures(command):
    """What a program says of its work: the median in milliseconds and, for some works, the share of a loop's bandwidth."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def compare(name, args):
    """Medians over rounds; the ratio is taken in each round, between runs that follow each other."""
    peer = [sys.executable, str(pathlib.Path(__file__).with_name("peer_torch.py"))] if name in WORKS else None
    ours, theirs, shares = [], [], []
    for _ in range(1 if name == "matmul_2048_f16" else args.rounds):
        row = figures([args.cairn, name, str(args.seconds)])
        ours.append(row["ms"])
        if "share" in row:
            shares.append(row["share"])
        if peer:
            theirs.append(figures([*peer, name, str(args.seconds)])["ms"])
    row = {"work": name, "cairn_ms": statistics.median(ours), "goal": GOALS.get(name)}
    if peer:
        ratios = [b / a for a, b in zip(ours, theirs)]
        row |= {"peer_ms": statistics.median(theirs), "ratio": statistics.median(ratios), "ratios": ratios}
    if shares:
        row |= {"share": statistics.median(shares), "shares": shares}
    return row


def line(row):
    def cell(key, width, digits=2):
        return f"{row[key]:>{width}.{digits}f}" if row.get(key) is not None else f"{'-':>{width}}"
    missed = (row["goal"] and row["ratio"] < row["goal"]) or row.get("share", 1.0) < SHARE_GOALS.get(row["work"], SHARE_GOAL)
    return f"{row['work']:<28}{cell('cairn_ms', 10)}{cell('peer_ms', 10)}{cell('ratio', 8)}{cell('goal', 7)}{cell('share', 9)}{'  missed' if missed else ''}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("works", nargs="*")
    parser.add_argument("--cairn", required=True)
    parser.add_argument("--json", help="file for one line a work")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()

    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    names = args.works or subprocess.run([args.cairn, "--list"], capture_output=True, text=True, check=True).stdout.split()
    print(f"PyTorch {torch.__version__}, {os.environ['OMP_NUM_THREADS']} threads, {platform.machine()}; milliseconds and ratios, medians of {args.rounds} rounds;"
          f" of loop: share of the bandwidth of a loop over the same bytes in the same run (goal {SHARE_GOAL})\n")
    print(f"{'work':<28}{'Cairn':>10}{'PyTorch':>10}{'ratio':>8}{'goal':>7}{'of loop':>9}")
    rows = []
    for name in names:
        rows.append(compare(name, args))
        print(line(rows[-1]), flush=True)
    if args.json:
        pathlib.Path(args.json).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
