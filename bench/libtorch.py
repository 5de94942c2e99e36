"""Times libtorch with Cairn beside libtorch alone and PyTorch, by turns, and prints a table. Each ratio is the peer's over Cairn's (milliseconds; of memory: MB), taken
between runs that follow each other; the table and the file have medians over rounds."""
import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

from parallel import answer, free_port, report, row


class Programs:
    def __init__(self, folder):
        self.steps = str(pathlib.Path(folder) / "libtorch_steps")
        self.torch = importlib.util.find_spec("torch") is not None

    def own(self, *arguments):
        return answer([self.steps, *map(str, arguments)])

    def python(self, program, *arguments):
        return answer([sys.executable, str(pathlib.Path(__file__).with_name(program)), *map(str, arguments)])

    def ranks(self, size, *arguments):
        """Rank 0's answer."""
        port, children = free_port(), []
        for rank in range(size):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                           "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                           "OMP_NUM_THREADS": "1", "CAIRN_LOG": "warn"}
            children.append(subprocess.Popen([self.steps, "ranks", *map(str, arguments)], stdout=subprocess.PIPE,
                                             text=True, env=environment))
        answers = [child.communicate(timeout=300)[0] for child in children]
        if any(child.returncode for child in children):
            raise RuntimeError("a rank failed")
        return json.loads(answers[0].strip().splitlines()[-1])


def works(programs, rounds):
    """Names and what measures them."""
    def pairs(name, own, peer, goal):
        return name, lambda: [row(name, [(own(), peer()) for _ in range(rounds)], goal)]

    yield pairs("update, 124M, cairn: torch::optim::AdamW", lambda: programs.own("update", "cairn"),
                lambda: programs.own("update", "torch"), 8.0)
    for net, steps in (("convnet", 60), ("resnet", 6)):
        yield pairs(f"step at O0, {net}: libtorch alone", lambda n=net, s=steps: programs.own("step", "cairn", n, s),
                    lambda n=net, s=steps: programs.own("step", "torch", n, s), 1 / 1.02)
    for net, what, goal in (("tall", "activations", 1.6), ("wide", "weights", 1.0)):
        yield pairs(f"memory of O2, mostly {what}: of O0", lambda n=net: programs.own("memory", n, "O2"),
                    lambda n=net: programs.own("memory", n, "O0"), goal)
    if not programs.torch:
        return
    # a check reads the gradients: 4 bytes more than PyTorch's 28
    for name, goal in (("cairn", 1.1), ("checked", 0.96)):
        yield pairs(f"update, 124M, {name}: PyTorch's fused AdamW", lambda n=name: programs.own("update", n),
                    lambda: programs.python("peer_torch_libtorch.py", "update"), goal)
    yield pairs("step, convnet, 2 ranks: PyTorch's DDP", lambda: programs.ranks(2, "convnet", 40),
                lambda: programs.python("peer_torch_ranks.py", "train", "convnet", 2, 40), 1.2)
    yield pairs("recomputation: PyTorch's checkpoint", lambda: programs.own("recompute", 10),
                lambda: programs.python("peer_torch_libtorch.py", "recompute", 10), 1.0)


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench_libtorch", description=__doc__)
    parser.add_argument("--programs", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--json",
                        help="file for one line a figure: work, cairn and peer, ratio, goal, the ratio of the fastest repeats, the rounds' ratios")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="",
                        help="works whose name has this in it: update, step, memory, recomputation ...")
    parser.add_argument("--list", action="store_true", help="names the works")
    args = parser.parse_args()

    programs = Programs(args.programs)
    missing = [] if programs.torch else ["PyTorch is left out: this Python has no torch (.venv/bin/pip install torch numpy)"]
    report(works(programs, args.rounds), args, missing, "medians of {} rounds; ratio: the peer's over Cairn's")


if __name__ == "__main__":
    main()
