"""lowtide fits a PyTorch training step into the memory you have, with the same results bit for bit."""

from lowtide import errors, policies
from lowtide.advice import Advice, advise
from lowtide.attachment import Handle, attach
from lowtide.checkpointing import checkpoint, checkpoint_sequential
from lowtide.graph import StepGraph
from lowtide.measured import Measurement
from lowtide.measurement import measure
from lowtide.plan import Plan
from lowtide.planning import frontier, solve
from lowtide.recording import Recording, recomputable, record
from lowtide.retry import fit_retry
from lowtide.simulation import Timeline, simulate
from lowtide.tracing import rehearse, trace
from lowtide.verdict import Verdict
from lowtide.verification import verify

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "Handle",
    "Measurement",
    "Plan",
    "Recording",
    "StepGraph",
    "Timeline",
    "Verdict",
    "advise",
    "attach",
    "checkpoint",
    "checkpoint_sequential",
    "errors",
    "fit_retry",
    "frontier",
    "measure",
    "policies",
    "recomputable",
    "record",
    "rehearse",
    "simulate",
    "solve",
    "trace",
    "verify",
]
