"""lowtide fits a PyTorch training step into the memory you have, with the same results bit for bit."""

from lowtide import errors, policies
from lowtide.attachment import Handle, attach
from lowtide.checkpointing import checkpoint, checkpoint_sequential
from lowtide.graph import StepGraph
from lowtide.plan import Plan
from lowtide.planning import frontier, solve
from lowtide.recording import Recording, recomputable, record
from lowtide.simulation import Timeline, simulate
from lowtide.tracing import rehearse, trace

__version__ = "0.1.0"

__all__ = [
    "Handle",
    "Plan",
    "Recording",
    "StepGraph",
    "Timeline",
    "attach",
    "checkpoint",
    "checkpoint_sequential",
    "errors",
    "frontier",
    "policies",
    "recomputable",
    "record",
    "rehearse",
    "simulate",
    "solve",
    "trace",
]
