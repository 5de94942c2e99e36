"""Trains NumPy arrays through Cairn's C interface: f16 weights with f32 masters, a dynamic loss scale, training states.

    CAIRN_C_LIBRARY=.../libcairn_c.so cairn-run --nproc-per-node 2 python3 trainer.py runs/numpy STEPS"""
import ctypes as c
import os
import sys

import numpy as np

ROWS, F16 = 64, 1  # of all processes together; cairn_dtype
lib = c.CDLL(os.environ.get("CAIRN_C_LIBRARY", "libcairn_c.so"))
lib.cairn_last_error.restype = c.c_char_p
np.seterr(over="ignore", invalid="ignore")  # an overflow is the loss scale's


class Tensor(c.Structure):  # cairn_tensor
    _fields_ = [("name", c.c_char_p), ("data", c.c_void_p), ("shape", c.POINTER(c.c_int64)),
                *((name, c.c_int32) for name in ("dims", "dtype", "device_type", "device_index"))]


class StepResult(c.Structure):  # cairn_step_result
    _fields_ = [("applied", c.c_int32), ("gradient_norm", c.c_double), ("clip_coefficient", c.c_double),
                ("reason", c.c_char_p), ("culprit", c.c_char_p)]


def call(name, *arguments):  # cairn_NAME
    if getattr(lib, f"cairn_{name}")(*[word.encode() if isinstance(word, str) else word for word in arguments]) != 0:
        raise RuntimeError(lib.cairn_last_error().decode())


def make(name, *arguments):  # the handle that cairn_NAME gives as its last result
    handle = c.c_void_p()
    call(name, *arguments, c.byref(handle))
    return handle


def tensors(arrays):
    described = [(k.encode(), x.ctypes.data, x.ctypes.shape_as(c.c_int64), x.ndim, F16) for k, x in arrays.items()]
    return (Tensor * len(arrays))(*described)


def backward(w, g, step, rank, ranks, scale):  # this rank's mean loss; the gradients of scale times it go into g
    x = np.random.default_rng(step).normal(size=(ROWS, 8)).astype(np.float16)[rank::ranks]
    hidden = np.maximum(x @ w["w1"] + w["b1"], 0)
    error = (hidden @ w["w2"]).astype(np.float32) - np.sin(x[:, :4].sum(1, keepdims=True, dtype=np.float32))
    slope = (error * np.float32(2 * scale / len(x))).astype(np.float16)
    inner = np.where(hidden > 0, slope @ w["w2"].T, np.float16(0))
    g["w1"][...], g["b1"][...], g["w2"][...] = x.T @ inner, inner.sum(0), hidden.T @ slope
    return float((error**2).mean())


folder, steps = sys.argv[1], int(sys.argv[2])
shapes = {"w1": (8, 64), "b1": (64,), "w2": (64, 1)}
w = {name: np.random.default_rng(size).normal(scale=0.3, size=size).astype(np.float16) for name, size in shapes.items()}
g = {name: np.zeros_like(x) for name, x in w.items()}
group, count, rank, ranks = make("group_from_environment"), c.c_size_t(3), c.c_int32(), c.c_int32()
call("group_ranks", group, c.byref(rank), c.byref(ranks), None, None)
reducer = make("reducer_create", group, None, tensors(g), None, count)
adam = make("optimizer_create", "adamw", "lr=0.01", tensors(w), tensors(g), count)
scaled, state = make("scaled_step_create", adam, "init_scale=1048576", reducer), make("state_create", None, reducer)
call("state_add_weights", state, "model", adam)
for name, part in (("optimizer", adam), ("amp", scaled), ("reducer", reducer)):
    call("state_add", state, name, part)
step, scale, loss, result = c.c_int64(), c.c_double(), c.c_double(), StepResult()
call("state_resume", state, folder, c.byref(step))
while step.value < steps:
    call("scaled_step_scale", scaled, c.byref(scale))
    loss.value = backward(w, g, step.value, rank.value, ranks.value, scale.value)
    for index in (2, 1, 0):
        call("reducer_mark_ready", reducer, c.c_size_t(index))
    call("reducer_wait", reducer)
    call("scaled_step_run", scaled, "max_gradient_norm=1", c.byref(result))
    if not result.applied and rank.value == 0:
        print(result.reason.decode(), file=sys.stderr)
    call("state_save_every", state, c.c_int64(20), folder, c.byref(step))
    call("group_sum", group, c.byref(loss), "loss")
    if rank.value == 0:
        print(f"step {step.value} loss {loss.value / ranks.value:.6f}", flush=True)
for handle in (state, scaled, adam, reducer, group):
    call("free", handle)
