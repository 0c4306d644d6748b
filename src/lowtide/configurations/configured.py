"""A model of a configuration as a workload: built on fake tensors and traced under any setup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor as TorchTensor
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lowtide.configurations import adapters, inputs, reading
from lowtide.errors import LowtideError
from lowtide.estimation.setups import Setup, Tensor, Traced
from lowtide.hardware import Accelerator
from lowtide.tracing import trace

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Step = Callable[[], TorchTensor]


class Configured:
    """A configuration, and what of it is trained. Traces are made once for each trace key."""

    def __init__(
        self,
        config: Any,
        hardware: Accelerator,
        *,
        lora: int = 0,
        targets: tuple[str, ...] = (),
        frozen: tuple[str, ...] = (),
    ) -> None:
        reading.prepare_config(config)
        self.config = config
        self.kind = reading.class_of(config)
        self.feed = inputs.feed_of(config, self.kind)
        self.hardware = hardware
        self.lora, self.targets, self.frozen = lora, targets, frozen
        self.traces: dict[Setup, Traced] = {}

    @property
    def changes(self) -> frozenset[str]:
        """What a setup can change: attention only where the model knows both ways."""
        return frozenset({"batch", "precision"} | ({"length"} if self.feed.length else set()) | self._attention)

    @property
    def _attention(self) -> set[str]:
        return {"attention"} if reading.attention_of(self.kind, None) == "efficient" else set()

    @property
    def longest(self) -> int | None:
        """The positions that the configuration names, for texts."""
        return inputs.longest(self.config) if self.feed.kind.startswith("text") else None

    def attention(self, wanted: str | None) -> str:
        """How attention is computed, by default the better way that the model knows."""
        return reading.attention_of(self.kind, wanted)

    @property
    def name(self) -> str:
        """The class, and what of it is trained."""
        parts = [self.kind.__name__]
        if self.lora:
            parts.append(f"LoRA {self.lora}")
        if self.frozen:
            parts.append(f"without {', '.join(self.frozen)}")
        return ", ".join(parts)

    def length(self, wanted: int) -> int:
        """The length to trace for a wanted one; 0 takes the usual one."""
        return wanted or self.feed.length if self.feed.length else 0

    def precision(self, wanted: str | None) -> str:
        """The precision to trace for a wanted one; by default that of most checkpoints."""
        return wanted or "bfloat16"

    def trace(self, setup: Setup) -> Traced:
        """The step under ``setup`` on fake tensors."""
        key = setup.trace_key
        if key not in self.traces:
            self.traces[key] = self._trace(key)
        return self.traces[key]

    def step(self, setup: Setup, mode: Any = None) -> tuple[Step, nn.Module]:
        """A step and its model: on fake tensors of ``mode``, or real ones with random weights."""
        mixed = setup.precision.endswith("-mixed")
        lower = DTYPES[setup.precision.removesuffix("-mixed")]
        dtype = torch.float32 if mixed else lower
        model = reading.build(self.config, self.kind, dtype, setup.attention, mode)
        length = self.length(setup.length)
        with mode if mode is not None else nullcontext():
            fed = inputs.make(self.config, self.kind, self.feed, setup.batch, length, dtype)
            if self.lora:
                adapters.add_adapters(model, self.lora, self.targets)
        adapters.freeze(model, self.frozen)

        def step() -> TorchTensor:
            around = torch.autocast("cpu", lower) if mixed else nullcontext()
            with as_on_values(), around, _AsOnAccelerator(self.hardware) if mode is not None else nullcontext():
                output = model(**fed)
            return inputs.loss_of(output)

        return step, model

    def _trace(self, setup: Setup) -> Traced:
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            step, model = self.step(setup, mode)
            trained = trained_of(model)
            if setup.accumulation > 1:
                give_gradients(model, mode)
            graph = trace(step, model=model, fake=True, hardware=self.hardware)
        except LowtideError:
            raise
        except Exception as error:  # whatever the model's own code says about sizes it cannot take
            raise reading.ConfigurationError(self._failed(setup, error)) from error
        return Traced(graph, trained, tuple(self._remarks(setup)))

    def _failed(self, setup: Setup, error: Exception) -> str:
        text = str(error).strip().partition("\n")[0]
        most = inputs.longest(self.config)
        positions = f" The configuration has {most} positions." if most is not None and self.feed.length else ""
        return (
            f"{self.kind.__name__} cannot be traced with {setup.text}: {type(error).__name__}: {text}.{positions} Try "
            "another --seq or --attention, or write a factory for it and name it as FILE.py:FUNCTION."
        )

    def _remarks(self, setup: Setup) -> Iterator[str]:
        if self.feed.remark:
            yield self.feed.remark
        most, length = self.longest, self.length(setup.length)
        if most is not None and length > most:
            yield f"the configuration has {most} positions, and {length} tokens are asked for"
        if setup.attention == "plain" and not self._attention:
            yield "the model's code has no fused attention"
        if "CTC" in self.kind.__name__:
            yield "a mean of log-probabilities stands for the CTC loss"
        if setup.precision.endswith("-mixed"):
            yield "autocast as on a CPU: what an accelerator computes in float32 beyond that is not counted"
        if self.lora:
            yield "adapters are float32, as PEFT makes them"


def give_gradients(model: nn.Module, mode: Any) -> None:
    """Let gradients of an earlier batch be there."""
    with mode:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


def trained_of(model: nn.Module) -> tuple[Tensor, ...]:
    """The parameters that are trained, shared ones once."""
    return tuple(
        Tensor(name, tuple(p.shape), p.element_size()) for name, p in model.named_parameters() if p.requires_grad
    )


class _AsOnAccelerator(TorchFunctionMode):
    """Dropout as an accelerator computes it: one byte of mask an element, inside of the kernel in fused attention.

    On a CPU a mask is as large as its input, and attention with dropout is not fused.
    """

    def __init__(self, hardware: Accelerator) -> None:
        super().__init__()
        self.accelerated = hardware.name != "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.rand and args and not args[0]:
            return torch.tensor(1.0)  # decides whether a layer is skipped; a fake number could not
        if not self.accelerated:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            kwargs = {**kwargs, "dropout_p": 0.0}  # the same memory, and then the CPU has a fused kernel as well
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or not p:
            return input
        dropped = torch.native_dropout(input, p, True)[0]
        return input.copy_(dropped) if inplace else dropped


@contextmanager
def as_on_values() -> Iterator[None]:
    """Let transformers choose its mask as it does on real tensors: without padding and packing there is none.

    On fake tensors it cannot look, and would make a mask of length x length that a real step never has.
    """
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *args, **kwargs: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before
