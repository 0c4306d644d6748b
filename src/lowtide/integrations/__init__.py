"""One thin file a framework, imported by name alone: ``from lowtide.integrations.transformers import Lowtide``.

Each has the same two names:

    Lowtide(budget="12 GiB")   what the framework is given: attaches when training begins, detaches when it ends
    take_over(model)           sends the framework's own activation checkpointing to lowtide; returns what undoes it
"""
