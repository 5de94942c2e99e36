"""Writes golden.safetensors with the reference implementation: pip install numpy torch safetensors; python make_golden.py"""
import torch
from safetensors.torch import save_file

save_file(
    {
        "weight": torch.tensor([[1.5, -2.25, 3.0], [0.0, float("inf"), -1e-30]], dtype=torch.float32),
        "half": torch.tensor([1.0, -65504.0, 6e-8], dtype=torch.float16),
        "brain": torch.tensor([[1.0], [3.140625]], dtype=torch.bfloat16),
        "double": torch.tensor(0.1, dtype=torch.float64),
        "count": torch.tensor([-(2**62), 7], dtype=torch.int64),
        "index": torch.tensor([-5, 2**31 - 1], dtype=torch.int32),
        "bytes": torch.tensor([0, 255, 17], dtype=torch.uint8),
        "flags": torch.tensor([True, False], dtype=torch.bool),
        "empty": torch.zeros((0, 4), dtype=torch.float32),
    },
    "golden.safetensors",
    metadata={"made_by": "safetensors.torch"},
)
