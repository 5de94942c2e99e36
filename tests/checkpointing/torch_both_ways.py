"""torch_both_ways.py begin|continue adamw|sgd FOLDER: PyTorch's side of model_file_test.cpp.

begin: 5 steps, then begin.pt; 3 more, then then.safetensors with the batch x and target.
continue: reads ours.pt and ours/ (Hugging Face's layout), which must agree; 3 more steps, then end.safetensors.
"""
import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file

what, kind, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
torch.manual_seed(3)
x, target = torch.randn(6, 4), torch.randn(6, 3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Tanh(),
                            torch.nn.Linear(8, 3))
if kind == "adamw":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()


if what == "begin":
    train(5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "begin.pt")
    train(3)
    save_file({**model.state_dict(), "x": x, "target": target}, folder / "then.safetensors")
else:
    ours = torch.load(folder / "ours.pt", weights_only=True)
    mapped = torch.load(folder / "ours.pt", weights_only=True, mmap=True)
    index = json.loads((folder / "ours" / "model.safetensors.index.json").read_text())
    tensors = {name: value for file in set(index["weight_map"].values())
               for name, value in load_file(folder / "ours" / file).items()}
    assert set(tensors) == set(ours["model"]) == set(index["weight_map"])
    for name, value in ours["model"].items():
        assert torch.equal(value, tensors[name]) and torch.equal(value, mapped["model"][name]), name
    model.load_state_dict(ours["model"])
    optimizer.load_state_dict(ours["optimizer"])
    train(3)
    save_file(model.state_dict(), folder / "end.safetensors")
