"""From a step to a StepGraph: operations, sizes, lifetimes, times and sites, for real or on fake tensors."""

from lowtide.tracing.stepping import rehearse, trace

__all__ = ["rehearse", "trace"]
