"""Times Cairn's ranks and their peers by turns and prints a table. Each ratio is the peer's time over Cairn's, taken between runs that follow
each other, once of the runs' medians and once of their fastest repeats, which other work on the machine disturbs less; the table and the file have
the medians over rounds. Ranks that all_reduce are bound to the cores in turn; those that train go where the system puts them."""
import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile

KIB, MIB = 1 << 10, 1 << 20
SIZES = [("1 KiB", KIB), ("32 KiB", 32 * KIB), ("256 KiB", 256 * KIB), ("4 MiB", 4 * MIB), ("25 MiB", 25 * MIB),
         ("256 MiB", 256 * MIB)]
OVERLAP = 1 / 1.05   # a step of at most 1.05 times the longer of its two parts
SHARDED = (1 / 1.03, 1 / 1.03, 1 / 1.15)   # of a step of DDP, by stage
CONTROL_MS = 0.1     # 1 % of a step of 10 ms
MOST_SECONDS = 300   # a program


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def answer(command):
    """The JSON line that a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS,
                          env={**os.environ, "CAIRN_LOG": "warn"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


class Programs:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.torch = importlib.util.find_spec("torch") is not None
        self.mpi = self.has("peer_mpi") and shutil.which("mpirun") is not None
        self.gloo = self.has("peer_gloo")

    def has(self, name):
        return (self.folder / name).exists()

    def missing(self):
        reasons = {"Gloo": (self.gloo, "the build has no peer_gloo (libgloo-dev)"),
                   "Open MPI": (self.mpi, "no mpirun, or the build has no peer_mpi (libopenmpi-dev)"),
                   "PyTorch": (self.torch, "this Python has no torch (.venv/bin/pip install torch numpy)")}
        return [f"{name} is left out: {why}" for name, (there, why) in reasons.items() if not there]

    def own(self, name, *arguments):
        return answer([str(self.folder / name), *map(str, arguments)])

    def torch_ranks(self, *arguments):
        return answer([sys.executable, str(pathlib.Path(__file__).with_name("peer_torch_ranks.py")),
                       *map(str, arguments)])

    def all_reduce(self, peer, ranks, size):
        if peer == "Cairn":
            return self.own("all_reduce", ranks, size, "shm", free_port())
        if peer == "PyTorch":
            return self.torch_ranks("all_reduce", ranks, size)
        if peer == "Open MPI":
            return answer(["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks),
                           str(self.folder / "peer_mpi"), str(size)])
        with tempfile.TemporaryDirectory() as folder:
            return self.own("peer_gloo", ranks, size, folder)


def goal_of(peer, ranks, size):
    if peer == "Open MPI":
        return 1.0 if ranks == 2 and size >= 256 * KIB else None
    return 2.0 if size == 25 * MIB else None


def row(work, pairs, goal):
    """Of a pair a round: Cairn's and the peer's times."""
    ratios = [b["ms"] / a["ms"] for a, b in pairs]
    return {"work": work, "cairn": statistics.median(a["ms"] for a, _ in pairs),
            "peer": statistics.median(b["ms"] for _, b in pairs), "ratio": statistics.median(ratios), "goal": goal,
            "fastest": statistics.median(b["fastest_ms"] / a["fastest_ms"] for a, b in pairs), "ratios": ratios}


def all_reduces(programs, rounds, ranks, label, size):
    """Cairn runs before every peer."""
    peers = [name for name, there in (("Gloo", programs.gloo), ("Open MPI", programs.mpi), ("PyTorch", programs.torch))
             if there]
    pairs = {peer: [] for peer in peers}
    for _ in range(rounds):
        for peer in peers:
            pairs[peer].append((programs.all_reduce("Cairn", ranks, size), programs.all_reduce(peer, ranks, size)))
    return [row(f"all_reduce {label}, {ranks} ranks: {peer}", pairs[peer], goal_of(peer, ranks, size))
            for peer in peers]


def overlap(programs, rounds, model, steps):
    def times(ms, fastest):
        return {"ms": ms, "fastest_ms": fastest}
    longer, delayed, alone, sharded = [], [], [], [[] for _ in SHARDED]
    for _ in range(rounds):
        found = programs.own("ddp_steps", "turns", model, 2, steps, free_port())
        fastest = found["fastest_ms"]
        own = times(found["overlapped_ms"], fastest[0])
        longer.append((own, times(own["ms"] / found["share"], max(fastest[2:4]))))
        delayed.append((own, times(own["ms"] * found["gain"], fastest[1])))
        for stage, share in enumerate(found["sharded_shares"]):
            sharded[stage].append((times(own["ms"] * share, fastest[4 + stage]), own))
        alone.append((times(found["communication_ms"], fastest[3]), times(found["compute_ms"], fastest[2])))
    return [row(f"DDP step, {model}: the longer of compute and communication", longer, OVERLAP),
            row(f"DDP step, {model}: without overlap", delayed, None),
            *(row(f"ShardedDataParallel step, stage {stage + 1}, {model}: DDP", sharded[stage], goal)
              for stage, goal in enumerate(SHARDED)), row(f"communication alone, {model}: compute alone", alone, None)]


def against_torch(programs, rounds, model, steps):
    if not programs.torch:
        return []
    pairs = [(programs.own("ddp_steps", "train", model, 2, 1, steps, free_port()),
              programs.torch_ranks("train", model, 2, steps)) for _ in range(rounds)]
    return [row(f"DDP step, {model}, 2 ranks: PyTorch", pairs, 1.3)]


def sharded_against_torch(programs, rounds):
    """Stage 3 and FSDP2, in which a unit is a block."""
    if not programs.torch:
        return []
    pairs = [(programs.own("ddp_steps", "train", "gpt", 2, 1, 4, free_port(), 3), programs.torch_ranks("fsdp", 2, 4))
             for _ in range(rounds)]
    return [row("ShardedDataParallel step, stage 3, gpt, 2 ranks: PyTorch's FSDP2", pairs, 1.3)]


def against_threads(programs, rounds, model, steps):
    """Ranks against threads; as many samples in a step."""
    pairs = [tuple(programs.own("ddp_steps", "train", model, ranks, 3 - ranks, steps, free_port()) for ranks in (2, 1))
             for _ in range(rounds)]
    return [row(f"DDP step, {model}, 2 ranks of a thread: one process of two", pairs,
                0.95 if model == "convnet" else None)]


def control(programs, rounds):
    allowed = {"ms": CONTROL_MS, "fastest_ms": CONTROL_MS}
    found = [programs.own("ddp_steps", "control", free_port())["ms"] for _ in range(rounds)]
    return [row("control plane, a step of 10 ms: 1 % of it", [({"ms": ms, "fastest_ms": ms}, allowed) for ms in found],
                1.0)]


def pipeline(programs, rounds, schedule, micro_batches):
    """Three stages that sleep 10 ms forward and 10 ms backward, against the time in which each is idle for (p
    - 1) / (m + p - 1) of it."""
    ideal = 20.0 * (micro_batches + 2)
    found = [programs.own("ddp_steps", "pipeline", 3, micro_batches, schedule, free_port()) for _ in range(rounds)]
    return [row(f"pipeline {schedule}, 3 ranks, {micro_batches} micro-batches: the formula",
                [(own, {"ms": ideal, "fastest_ms": ideal}) for own in found], None)]


def works(programs, rounds):
    """Names and what measures them."""
    for ranks in (2, 4):
        for label, size in SIZES:
            yield f"all_reduce {label}, {ranks} ranks", lambda r=ranks, l=label, s=size: all_reduces(
                programs, rounds, r, l, s)
    for model, steps in (("convnet", 40), ("gpt", 4)):
        yield f"overlap, {model}", lambda m=model, s=steps: overlap(programs, rounds, m, s)
        yield f"torch, {model}", lambda m=model, s=steps: against_torch(programs, rounds, m, s)
        yield f"threads, {model}", lambda m=model, s=steps: against_threads(programs, rounds, m, s)
    yield "torch, sharded gpt", lambda: sharded_against_torch(programs, rounds)
    yield "control", lambda: control(programs, rounds)
    for schedule in ("gpipe", "1f1b"):
        for micro_batches in (1, 2, 4, 8):
            yield f"pipeline {schedule}, {micro_batches}", lambda s=schedule, m=micro_batches: pipeline(
                programs, rounds, s, m)


def line(found):
    goal = f"{found['goal']:.2f}" if found["goal"] is not None else "-"
    missed = found["goal"] is not None and found["ratio"] < found["goal"]
    return f"{found['work']:<66}{found['cairn']:>11.4f}{found['peer']:>11.4f}{found['ratio']:>8.2f}{found['fastest']:>9.2f}{goal:>7}{'  missed' if missed else ''}"


def say(text):
    """On a terminal, what is being measured; the table replaces it."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


def measure(name, run):
    say(f"... {name}")
    try:
        return run()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        say("")
        print(f"{name} failed: {error}", file=sys.stderr)
        return None


def report(works, args, missing, heading):
    """Runs the works that args.only chooses (or lists them), prints a line a figure and writes it to
    args.json. Ends the program; 1: one failed."""
    chosen = [(name, run) for name, run in works if args.only in name]
    if args.list:
        print("\n".join(name for name, _ in chosen))
        sys.exit()
    for note in missing:
        print(note)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {heading.format(args.rounds)}\n")
    print(f"{'work: peer':<66}{'Cairn':>11}{'peer':>11}{'ratio':>8}{'fastest':>9}{'goal':>7}", flush=True)
    rows, failed = [], False
    for name, run in chosen:
        found = measure(name, run)
        failed |= found is None
        rows += found or []
        say("")
        for each in found or []:
            print(line(each), flush=True)
        if args.json:
            pathlib.Path(args.json).write_text("".join(json.dumps(each) + "\n" for each in rows))
    sys.exit(failed)


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench_parallel", description=__doc__)
    parser.add_argument("--programs", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--json",
                        help="file for one line a figure: work, cairn and peer (milliseconds), ratio, goal, the ratio of the fastest repeats, the rounds' ratios")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="",
                        help="works whose name has this in it: all_reduce, '25 MiB, 2 ranks', overlap, torch, threads, control, pipeline ...")
    parser.add_argument("--list", action="store_true", help="names the works")
    args = parser.parse_args()

    programs = Programs(args.programs)
    report(works(programs, args.rounds), args, programs.missing(),
           "milliseconds, medians of {} rounds; ratio: the peer's time over Cairn's")


if __name__ == "__main__":
    main()
