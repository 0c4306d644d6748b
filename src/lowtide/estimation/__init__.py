"""Will a training step fit, and how: estimates from fake traces, without weights and without an accelerator."""

from lowtide.estimation.estimates import Estimate, estimate, room_bytes
from lowtide.estimation.fitting import Fit, fit
from lowtide.estimation.setups import Setup, Tensor, Traced, Workload

__all__ = ["Estimate", "Fit", "Setup", "Tensor", "Traced", "Workload", "estimate", "fit", "room_bytes"]
