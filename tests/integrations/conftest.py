"""What the installed packages need so that they can be imported on a CPU build of torch."""

from __future__ import annotations

import importlib.util

import torch

if importlib.util.find_spec("torchvision") is not None:
    # Wheels of torchvision link CUDA; on a CPU build its operators are missing, and importing it looks for two of them.
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
