"""The phases of scripts/gpu_check run, in order of importance: 40 minutes in four calls of 10 (--call 1 to 4), and phases that only --only runs.
Each has a limit in minutes; what it found is written before the next begins, so that a run that is cut off leaves results: results.md and
results.json, and one archive of them and the logs, results.tar.xz. docs/gpu.md says how to read the page.
"""
import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_check_page as page  # noqa: E402: it lies beside this script
import gpu_check_programs as programs  # noqa: E402: it lies beside this script

ROOT = programs.ROOT
AT_A_TIME = min(8, os.cpu_count())  # test processes on one GPU



def whole_suites():
    """(name, filter) of the programs whose tests compute on a GPU by default."""
    lines = (ROOT / "tests/gpu_suites.txt").read_text().splitlines()
    return [line.split(" ") for line in lines if line and not line.startswith("#")]


# Test programs, what runs of each, and whether tensors that a test gives no device lie on the GPU.
SUITES = [
    ("test_kernels", "*/cuda*", False), ("test_core", "*uda*", False), ("test_parallel", "Nccl*:*uda*", False),
    ("test_data", "DataLoader*evice*", False), ("test_conformance", "*/cuda*", False),
    *((f"test_{name}", pattern, True) for name, pattern in whole_suites()),
]
SIMULATED_SUITES = [("test_kernels", "*Softmax*/cuda*", False)]  # scripts/gpusim runs the rest

SHARE_GOAL = 0.85      # of a copy's bytes a second, where memory bounds a kernel
PRODUCT_GOAL = 0.95    # of cuBLASLt's best
LEVEL_GOALS = {"gpt2_124m_o2": 3.0}  # O0's time over its own
TORCH_GOALS = {"o2_update_124m_bf16": 1.5, "o2_update_1558m_bf16": 1.5, "gpt2_124m_o2": 1.3}

# Foreseen on paper, of PyTorch's time over Cairn's and of O0's over a level's: docs/adr/0021 has the sums.
TORCH_FORESEEN = {
    "o2_update_124m_bf16": 60 / 30, "o2_update_1558m_bf16": 60 / 30, "o2_update_124m_compact": 60 / 20,
    "o2_update_1558m_compact": 60 / 20, "adamw_124m_f32": 1.0, "gpt2_124m_o2": 1.1, "attention_gpt2_forward_bf16": 1.0,
    "attention_gpt2_bf16": 0.8, "attention_8192x128_bf16": 0.7,
}
LEVEL_FORESEEN = {"gpt2_124m_o2": 6.7}


class Check:
    """A run: its options, what it found so far, and how long it may go on."""

    def __init__(self, options):
        self.options, self.out = options, options.out
        self.rows, self.phase = [], ""
        self.end = time.monotonic() + 60 * options.minutes
        self.until = self.end
        self.kernel_report = page.kernel_report(programs.folder_of(options))

    def seconds(self):
        """Left to this phase."""
        return self.until - time.monotonic()

    def add(self, what, measured, **facts):
        """`ok` False: something does not work; None: nothing to judge. A goal that is missed is no failure."""
        self.rows.append({"phase": self.phase, "what": what, "measured": measured, **facts})

    def timed(self, what, value, unit, goal=None, foreseen=None, **facts):
        """A figure. A dry run has none."""
        if self.options.sim:
            self.add(what, "ran", ok=True)
        else:
            self.add(what, value, unit=unit, goal=goal, foreseen=foreseen, met=None if goal is None else value >= goal,
                     **facts)

    def run(self, name, command, **environment):
        """(status, output) of one of Cairn's programs; status None where time was up. The output goes to a log, too."""
        return programs.run(self.options, self.out / "logs" / log_name(name), command, self.seconds(), environment)


def log_name(label):
    return re.sub(r"[^\w.-]+", "_", label)


def machine(check):
    for what, value in programs.versions(check.options).items():
        check.add(what, value)


# --- Tests


def suite(check):
    for name, pattern, on_gpu in SIMULATED_SUITES if check.options.sim else SUITES:
        test_program(check, name, name, pattern, {"CAIRN_TEST_DEVICE": "cuda:0"} if on_gpu else {})


def test_program(check, label, name, pattern, environment, before=()):
    path = programs.folder_of(check.options) / "bin" / name
    if not path.exists():
        check.add(label, "not packed", ok=None)
        return
    status, listed = check.run(f"{label}.list", [path, "--gtest_list_tests", f"--gtest_filter={pattern}"],
                               **environment)
    count = len(re.findall(r"^  \S", listed, re.MULTILINE))
    if status != 0 or count == 0:
        check.add(label, f"no tests match {pattern} (status {status})", ok=False)
        return
    shards = min(16, max(1, count // 40))
    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
        ran = list(pool.map(lambda i: shard(check, label, [*before, path, f"--gtest_filter={pattern}"], environment, i,
                                            shards), range(shards)))
    report_tests(check, label, count, ran)


def shard(check, label, command, environment, index, shards):
    """What a share of the tests came to: counts, and why it did not end if it did not."""
    results = (check.out / "logs" / log_name(f"{label}.{index}.json")).resolve()
    status, output = check.run(f"{label}.{index}", command, **environment, GTEST_TOTAL_SHARDS=str(shards),
                               GTEST_SHARD_INDEX=str(index), GTEST_OUTPUT=f"json:{results}")
    errors = sum(int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", output))
    if status is None or not results.exists():
        begun = re.findall(r"\[ RUN      \] (\S+)", output)
        why = "time was up" if status is None else f"ended with status {status}"
        return {"errors": errors, "trouble": f"{why} in {begun[-1] if begun else 'no test'}", "cut": status is None,
                "passed": output.count("[       OK ]")}
    document = json.loads(results.read_text())
    tests = [t for group in document["testsuites"] for t in group["testsuite"]]
    failed = [f"{t['classname']}.{t['name']}" for t in tests if t.get("failures")]
    skipped = sum(t["result"] == "SKIPPED" for t in tests)
    return {"errors": errors, "failed": failed, "skipped": skipped, "passed": len(tests) - len(failed) - skipped,
            "trouble": "" if status == 0 or failed else f"ended with status {status}"}


def report_tests(check, label, count, ran):
    def total(key):
        return sum(r.get(key, 0) for r in ran)
    failed = [name for r in ran for name in r.get("failed", [])]
    troubles = [r["trouble"] for r in ran if r["trouble"]]
    wrong = failed or total("errors") or any(r["trouble"] and not r.get("cut") for r in ran)
    parts = [f"{total('passed')} of {count} passed", f"{len(failed)} failed"]
    parts += [f"{total('skipped')} skipped"] if total("skipped") else []
    parts += [f"{total('errors')} errors of the tool"] if total("errors") else []
    check.add(label, ", ".join(parts), ok=False if wrong else None if troubles else True,
              note="; ".join((failed + troubles)[:5]))


def sanitizer(tool):
    def phase(check):
        found = programs.find_program("compute-sanitizer")
        if check.options.sim or not found:
            check.add(tool,
                      "skipped: " + ("the simulator checks more" if check.options.sim else "no compute-sanitizer here"))
            return
        test_program(check, f"{tool}.test_kernels", "test_kernels", "*/cuda*", {},
                     [found, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"])
    return phase


# --- Speed


def works(check, pattern, seconds=0.5, **environment):
    """(name, row) of each work that matches; row None where it failed, which is said here."""
    with programs.Works(check.options, check.out / "logs", environment) as ours:
        for name in chosen(check, ours, pattern):
            yield name, ask(check, ours, name, seconds)


def chosen(check, ours, pattern):
    return [n for n in ours.names() if re.search(pattern, n) and re.search(check.options.works, n)]


def ask(check, side, name, seconds):
    try:
        return side.ask(name, 0 if check.options.sim else seconds, check.seconds())
    except programs.WorkFailed as error:
        cut = check.seconds() < 1  # the phase ran out of time, which is nobody's fault
        check.add(f"{name}: {side.label}", "time was up" if cut else f"failed: {error}", ok=None if cut else False)
        return None


def memory(check):
    for _, row in works(check, r"^(?!.*(update|adamw|amp_step|matmul|attention|gpt2|convnet|captured))"):
        if row:
            add_share(check, row)


def add_share(check, row):
    check.timed(row["work"], row["share"], "of copy", SHARE_GOAL,
                page.foreseen_share(check.kernel_report, row["kernels"]),
                note=f"{row['bytes'] / row['ms'] / 1e6:,.0f} GB/s, copy {row['bytes'] / row['loop_ms'] / 1e6:,.0f}")


def lengths(check):
    for _, row in works(check, r"^lengths_", seconds=5):
        if row:
            check.timed(row["work"], row["share"], "of the speed at one length", 0.9, 1.0,
                        note=f"{row['items'] / row['ms'] * 1000:,.0f} tokens/s, {row['system_allocations']:.2f} requests of the system in 8 steps")


def graphs(check):
    for _, row in works(check, r"^captured_", seconds=2):
        if row:
            check.timed(row["work"], row["share"], "x: an eager step's time over a captured one's", 1.0,
                        note=f"{row['ms']:.2f} and {row['loop_ms']:.2f} ms")


def products(check):
    for _, row in works(check, r"^(matmul|gpt2_(?!124m))"):
        if row:
            check.timed(row["work"], row["share"], "of cuBLASLt's best", PRODUCT_GOAL, 1.0,
                        note=f"{row['operations'] / row['ms'] / 1e9:,.0f} TFLOP/s")
    with programs.Works(check.options, check.out / "logs") as ours:
        if not any("f8" in name for name in ours.names()):
            check.add("products in f8", "left out: there is no such work, since Cairn has no 8-bit floating type")


def middle(values):
    return sorted(values)[len(values) // 2]


def beside_torch(check, pattern, judge):
    """Rounds of both programs in turn; medians over rounds, the ratio's taken in each. judge(check, row) adds
    what is Cairn's alone."""
    rounds = 1 if check.options.sim else 3
    logs = check.out / "logs"
    with programs.Works(check.options, logs) as ours, programs.Peer(check.options, logs) as peer:
        if not peer.present:
            check.add("PyTorch", "skipped: " + ("a dry run" if check.options.sim else "no PyTorch with CUDA here"))
        for name in chosen(check, ours, pattern):
            pairs = [(ask(check, ours, name, 1),
                      ask(check, peer, name, 1) if peer.present and peer.knows(name) else None) for _ in range(rounds)]
            mine = [a for a, _ in pairs if a]
            both = [(a, b) for a, b in pairs if a and b]
            if mine:
                judge(check, sorted(mine, key=lambda row: row["ms"])[len(mine) // 2])
            if both:
                add_ratio(check, name, both)


def add_ratio(check, name, pairs):
    ratios = [b["ms"] / a["ms"] for a, b in pairs]
    ours, theirs = (middle([p[i]["peak_bytes"] for p in pairs]) / 2**30 for i in (0, 1))
    check.timed(f"{name}: PyTorch's time over Cairn's", middle(ratios), "x", TORCH_GOALS.get(name), TORCH_FORESEEN.get(name),
                note=f"{middle([a['ms'] for a, _ in pairs]):.2f} and {middle([b['ms'] for _, b in pairs]):.2f} ms; rounds {min(ratios):.2f} - {max(ratios):.2f}")
    check.timed(f"{name}: peak memory", ours, "GiB", note=f"PyTorch {theirs:.2f} GiB")


def updates(check):
    def judge(check, row):
        if "bytes" in row:
            add_share(check, row)
        else:
            check.timed(row["work"], row["share"], "of the update without a scaler", 0.97, 1.0)
    beside_torch(check, r"update|adamw|amp_step", judge)


def steps(name):
    def judge(check, row):
        unit = "tokens" if name == "gpt2" else "images"
        rate = f"{row['operations'] / row['ms'] / 1e9:,.0f} TFLOP/s, " if "operations" in row else ""
        check.timed(row["work"], row["items"] / row["ms"] * 1000, f"{unit}/s",
                    note=f"{rate}{row['ms']:.2f} ms, peak {row['peak_bytes'] / 2**30:.2f} GiB")
        if "share" in row:
            check.timed(f"{row['work']}: O0's time over its own", row["share"], "x", LEVEL_GOALS.get(row["work"]),
                        LEVEL_FORESEEN.get(row["work"]))
    return lambda check: beside_torch(check, rf"^{name}(_124m)?_o\d$", judge)


def attention(check):
    def judge(check, row):
        check.timed(row["work"], row["operations"] / row["ms"] / 1e9, "TFLOP/s", note=f"{row['ms']:.2f} ms")
    beside_torch(check, r"^attention_", judge)
    for _, row in works(check, r"^attention_", CAIRN_ATTENTION="own"):
        if row:
            judge(check, {**row, "work": f"{row['work']}, Cairn's own kernels"})


# --- Whole programs


TRAINING = {
    "digits": ["--epochs", "5"],
    "char_lm": ["--text", *sorted(map(str, (ROOT / "docs").glob("*.md"))), "--sample", "0", "--steps", "600"],
}
SIMULATED_TRAINING = {
    "digits": ["--train-size", "64", "--test-size", "16", "--batch-size", "8", "--steps", "2"],
    "char_lm": ["--text", str(ROOT / "docs/naming.md"), "--sample", "0", "--steps", "2", "--layers", "1", "--width",
                "16", "--heads", "2", "--tokens", "8", "--batch-size", "2"],
}


# nanoGPT's for one GPU: its best validation loss is 1.4697, in 3 minutes on an A100. Ours is that of the end.
TEXT_RECIPE = ["--layers", "6", "--width", "384", "--heads", "6", "--tokens", "256", "--batch-size", "64", "--dropout", "0.2", "--steps", "5000",
               "--weight-decay", "0.1", "--sample", "0"]


def text(check):
    if not check.options.sim and not check.options.text:
        check.add("text", "skipped: --text names no file (tinyshakespeare, 1.1 MB)")
        return
    arguments = SIMULATED_TRAINING["char_lm"] if check.options.sim else [*TEXT_RECIPE, "--text", str(check.options.text.resolve())]
    for level in ("O0", "O1", "O2"):
        train(check, "char_lm", level, arguments, "test_loss", lambda m: m["test_loss"] < 1.55, of="nanoGPT's text")


def training(check):
    arguments_of = SIMULATED_TRAINING if check.options.sim else TRAINING
    for level in ("O0", "O1", "O2"):
        train(check, "digits", level, arguments_of["digits"], "test_accuracy", lambda m: m["test_accuracy"] >= 0.97)
        train(check, "char_lm", level, arguments_of["char_lm"], "test_loss",
              lambda m: m["test_loss"] < m["bigram_loss"])


def train(check, program, level, arguments, figure, learned, of=None):
    label = f"{of or program} {level}"
    run = check.out / "logs" / re.sub(r"\W", "_", label)
    status, output = check.run(label,
                               [f"bin/{program}", "--device", "cuda", "--opt-level", level, "--observe", run.resolve(),
                                *arguments])
    if status != 0:
        check.add(label, "time was up" if status is None else f"status {status}", ok=None if status is None else False,
                  note=last_line(output))
        return
    last = json.loads((run / "metrics.jsonl").read_text().strip().split("\n")[-1])
    speed = next((f", {last[key]:,.0f} {key.split('_')[0]}/s" for key in last if key.endswith("_per_second")), "")
    if check.options.sim:
        check.add(label, "ran", ok=True)
    else:
        check.add(label, f"{figure} {last[figure]:.4f}{speed}", ok=learned(last))


def last_line(text):
    return text.strip().split("\n")[-1][:200]


def ranks(check):
    alone = ("NCCL, one rank", ["bin/gpu_ranks", "nccl"])
    staged = ("two ranks on one GPU, gradients staged through the host to Gloo",
              ["bin/cairn-run", "--nproc-per-node", "2", "bin/gpu_ranks", "staged"])
    for label, command in (alone, staged):
        status, output = check.run(command[-1], command)
        check.add(label, "agrees" if status == 0 else f"status {status}", ok=status == 0, note=last_line(output))


def recovery(check):
    status, output = check.run("recovery", ["bin/gpu_recovery"],
                               **({"CAIRN_SIM_MEMORY": "64M"} if check.options.sim else {}))
    if status is None:
        check.add("out of memory, and on", "time was up", ok=None)
    else:
        check.add("out of memory, and on", "goes on" if status == 0 else f"status {status}", ok=status == 0,
                  note=last_line(output))


# --- Two GPUs


def two_gpus(check):
    count = programs.gpu_count(check.options)
    if count < 2:
        check.add("two GPUs",
                  f"skipped: the machine has {count} GPU{'' if count == 1 else 's'}, and NCCL takes one rank a GPU")
        return
    simulated = {"CAIRN_SIM_GPUS": "2"} if check.options.sim else {}
    for label, name, pattern, on_gpu in SIMULATED_PAIR_SUITES if check.options.sim else PAIR_SUITES:
        test_program(check, label, name, pattern, {**simulated, **({"CAIRN_TEST_DEVICE": "cuda:0"} if on_gpu else {})})
    for what, count in (("copies", 1), ("bandwidth", 2), ("overlap", 2)):
        pair(check, what, count)


# Two ranks, as processes and as threads, each with a GPU of its own; whether tensors that a test gives no
# device lie there.
PAIR_SUITES = [
    ("NCCL's collectives", "test_collectives", "NcclEngine.HasEvery*", False),
    ("NCCL's ranks, killed and aborted ones, captured steps", "test_parallel", "Nccl*", False),
    ("DDP and its reducer", "test_parallel",
     "Ddp.TwoProcesses:Ddp.Accumulates*:Ddp.RemaindersOfTwo*:Ddp.ReducesWhile*:Reducer.AveragesBetween*:Reducer.Retains*",
     True),
    ("sharding", "test_sharding",
     "DividedGradients.*adam_O2*_2_ranks:DividedWeights.*adam_O2*_2_ranks:WeightsInParts.AreWhole*", True),
]
# scripts/gpusim runs the rest
SIMULATED_PAIR_SUITES = [("DDP and its reducer", "test_parallel", "Reducer.Retains*", True)]


def pair(check, what, processes):
    launcher = ["bin/cairn-run", "--nproc-per-node", str(processes)] if processes > 1 else []
    tiny = ["--tiny"] if check.options.sim else []
    status, output = check.run(f"pair_{what}", [*launcher, "bin/gpu_pair", what, *tiny],
                               **({"CAIRN_SIM_GPUS": "2"} if check.options.sim else {}))
    if status != 0:
        check.add(what, "time was up" if status is None else f"status {status}", ok=None if status is None else False,
                  note=last_line(output))
    for line in re.findall(r"^(?:\[rank 0\] )?(\{.*\})$", output, re.MULTILINE):
        add_figure(check, json.loads(line))


def add_figure(check, row):
    if "bus_gb_s" in row:
        check.timed(f"{row['figure']}, {row['bytes']:,} bytes", row["bus_gb_s"], "GB/s of the bus",
                    note=f"{row['ms']:.3f} ms")
    elif "hidden" in row:
        check.timed("all_reduces hidden by backward", row["hidden"], "of their time",
                    note=f"a step {row['ms']:.2f} ms, alone {row['alone_ms']:.2f}, reduced after it {row['delayed_ms']:.2f}")
    else:
        check.timed(row["figure"], row["gb_s"], "GB/s")


PHASES = [  # what, at most how many minutes, in which call: each call has 10 minutes
    ("machine", 1, machine, 1), ("suite", 9, suite, 1),
    ("gpt2", 4, steps("gpt2"), 2), ("attention", 2, attention, 2), ("updates", 4, updates, 2),
    ("memory", 3, memory, 3), ("convnet", 1, steps("convnet"), 3), ("products", 2, products, 3), ("lengths", 2, lengths, 3), ("graphs", 1, graphs, 3),
    ("recovery", 1, recovery, 3),
    ("two_gpus", 5, two_gpus, 4), ("ranks", 1, ranks, 4), ("training", 4, training, 4),
    # What only --only runs.
    ("text", 9, text, None),
    ("memcheck", 6, sanitizer("memcheck"), None), ("racecheck", 5, sanitizer("racecheck"), None), ("synccheck", 4, sanitizer("synccheck"), None),
    ("initcheck", 4, sanitizer("initcheck"), None),
]
CALLS = sorted({call for _, _, _, call in PHASES if call})


def run_phase(check, name, minutes, phase):
    print(f"\n== {name}", flush=True)
    check.phase, first, start = name, len(check.rows), time.monotonic()
    check.until = min(check.end, start + 60 * minutes)
    if check.seconds() < 5:
        check.add(name, "not begun: no time was left", ok=None)
    else:
        try:
            phase(check)
        except Exception as error:  # whatever it is, the other phases have their turn
            check.add(name, f"failed: {type(error).__name__}: {error}", ok=False)
    for row in check.rows[first:]:
        print(page.line(row), flush=True)
    page.write(check.out, check.rows, check.options.sim)
    page.archive(check.out)


def earlier_rows(out, names):
    """Of phases that this run leaves as an earlier one wrote them."""
    try:
        return [row for row in json.loads((out / "results.json").read_text())["rows"] if row["phase"] not in names]
    except (OSError, ValueError, KeyError):
        return []


def arguments():
    names = [name for name, *_ in PHASES]
    parser = argparse.ArgumentParser(prog="gpu_check run", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu_check",
                        help="folder for results.md, results.json, logs and results.tar.xz")
    parser.add_argument("--only", type=lambda text: text.split(","),
                        help="of " + ",".join(names) + "; results of the others in --out stay")
    parser.add_argument("--call", type=int, choices=CALLS,
                        help="the phases of one call of 10 minutes; results of the others in --out stay")
    parser.add_argument("--works", default="",
                        help="a regular expression: of what is timed, the works whose names match")
    parser.add_argument("--text", type=Path, help="a file for the phase text, which trains nanoGPT's recipe on it")
    parser.add_argument("--minutes", type=float, help="for all phases together (40; of a call 10)")
    parser.add_argument("--programs", type=Path, help="a build folder or an unpacked pack; default: what 'pack' made")
    parser.add_argument("--python", help="an interpreter with PyTorch; default: this one, or python3")
    parser.add_argument("--sim", action="store_true", help="a dry run on simulated GPUs: tiny sizes, no figures")
    parser.add_argument("--sim-gpus", type=int, default=2, help="so many of them")
    options = parser.parse_args()
    if options.only and options.call:
        parser.error("expected --only or --call, got both")
    options.only = options.only or [name for name, _, _, call in PHASES if call and options.call in (call, None)]
    options.minutes = options.minutes or (10 if options.call else 40)
    unknown = set(options.only) - set(names)
    if unknown:
        parser.error(f"no phase called {', '.join(sorted(unknown))}")
    options.out = options.out.resolve()
    return options


def main():
    options = arguments()
    os.chdir(ROOT)
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    check = Check(options)
    check.rows = earlier_rows(options.out, options.only)
    for name, minutes, phase, _ in PHASES:
        if name in options.only:
            run_phase(check, name, minutes, phase)
    wrong = [row for row in check.rows if row.get("ok") is False]
    if options.sim and not all(row.get("ok", True) for row in check.rows):
        sys.exit("gpu_check: a dry run must come to the end of every phase")
    print(f"\n{options.out / 'results.md'}: {len(check.rows)} results, {len(wrong)} failures, {sum(row.get('met') is False for row in check.rows)} goals missed")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
