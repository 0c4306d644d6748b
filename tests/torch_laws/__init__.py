"""What PyTorch's own tests ask of torch.utils.checkpoint, asked of lowtide.checkpoint: a row each, written anew."""

from __future__ import annotations

from torch_laws import calls, gradients, selective
from torch_laws.table import Law

LAWS: list[Law] = [*calls.TABLE, *gradients.TABLE, *selective.TABLE]
