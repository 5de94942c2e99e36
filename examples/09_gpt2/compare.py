"""compare.py MODEL LOGITS [OTHER]: GPT-2 by PyTorch alone, from MODEL/model.safetensors, on the tokens of LOGITS (gpt2 --logits), against the logits there.
Ends with 1 where they differ by more than 1e-4 of the largest. OTHER: a second folder, whose weights must have the same bits. Needs torch and nothing else."""
import json
import math
import struct
import sys

import torch

DTYPES = {"F32": torch.float32, "I64": torch.int64}


def read(path):
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + at for at in entry["data_offsets"])
        tensors[name] = torch.frombuffer(bytearray(data[begin:end]),
                                         dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def gpt2(weights, config, tokens):
    width, heads = config["n_embd"], config["n_head"]
    batch, length = tokens.shape

    def norm(x, name):
        return torch.nn.functional.layer_norm(x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def conv1d(x, name):
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attention(x, name):
        q, k, v = (part.view(batch, length, heads, -1).transpose(1, 2)
                   for part in conv1d(x, f"{name}.c_attn").split(width, dim=2))
        scores = q @ k.transpose(2, 3) / math.sqrt(width // heads)
        scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), float("-inf"))
        return conv1d((scores.softmax(dim=3) @ v).transpose(1, 2).reshape(batch, length, width), f"{name}.c_proj")

    x = weights["wte.weight"][tokens] + weights["wpe.weight"][:length]
    for i in range(config["n_layer"]):
        x = x + attention(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn")
        up = torch.nn.functional.gelu(conv1d(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + conv1d(up, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ weights["wte.weight"].T


def main():
    folder, logits = sys.argv[1:3]
    weights, ours = read(f"{folder}/model.safetensors"), read(logits)
    with open(f"{folder}/config.json") as file:
        config = json.load(file)
    with torch.no_grad():
        theirs = gpt2(weights, config, ours["tokens"])
    differs = ((theirs - ours["logits"]).abs().max() / theirs.abs().max()).item()
    print(f"{len(weights)} tensors; logits differ by {differs:.1e} of the largest")
    good = differs <= 1e-4
    if len(sys.argv) > 3:
        other = read(f"{sys.argv[3]}/model.safetensors")
        names = [name for name in weights if not name.endswith(".attn.bias")]
        changed = [name for name in names if name not in other or not torch.equal(weights[name], other[name])]
        print(f"{len(names) - len(changed)} of {len(names)} tensors have the same bits in {sys.argv[3]}")
        good = good and not changed
    sys.exit(0 if good else 1)


main()
