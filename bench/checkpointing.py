"""Times saves and loads of state files beside dd, safetensors' Python loader and torch.load, and recomputation by the planner beside segments and
PyTorch's, by turns, and prints a table. Each ratio is the peer's time
over Cairn's, of runs that follow each other; the table and the file have the medians over rounds, and the same of each side's fastest."""
import argparse
import importlib.util
import pathlib
import statistics
import sys
import tempfile

import recompute_curve
from parallel import answer, report, say

BLOCKING = 0.05  # of a plain save


def row(work, cairn, peer, goal):
    ratios = [b / a for a, b in zip(cairn, peer)]
    return {"work": work, "cairn": statistics.median(cairn), "peer": statistics.median(peer),
            "ratio": statistics.median(ratios), "goal": goal, "fastest": min(peer) / min(cairn), "ratios": ratios}


class Programs:
    def __init__(self, folder, scratch, mib):
        self.folder, self.scratch, self.mib = pathlib.Path(folder), scratch, mib
        self.torch = importlib.util.find_spec("torch") is not None
        self.safetensors = self.torch and importlib.util.find_spec("safetensors") is not None

    def own(self, *arguments):
        return answer([str(self.folder / "state_files"), *map(str, arguments)])

    def recompute(self, work, rounds):
        return answer([str(self.folder / "recompute_works"), work, str(rounds)])

    def peer(self, *arguments):
        return answer([sys.executable, str(pathlib.Path(__file__).with_name("peer_state_files.py")),
                       *map(str, arguments)])


def save(programs, rounds):
    with tempfile.TemporaryDirectory(dir=programs.scratch) as folder:
        found = programs.own("save", folder, programs.mib, rounds)
    return [row(f"save {programs.mib} MiB: dd with fsync of the same bytes", found["ms"], found["peer_ms"], 0.9)]


def blocking(programs, rounds):
    with tempfile.TemporaryDirectory(dir=programs.scratch) as folder:
        found = programs.own("async", folder, programs.mib, rounds)
    work = f"what a background save of {programs.mib} MiB blocks"
    return [row(f"{work}: a plain save", found["ms"], found["peer_ms"], 1 / BLOCKING),
            row(f"{work}: memcpy of the same bytes by all cores", found["ms"], found["copy_ms"], 0.9)]


def load(programs, rounds, own, file, peer, label, goal):
    """Both sides' files are in the page cache."""
    with tempfile.TemporaryDirectory(dir=programs.scratch) as folder:
        programs.own("files", folder, programs.mib)
        path = pathlib.Path(folder) / file
        pairs = [(programs.own(own, path, 5)["ms"], programs.peer(peer, path, 5)["ms"]) for _ in range(rounds)]
    return [row(f"load {file[6:]}, {programs.mib} MiB: {label}", [min(a) for a, _ in pairs], [min(b) for _, b in pairs],
                goal)]


ENTRIES, TIMES = 1_000_000, 8
MOST_ENTRIES_MS, MOST_HOSTILE_MS = 20_000, 500


def entries(programs, rounds):
    """Time grows with the number of entries: the peer is a state of an eighth of them, eight times."""
    found = {count: [] for count in (ENTRIES // TIMES, ENTRIES)}
    for _ in range(rounds):
        for count, runs in found.items():
            with tempfile.TemporaryDirectory(dir=programs.scratch) as folder:
                runs.append(programs.own("entries", folder, count))
    few, many = found.values()
    rows = []
    for what in ("save", "verify", "resume"):
        times = [run[f"{what}_ms"] for run in many]
        rows.append(row(f"{what} {ENTRIES:,} entries: {TIMES} times an {TIMES}th of them", times,
                        [TIMES * run[f"{what}_ms"] for run in few], 0.7))
        rows.append(row(f"{what} {ENTRIES:,} entries: {MOST_ENTRIES_MS / 1e3:g} s", times,
                        [MOST_ENTRIES_MS] * len(times), 1.0))
    return rows


def hostile(programs, rounds):
    """The slowest of several kinds to be refused."""
    with tempfile.TemporaryDirectory(dir=programs.scratch) as folder:
        times = [programs.own("hostile", folder)["ms"] for _ in range(rounds)]
    return [row(f"refuse a hostile header of 2.6 MB: {MOST_HOSTILE_MS / 1e3:g} s", times,
                [MOST_HOSTILE_MS] * len(times), 1.0)]


SEGMENTS = 5  # sqrt(24 blocks)


def planner(programs, rounds):
    """At equal memory: what segments of square-root length take."""
    found = programs.recompute("equal_memory", rounds)
    own, segments = found["planner"], found["segments"]
    say(f"peak {own['peak'] / 1e6:.1f} MB (predicted {own['predicted_peak'] / 1e6:.1f}), segments {segments['peak'] / 1e6:.1f}, plain "
        f"{found['plain']['peak'] / 1e6:.1f}; predicted {own['predicted_ms']:.1f} ms; {own['report']}\n")
    rows = [row("planner, 24-block GPT: segments in equal memory", own["ms"], segments["ms"], 1 / 0.85)]
    if programs.torch:
        script = str(pathlib.Path(__file__).with_name("peer_recompute.py"))
        peer = answer([sys.executable, script, str(SEGMENTS), str(rounds)])["ms"]
        rows.append(row("planner, 24-block GPT: torch's checkpoint_sequential", own["ms"], peer, 1.2))
    return rows


def thousand_layers(programs, rounds):
    """Chen et al. 2016: 48 GB to 7 GB for 30 % more time."""
    found = programs.recompute("thousand_layers", rounds)
    plain, planner, segments = found["plain"], found["planner"], found["segments"]
    say(f"1,000 layers: {plain['peak'] / 1e6:.1f} MB plain (predicted {plain['predicted_ms']:.1f} ms), {planner['peak'] / 1e6:.1f} MB planned (predicted "
        f"{planner['predicted_peak'] / 1e6:.1f} and {planner['predicted_ms']:.1f} ms), {segments['peak'] / 1e6:.1f} MB in segments, {found['standing'] / 1e6:.1f} MB stand; planned in {planner['planning_ms'] / 1e3:.1f} s\n")
    return [row("1,000 layers by the planner in 7/48: plain", planner["ms"], plain["ms"], 1 / 1.3),
            row("1,000 layers in sqrt(n) segments: plain", segments["ms"], plain["ms"], 1 / 1.3)]


def curve(programs, rounds, path):
    """Draws time against budget, and prints what was predicted and measured."""
    found = programs.recompute("curve", rounds)
    for point in found["points"]:
        say(f"budget {point['budget'] / 1e6:.1f} MB: peak {point['peak'] / 1e6:.1f} (predicted {point['predicted_peak'] / 1e6:.1f}), "
            f"{statistics.median(point['ms']):.1f} ms (predicted {point['predicted_ms']:.1f})\n")
    pathlib.Path(path).write_text(recompute_curve.draw(found))


def works(programs, rounds):
    """Names and what measures them: a list of rows each."""
    yield "planner", lambda: planner(programs, rounds)
    yield "thousand layers", lambda: thousand_layers(programs, rounds)
    yield "save", lambda: save(programs, rounds)
    yield "entries", lambda: entries(programs, min(rounds, 2))
    yield "hostile header", lambda: hostile(programs, rounds)
    yield "blocking", lambda: blocking(programs, rounds)
    if programs.safetensors:
        yield "load safetensors", lambda: load(programs, rounds, "load", "state.safetensors", "safetensors",
                                               "safetensors.torch.load_file", 1.0)
    if programs.torch:
        yield "load torch", lambda: load(programs, rounds, "load_torch", "state.pt", "torch", "torch.load", 1.5)


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench_checkpointing", description=__doc__)
    parser.add_argument("--programs", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--json",
                        help="file for one line a figure: work, cairn and peer (milliseconds), ratio, goal, the ratio of the fastest, the rounds' ratios")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="of the state")
    parser.add_argument("--folder", default=".", help="on the disk that is measured")
    parser.add_argument("--only", default="", help="works whose name has this in it: save, blocking, load ...")
    parser.add_argument("--list", action="store_true", help="names the works")
    parser.add_argument("--curve", metavar="FILE.svg",
                        help="draws a step's time against its budget, and does nothing else")
    args = parser.parse_args()

    programs = Programs(args.programs, args.folder, args.mib)
    if args.curve:
        return curve(programs, args.rounds, args.curve)
    missing = [] if programs.safetensors else ["loaders of Python's are left out: .venv/bin/pip install torch numpy safetensors"]
    report(works(programs, args.rounds), args, missing,
           "milliseconds, medians of {} rounds; ratio: the peer's time over Cairn's")


if __name__ == "__main__":
    main()
