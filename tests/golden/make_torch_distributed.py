#!/usr/bin/env python3
"""Writes torch_distributed/: what torch.distributed.checkpoint saves of a training of four processes, a model and AdamW that FSDP2
divides, a DTensor cut in two dimensions, and what else a state holds. In it, whole.pt: the same values whole, and the weights after one
more step on "x"; overlap.metadata: .metadata with a piece of "grid" one row higher.

Needs torch (made with torch 2.15, CPU):  python tests/golden/make_torch_distributed.py tests/golden/torch_distributed
"""
import copy
import os
import pathlib
import pickle
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 4


def step(model, optimizer, x):
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh())  # of 5 rows, ranks have 2, 2, 1, 0
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    x = torch.randn(4, 3)
    for scale in (1.0, 0.5):
        step(model, optimizer, x * scale)
    grid = torch.arange(35, dtype=torch.float64).reshape(5, 7) / 3
    others = {
        "grid": distribute_tensor(grid, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)]),
        "half": torch.tensor([1.5, -2.25, 1e-3], dtype=torch.bfloat16),
        "order": torch.tensor([[3, 1], [2, 0]]),
        "epoch": 3, "name": "run", "rates": [0.5, 0.25],
    }
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, **others}, checkpoint_id=folder)
    whole = StateDictOptions(full_state_dict=True)
    states = copy.deepcopy(get_state_dict(model, optimizer, options=whole))
    step(model, optimizer, x)
    after = get_state_dict(model, optimizer, options=whole)[0]
    if rank == 0:
        torch.save({"model": dict(states[0]), "optimizer": states[1], **others, "grid": grid, "x": x,
                    "after": dict(after)}, os.path.join(folder, "whole.pt"))
    dist.destroy_process_group()


def move_a_piece(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    old, new = torch.Size([3, 0]), torch.Size([2, 0])
    chunks = metadata.state_dict_metadata["grid"].chunks
    for i, chunk in enumerate(chunks):
        if chunk.offsets == old:
            chunks[i] = ChunkStorageMetadata(new, chunk.sizes)
    metadata.storage_data = {MetadataIndex("grid", new) if (index.fqn, index.offset) == ("grid", old) else index: place
                             for index, place in metadata.storage_data.items()}
    (folder / "overlap.metadata").write_bytes(pickle.dumps(metadata))


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=RANKS)
    move_a_piece(pathlib.Path(sys.argv[1]))
