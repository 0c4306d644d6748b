"""What the sweep takes round: the zoo, and whole models in training."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

import test_architectures
import zoo
from harness import Case, Program


@functools.cache
def subjects() -> dict[str, Case]:
    """All cases by name; a model's name begins with "model-"."""
    test_architectures.transformers.utils.logging.set_verbosity_error()
    models = [
        dataclasses.replace(test_architectures.case(name, False), name=f"model-{name}")
        for name in test_architectures.MODELS
    ]
    return {case.name: case for case in (*zoo.CASES, *models)}


def under_autocast(case: Case) -> Case:
    """The same case with its forward under bfloat16 autocast."""

    def build() -> Program:
        program = case.build()
        forward = program.step

        def step() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return forward()

        return dataclasses.replace(program, step=step)

    return dataclasses.replace(case, build=build)
