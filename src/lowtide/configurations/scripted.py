"""A factory in a file as a workload: ``train.py:build`` returns the step and the model.

def build(batch=8, length=1024):            # both optional
    model = Model()
    x = torch.randn(batch, length, 64)
    return lambda: model(x).square().mean(), model          # or (step, model, optimizer)
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.configurations.configured import DTYPES, give_gradients, trained_of
from lowtide.configurations.reading import ConfigurationError
from lowtide.estimation.setups import PRECISIONS, Setup, Traced
from lowtide.hardware import Accelerator
from lowtide.tracing import trace


class Scripted:
    """A factory of a step and its model."""

    def __init__(self, factory: Callable[..., Any], name: str, hardware: Accelerator | None) -> None:
        self.factory = factory
        self.name = name
        self.hardware = hardware
        self.takes = frozenset(inspect.signature(factory).parameters)
        self.traces: dict[Setup, Traced] = {}

    @property
    def changes(self) -> frozenset[str]:
        """What the factory takes, and the precision, which autocast changes around it."""
        return (self.takes & {"batch", "length"}) | {"precision"}

    def length(self, wanted: int) -> int:
        """The length as it is wanted, else the factory's own."""
        return wanted or self._default("length")

    def precision(self, wanted: str | None) -> str:
        """The factory's own dtype, or autocast around it.

        Raises:
            ConfigurationError: other weights are asked for.
        """
        if wanted is not None and PRECISIONS.get(wanted, "").endswith("-mixed"):
            return wanted
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True):
            _, model = self.checked(self.factory())
        own = str(next((p.dtype for p in model.parameters()), torch.float32)).removeprefix("torch.")
        if wanted is not None and PRECISIONS.get(wanted) != own:
            raise ConfigurationError(
                f"{self.name} makes weights of {own}, and a factory is not changed. Leave --dtype out, or take "
                "bf16-mixed or fp16-mixed for autocast around the step."
            )
        return own

    @property
    def longest(self) -> int | None:
        """Nobody says."""
        return None

    @staticmethod
    def attention(wanted: str | None) -> str:
        """A factory decides itself."""
        if wanted == "plain":
            raise ConfigurationError("A factory decides itself how attention is computed; leave --attention out.")
        return "efficient"

    @property
    def batch(self) -> int:
        """The batch that the factory makes by itself; 1 where it does not say."""
        return self._default("batch") or 1

    def step(self, setup: Setup, mode: Any = None) -> tuple[Callable[[], torch.Tensor], nn.Module]:
        """The factory's step and model."""
        del mode
        asked = {"batch": setup.batch, "length": setup.length}
        made = self.factory(**{name: value for name, value in asked.items() if name in self.takes and value})
        own, model = self.checked(made)
        return self.around(own, setup.precision), model

    @staticmethod
    def around(own: Callable[[], torch.Tensor], precision: str) -> Callable[[], torch.Tensor]:
        """The step, under autocast where the precision says so."""
        precision = PRECISIONS[precision]
        if not precision.endswith("-mixed"):
            return own
        lower = DTYPES[precision.removesuffix("-mixed")]

        def step() -> torch.Tensor:
            with torch.autocast("cpu", lower):
                return own()

        return step

    def checked(self, made: Any) -> tuple[Callable[[], torch.Tensor], nn.Module]:
        """The step and the model that the factory returned.

        Raises:
            ConfigurationError: it returned something else.
        """
        if isinstance(made, tuple) and len(made) > 1 and callable(made[0]) and isinstance(made[1], nn.Module):
            return made[0], made[1]
        raise ConfigurationError(
            f"{self.name} returned {type(made).__name__}; it must return (step, model), or (step, model, optimizer): "
            "step() runs the forward pass and returns the loss."
        )

    def trace(self, setup: Setup) -> Traced:
        """The step on fake tensors."""
        key = setup.trace_key
        if key not in self.traces:
            self.traces[key] = self._trace(key)
        return self.traces[key]

    def _trace(self, setup: Setup) -> Traced:
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            step, model = self.step(setup)
        if setup.accumulation > 1:
            give_gradients(model, mode)
        graph = trace(step, model=model, fake=True, hardware=self.hardware)
        return Traced(graph, trained_of(model))

    def _default(self, name: str) -> int:
        parameter = inspect.signature(self.factory).parameters.get(name)
        return parameter.default if parameter is not None and isinstance(parameter.default, int) else 0


def load_factory(file: Path, name: str) -> Callable[..., Any]:
    """The function ``name`` of a Python file, which is run like any module that is imported.

    Raises:
        ConfigurationError: there is no such file or function.
    """
    if not file.is_file():
        raise ConfigurationError(f"{file}: no such file.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent.resolve()))
    factory = getattr(module, name, None)
    if not callable(factory):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigurationError(f"{file} has no function {name!r}; it has {', '.join(own) or 'none'}.")
    return factory  # type: ignore[no-any-return]
