"""The exceptions and warnings that lowtide raises, all below one base class."""

from __future__ import annotations

__all__ = [
    "AttachError",
    "GraphError",
    "InfeasibleBudget",
    "LowtideError",
    "PlanMismatch",
    "PolicyError",
    "RecomputeWarning",
    "ReplayMismatch",
    "RootChanged",
    "UnitError",
    "UnknownHardware",
]


class LowtideError(Exception):
    """Base class of every error that lowtide raises on purpose."""


class UnitError(LowtideError, ValueError):
    """A text that should be an amount of bytes or seconds is not one."""


class PolicyError(LowtideError, ValueError):
    """A policy cannot be applied to this model, for example because its pattern names no module."""


class RootChanged(LowtideError, RuntimeError):
    """A tensor that a recomputation reads was modified in place between forward and backward."""


class ReplayMismatch(LowtideError, RuntimeError):
    """A recomputed value differs from the one that the forward pass computed."""


class InfeasibleBudget(LowtideError, ValueError):
    """No plan fits the budget; the message names the smallest budget that one fits."""


class UnknownHardware(LowtideError, ValueError):
    """A name, or a file of measured numbers, does not describe hardware that lowtide knows."""


class PlanMismatch(LowtideError, ValueError):
    """A plan was made for a model with other modules; the message names the first difference."""


class RecomputeWarning(UserWarning):
    """Something was kept although the policy wanted it recomputed, because recomputing it is not safe."""


class GraphError(LowtideError, ValueError):
    """A step cannot be traced, or a saved graph or plan cannot be read."""


class AttachError(LowtideError, ValueError):
    """A model cannot be attached: it is attached already, or it is not clear what to do with it."""
