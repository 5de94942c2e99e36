#!/usr/bin/env python3
"""Writes rnn.safetensors: PyTorch's recurrent layers and cells with their gradients, as values for tests/nn.

Needs torch and safetensors (made with torch 2.x, CPU):  python tests/golden/make_rnn.py
Entries of layers NAME: x, h0, c0 (LSTM), y, h, c, dx, dh0, dc0, parameter.*, gradient.*; of packed ones the same, run with the
lengths 6, 4, 1. The loss is sum(y * wy) + sum(h * wh) + sum(c * wh). Cells the same without y.
"""
import pathlib

import torch
from safetensors.torch import save_file
from torch import nn

torch.manual_seed(12)
T, B, I, H = 6, 3, 5, 4
LENGTHS = torch.tensor([6, 4, 1])
out = {}


def leaf(*shape):
    return torch.randn(*shape).requires_grad_()


def keep(name, values):
    out.update({f"{name}.{key}": value.detach().clone() for key, value in values.items() if value is not None})


def finish(name, module, loss, inputs, values):
    loss.backward()
    keep(name, values | inputs | {f"d{key}": x.grad for key, x in inputs.items()})
    keep(name, {f"parameter.{key}": p for key, p in module.named_parameters()})
    keep(name, {f"gradient.{key}": p.grad for key, p in module.named_parameters()})


def layer(name, module, packed=False):
    lstm = isinstance(module, nn.LSTM)
    directions = 2 if module.bidirectional else 1
    inputs = {"x": leaf(T, B, I), "h0": leaf(module.num_layers * directions, B, H)}
    if lstm:
        inputs["c0"] = leaf(module.num_layers * directions, B, H)
    x = nn.utils.rnn.pack_padded_sequence(inputs["x"], LENGTHS) if packed else inputs["x"]
    y, state = module(x, (inputs["h0"], inputs["c0"]) if lstm else inputs["h0"])
    if packed:
        y, _ = nn.utils.rnn.pad_packed_sequence(y, total_length=T)
    h, c = state if lstm else (state, None)
    wy, wh = torch.randn_like(y), torch.randn_like(h)
    loss = (y * wy).sum() + (h * wh).sum() + ((c * wh).sum() if lstm else 0)
    finish(name, module, loss, inputs, {"y": y, "h": h, "c": c, "wy": wy, "wh": wh})


def cell(name, module):
    lstm = isinstance(module, nn.LSTMCell)
    inputs = {"x": leaf(B, I), "h0": leaf(B, H)} | ({"c0": leaf(B, H)} if lstm else {})
    state = module(inputs["x"], (inputs["h0"], inputs["c0"]) if lstm else inputs["h0"])
    h, c = state if lstm else (state, None)
    wh = torch.randn_like(h)
    finish(name, module, (h * wh).sum() + ((c * wh).sum() if lstm else 0), inputs, {"h": h, "c": c, "wh": wh})


for name, kind in {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}.items():
    layer(f"{name}_1", kind(I, H))
    layer(f"{name}_2", kind(I, H, num_layers=2))
    layer(f"{name}_2_bi", kind(I, H, num_layers=2, bidirectional=True))
    layer(f"{name}_2_bi_packed", kind(I, H, num_layers=2, bidirectional=True), packed=True)
layer("rnn_relu", nn.RNN(I, H, nonlinearity="relu"))
layer("lstm_plain", nn.LSTM(I, H, bias=False))
cell("rnn_cell", nn.RNNCell(I, H))
cell("rnn_relu_cell", nn.RNNCell(I, H, nonlinearity="relu"))
cell("gru_cell", nn.GRUCell(I, H))
cell("lstm_cell", nn.LSTMCell(I, H))

save_file({name: value.contiguous() for name, value in out.items()},
          pathlib.Path(__file__).with_name("rnn.safetensors"))
