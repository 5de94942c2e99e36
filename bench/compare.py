"""Runs cairn_works and peer_torch.py in turn and prints a table: for each work the medians over all rounds, and the median of the rounds' ratios."""
import argparse
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys

import torch

from peer_torch import COMPILED, WORKS

AMD, INTEL = 0, 1  # Zen 5; Emerald Rapids
GOALS = {  # Cairn's speed over PyTorch's
    "matmul_2048_f32": (1.8, 1.0), "matmul_2048_bf16": (0.95, 1.7), "conv3x3_64_16x56x56_f32": (1.0, 1.0), "layer_norm_2048x768": (1.0, 1.0),
    "gelu_2048x3072": (1.5, 1.5), "cross_entropy_2048x50257": (8.0, 8.0), "convnet_step_f32": (1.3, 1.3), "convnet_step_bf16": (1.3, 1.3),
    "resnet18_step_f32": (1.3, 1.3), "resnet18_step_bf16": (1.3, 1.5), "lstm_step_f32": (1.3, 1.3), "lstm_step_bf16": (1.3, 1.3),
    "gpt_step_f32": (1.7, 1.15), "gpt_step_bf16": (1.15, 1.8), "gpt_t1024_step_f32": (1.2, 1.2), "gpt_t1024_step_bf16": (1.0, 1.0),
    "adamw_124m_f32": (1.0, 1.0), "o2_update_124m_bf16": (2.3, 2.3), "o2_update_124m_compact": (3.2, 3.2),
}
SHARE_GOALS = {"amp_step_124m_bf16": 0.97,  # of the speed of the same update without a scaler
               "gpt_step_o2_files": 0.91, "o2_update_124m_files": 0.7}  # of the same with states in memory
SHARE_GOAL = 0.9  # else: of the bandwidth of a loop over the same bytes
PAIRS = [  # work, other work, what of it, at most that share of the other's
    ("lstm_step_o2", "lstm_step_f32", "process_bytes", 0.7),
    ("vocabulary_40k", "vocabulary_40k_plain", "ms", 1.1),
    ("resnet18_step_bf16", "resnet18_step_f32", "ms", 1.0),
    ("lstm_step_bf16", "lstm_step_f32", "ms", 1.0),
    ("gpt_step_bf16", "gpt_step_f32", "ms", 1.0),
    ("convnet_step_bf16", "convnet_step_f32", "ms", 1.0),
    ("matmul_2048_bf16", "matmul_2048_f32", "ms", 1.0),
    ("matmul_2048_f16", "matmul_2048_f32", "ms", 1.1),
]


def processor():
    """Its name, or what stands for one: some virtual machines call every one of a make the same."""
    fields = dict(re.findall(r"^(vendor_id|model name|flags)\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(),
                             re.M))
    features = [f for f in ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
                if f in fields.get("flags", "").split()]
    maker = INTEL if fields.get("vendor_id") == "GenuineIntel" else AMD
    return fields.get("model name", platform.machine()), features, maker


def figures(command):
    """What a program says of its work: the median in milliseconds and, for some works, the share of a loop's
    bandwidth."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def variants(name):
    """PyTorch's ways of doing the work."""
    if name not in WORKS:
        return []
    program = [sys.executable, str(pathlib.Path(__file__).with_name("peer_torch.py"))]
    return [program, program + ["--compile"]] if name in COMPILED else [program]


def faster(name, seconds):
    """Eager or compiled, whichever is faster here."""
    choices = variants(name)
    if len(choices) < 2:
        return next(iter(choices), None)
    return min(choices, key=lambda program: figures([*program, name, str(seconds)])["ms"])


def compare(name, args):
    """Medians over rounds; the ratio is taken in each round, between runs that follow each other."""
    peer = faster(name, args.seconds)
    ours, theirs = [], []
    for _ in range(1 if name.startswith(("matmul_2048_f16", "vocabulary")) else args.rounds):
        ours.append(figures([args.cairn, name, str(args.seconds)]))
        if peer:
            theirs.append(figures([*peer, name, str(args.seconds)]))
    row = {"work": name, "cairn_ms": statistics.median(r["ms"] for r in ours),
           "cairn_bytes": statistics.median(r["process_bytes"] for r in ours),
           "goal": GOALS.get(name, (None, None))[args.make]}
    if peer:
        ratios = [b["ms"] / a["ms"] for a, b in zip(ours, theirs)]
        row |= {"peer_ms": statistics.median(r["ms"] for r in theirs),
                "peer_bytes": statistics.median(r["process_bytes"] for r in theirs), "ratio": statistics.median(ratios),
                "ratios": ratios, "peer": "compiled" if "--compile" in peer else "eager"}
    if "share" in ours[0]:
        row |= {"share": statistics.median(r["share"] for r in ours), "shares": [r["share"] for r in ours]}
    return row


def line(row):
    def cell(key, width, digits=2, unit=1):
        return f"{row[key] / unit:>{width}.{digits}f}" if row.get(key) is not None else f"{'-':>{width}}"
    slow = row["goal"] and row["ratio"] < row["goal"]
    missed = slow or row.get("share", 1.0) < SHARE_GOALS.get(row["work"], SHARE_GOAL)
    return (f"{row['work']:<28}{cell('cairn_ms', 10)}{cell('peer_ms', 10)}{cell('ratio', 8)}{cell('goal', 7)}{cell('share', 9)}"
            f"{cell('cairn_bytes', 8, 0, 2**20)}{cell('peer_bytes', 8, 0, 2**20)}  {row.get('peer', ''):<9}{' missed' if missed else ''}")


def pair_lines(rows):
    by_name = {row["work"]: row for row in rows}
    for work, other, what, most in PAIRS:
        if work in by_name and other in by_name:
            key = "cairn_" + what.removeprefix("process_")
            share = by_name[work][key] / by_name[other][key]
            yield f"{work}: {share:.2f} of the {'time' if what == 'ms' else 'memory'} of {other} (at most {most}){' missed' if share > most else ''}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("works", nargs="*")
    parser.add_argument("--cairn", required=True)
    parser.add_argument("--json", help="file for one line a work")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()

    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    names = args.works or subprocess.run([args.cairn, "--list"], capture_output=True, text=True,
                                         check=True).stdout.split()
    model, features, args.make = processor()
    print(f"{model} ({' '.join(features)}), PyTorch {torch.__version__}, {os.environ['OMP_NUM_THREADS']} threads; milliseconds, medians of {args.rounds} rounds and their ratio;"
          f" of loop: share of the bandwidth of a loop over the same bytes in the same run (goal {SHARE_GOAL}); MiB: what the process grew by at most; PyTorch"
          " eager or compiled, the faster\n")
    print(f"{'work':<28}{'Cairn':>10}{'PyTorch':>10}{'ratio':>8}{'goal':>7}{'of loop':>9}{'MiB':>8}{'MiB':>8}")
    rows = []
    for name in names:
        rows.append(compare(name, args))
        print(line(rows[-1]), flush=True)
    print("\n" + "\n".join(pair_lines(rows)))
    if args.json:
        pathlib.Path(args.json).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
