"""PyTorch's side of scripts/bench_parallel: ranks are processes of this host in a gloo group, one thread each.

peer_torch_ranks.py all_reduce RANKS BYTES    an all_reduce of f32 (sum, in place)
peer_torch_ranks.py train MODEL RANKS STEPS   a step of DistributedDataParallel with fused AdamW; convnet: 100 images a rank, the better of the
                                              two storage orders; gpt: 6 layers of 384, two rows of 256 tokens a rank; f32
peer_torch_ranks.py fsdp RANKS STEPS          the gpt's with FSDP2 in its place: fully_shard of each block and of the model
Prints a JSON line: rank 0's median and fastest run in milliseconds.
"""
import json
import multiprocessing
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from peer_torch import ConvNet, Gpt, training


def times(run, repeats):
    for _ in range(2):
        run()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        taken.append(1000 * (time.perf_counter() - begin))
    taken.sort()
    return {"ms": taken[len(taken) // 2], "fastest_ms": taken[0]}


def all_reduce(size):
    os.sched_setaffinity(0, {dist.get_rank() % os.cpu_count()})
    x = torch.zeros(int(size) // 4)
    return times(lambda: dist.all_reduce(x), min(2000, max(5, (256 << 20) // int(size))))


def convnet_step(memory_format):
    model = ConvNet().to(memory_format=memory_format)
    x = torch.randn(100, 1, 28, 28).to(memory_format=memory_format)
    return training(DistributedDataParallel(model), x, torch.arange(100) % 10, torch.float32)


def gpt_step(distribute):
    x, y = torch.randint(0, 256, (2, 256)), torch.randint(0, 256, (2, 256))
    return training(distribute(Gpt(256, 256, 384, 6, 6)), x, y, torch.float32)


def sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp(steps):
    return times(gpt_step(sharded), int(steps))


def train(model, steps):
    if model == "gpt":
        return times(gpt_step(DistributedDataParallel), int(steps))
    orders = torch.channels_last, torch.contiguous_format
    return min((times(convnet_step(order), int(steps)) for order in orders), key=lambda t: t["ms"])


def work(kind, rank, ranks, meeting, arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    found = {"all_reduce": all_reduce, "train": train, "fsdp": fsdp}[kind](*arguments)
    dist.barrier()
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main():
    kind, *arguments = sys.argv[1:]
    ranks = int(arguments.pop(1 if kind == "train" else 0))
    with tempfile.TemporaryDirectory() as folder:
        forked = multiprocessing.get_context("fork")
        children = [forked.Process(target=work, args=(kind, rank, ranks, folder + "/meeting", arguments))
                    for rank in range(ranks)]
        for child in children:
            child.start()
        for child in children:
            child.join()
    sys.exit(any(child.exitcode for child in children))


if __name__ == "__main__":
    main()
