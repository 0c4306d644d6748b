"""lowtide fits a PyTorch training step into the memory you have, with the same results bit for bit."""

from lowtide import errors, policies
from lowtide.checkpointing import checkpoint, checkpoint_sequential
from lowtide.recording import Recording, recomputable, record

__version__ = "0.1.0"

__all__ = [
    "Recording",
    "checkpoint",
    "checkpoint_sequential",
    "errors",
    "policies",
    "recomputable",
    "record",
]
