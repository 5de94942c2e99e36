"""The cost model of docs/parallel.md, and from it the predicted efficiency of data-parallel training up to 1,024 devices.

scaling.py [--png FILE]: prints the table, and draws it (needs matplotlib). Every point is a prediction; what its numbers rest on is below.
"""
import argparse
import math

US, MIB = 1e-6, 1 << 20
BUCKET = 25 * MIB
BACKWARD = 2 / 3  # of a step's computation, beside which buckets travel


class Link:
    """A message of x bytes takes alpha + x beta; a rank has one such link, which all its messages share."""

    def __init__(self, alpha, bytes_per_second):
        self.alpha, self.beta = alpha, 1 / bytes_per_second


def direct(n, size, link, segment=4 * MIB, piece=64 << 10):
    """Cairn's own all_reduce over a mesh: pieces to who combines them, results to all, segment by segment.
    beta has the combining in it."""
    segments = math.ceil(size / max(segment, n * piece))
    return segments * 2 * (n - 1) * link.alpha + 2 * (n - 1) / n * size * link.beta


def tree(n, size, link):
    """NCCL's double binary tree, pipelined: twice the tensor through each link."""
    return 2 * math.log2(n) * link.alpha + 2 * size * link.beta


def ring(n, size, link):
    return 2 * (n - 1) * link.alpha + 2 * (n - 1) / n * size * link.beta


def nccl(n, size, inner, outer, host=8):
    """Rings or trees over hosts, whichever is faster; inside a host, a ring."""
    if n <= host:
        return ring(n, size, inner)
    hosts = n // host
    return ring(host, size, inner) + min(f(hosts, size / host, outer) for f in (ring, tree))


def step(n, compute, gradient_bytes, all_reduce):
    """Seconds of a step: what does not fit beside the backward comes after it, at least the last bucket does."""
    if n == 1:
        return compute
    buckets = math.ceil(gradient_bytes / BUCKET)
    each = all_reduce(n, gradient_bytes / buckets)
    return compute + max(each, buckets * each - BACKWARD * compute)


# Measured here (docs/performance.md): Gloo's connections over loopback. A network adds to alpha and bounds beta.
LOOPBACK = Link(35 * US, 1.1e9)
# Assumed: 25 Gbit/s Ethernet and a switch between hosts; NVLink 4 and 400 Gbit/s InfiniBand a GPU, as NCCL uses them.
ETHERNET = Link(LOOPBACK.alpha + 10 * US, min(1 / LOOPBACK.beta, 25e9 / 8))
NVLINK, INFINIBAND = Link(3 * US, 370e9), Link(10 * US, 45e9)

JOBS = {  # seconds of computation a step, bytes of gradients, all_reduce
    "GPT of 10.7M, f32, 2,048 tokens a host of 2 cores, Gloo over 25 Gbit/s": (0.58, 42.9e6, lambda n, size: direct(n, size, ETHERNET)),
    "the same, segments of 4 MiB whatever the ranks": (0.58, 42.9e6, lambda n, size: direct(n, size, ETHERNET, piece=0)),
    "GPT-2 of 163M, O2, 16,384 tokens a GPU (step foreseen), NCCL": (0.036, 326e6, lambda n, size: nccl(n, size, NVLINK, INFINIBAND)),
}
DEVICES = [2**k for k in range(11)]


def efficiency(job, n):
    compute, size, all_reduce = JOBS[job]
    return compute / step(n, compute, size, all_reduce)


def draw(path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=110)
    for (job, style) in zip(JOBS, ("o-", "o--", "s-")):
        axes.plot(DEVICES, [100 * efficiency(job, n) for n in DEVICES], style, label=job, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(DEVICES, [f"{n:,}" for n in DEVICES])
    axes.set(ylim=(0, 105), xlabel="devices", ylabel="% of linear speed-up",
             title="Prediction, not a measurement: weak scaling from the cost model")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", help="where to draw it")
    args = parser.parse_args()
    print("predicted % of linear speed-up\n" + f"{'devices':<76}" + "".join(f"{n:>6}" for n in DEVICES))
    for job in JOBS:
        print(f"{job:<76}" + "".join(f"{100 * efficiency(job, n):>6.0f}" for n in DEVICES))
    if args.png:
        draw(args.png)


if __name__ == "__main__":
    main()
