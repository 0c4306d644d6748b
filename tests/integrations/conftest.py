"""timm and torchvision lie in a folder of their own, see `./run integrations`: make them importable in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

VISION = Path(sys.prefix) / "vision"

if VISION.is_dir():
    sys.path.append(str(VISION))
    # Wheels of torchvision link CUDA; on a CPU build its operators are missing, and importing it looks for two of them.
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
