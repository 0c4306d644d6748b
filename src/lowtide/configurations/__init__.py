"""Where a step comes from: a configuration of transformers, or a factory in a file of yours. Nothing is downloaded."""

from lowtide.configurations.source import workload_of

__all__ = ["workload_of"]
