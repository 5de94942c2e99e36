#!/usr/bin/env python3
"""Writes deepspeed_universal/: universal checkpoints that DeepSpeed's own ds_to_universal made of trainings of two processes of its engine.
stage2: f32, a batch norm, a frozen weight, a weight of two sub-parameters. stage3_f16: two parameter groups, tied weights and a dynamic loss
scale (DeepSpeed asks the CPU whether it is fast at f16 and would refuse; the script says yes in its place). after.pt beside each: the weights
after one more step on "x", DeepSpeed's own, and of stage 3, whose f16 rounds it, torch's in f32.

Needs torch and deepspeed (made with torch 2.15 and deepspeed 0.19.8, CPU):
    python tests/golden/make_deepspeed_universal.py tests/golden/deepspeed_universal
"""
import argparse
import os
import pathlib
import shutil
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import constants, ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

RANKS = 2
ADAMW = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
MOMENTS = ("exp_avg", "exp_avg_sq")
VERSION = {constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE}


class Stage2:
    config = {"zero_optimization": {"stage": 2, "round_robin_gradients": False}}
    info = {**VERSION,
            constants.PARAMETER_WITH_SUB_PARAMS: [{"patterns": ["1.weight"], "shape": ((2, 3), 3), "partition_dim": 0}],
            constants.SUB_PARAM_SHARD_WIDTHS: {"1.weight": [[2], [3]]}}
    scales = (1.0, 0.5)

    @staticmethod
    def model():
        model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 5), nn.Linear(5, 2))
        model[2].weight.requires_grad_(False)
        return model

    @staticmethod
    def groups(model):
        return [{"params": [model[1].weight, model[1].bias, model[2].bias]}]


class Stage3F16:
    config = {"zero_optimization": {"stage": 3},
              "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
    info = VERSION
    scales = (1.0, 0.5, 0.25, 1.0)

    @staticmethod
    def model():
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3, bias=False))
        model[2].weight = model[0].weight
        return model

    @staticmethod
    def groups(model):
        return [{"params": [model[0].weight]}, {"params": [model[0].bias], "weight_decay": 0.0, "lr": 2e-2}]


def engine_of(kind):
    torch.manual_seed(7)
    model = kind.model()
    optimizer = torch.optim.AdamW(kind.groups(model), **ADAMW)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
              **kind.config}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def step(engine, x):
    engine.backward(engine(x.to(next(engine.module.parameters()).dtype)).square().sum())
    engine.step()


def join(rank, port):
    accelerator = type(get_accelerator())
    accelerator.is_fp16_supported = lambda self: True
    accelerator.supported_dtypes = lambda self: [torch.float32, torch.float16, torch.bfloat16]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(RANKS),
                      LOCAL_RANK=str(rank), LOCAL_SIZE=str(RANKS))
    deepspeed.init_distributed("gloo")
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(5))


def train(rank, kind, folder):
    x = join(rank, "29573")
    engine = engine_of(kind)
    for scale in kind.scales:
        step(engine, x * scale)
    engine.save_checkpoint(folder, tag="steps",
                           client_state={"epoch": 3, constants.UNIVERSAL_CHECKPOINT_INFO: kind.info})
    step(engine, x)
    if rank == 0 and kind is Stage2:
        save(engine.module, x, folder)
    dist.destroy_process_group()


def save(model, x, folder):
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    torch.save({"x": x, "after": weights}, os.path.join(folder, "after.pt"))


def step_of_torch(kind, folder):
    """One that begins with the f32 weights that DeepSpeed puts together of its ranks' files."""
    x = torch.load(folder.parent / "stage2" / "after.pt")["x"]
    model = kind.model()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), "steps"))
    optimizer = torch.optim.AdamW(kind.groups(model), **ADAMW)
    for name, weight in model.named_parameters():
        moments = {moment: torch.load(folder / "steps_universal" / "zero" / name / f"{moment}.pt").view(weight.shape)
                   for moment in MOMENTS}
        optimizer.state[weight] = {"step": torch.tensor(float(len(kind.scales))), **moments}
    model(x).square().sum().backward()
    optimizer.step()
    save(model, x, folder)


def make(kind, folder):
    shutil.rmtree(folder, ignore_errors=True)
    mp.spawn(train, (kind, str(folder)), nprocs=RANKS)
    ds_to_universal.main(argparse.Namespace(input_folder=str(folder / "steps"),
                                            output_folder=str(folder / "steps_universal"), num_extract_workers=1,
                                            num_merge_workers=1, keep_temp_folder=False, strict=True,
                                            inject_missing_state=False))
    if kind is Stage3F16:
        step_of_torch(kind, folder)
    shutil.rmtree(folder / "steps")
    for left in ("latest", "zero_to_fp32.py", "zero_to_torch.py"):
        (folder / left).unlink()


if __name__ == "__main__":
    make(Stage2, pathlib.Path(sys.argv[1]) / "stage2")
    make(Stage3F16, pathlib.Path(sys.argv[1]) / "stage3_f16")
