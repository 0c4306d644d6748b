"""Estimates written by hand, for tables and rules that need no trace."""

from __future__ import annotations

from lowtide.estimation import Estimate, Fit, Setup
from lowtide.estimation.estimates import KINDS
from lowtide.estimation.trials import CHECKPOINTING, EIGHT_BIT, SHARDING, SMALLER, Option

GIB = 2**30
SETUP = Setup(batch=4, length=8192, precision="bf16")


def made(gibibytes: float, seconds: float = 1.0, setup: Setup = SETUP) -> Estimate:
    """An estimate with a peak of so many GiB, half of which are activations, on hardware with 80 GiB."""
    peak = round(gibibytes * GIB)
    sizes = dict.fromkeys(KINDS, 0) | {"weights": peak // 4, "activations": peak // 2}
    sizes["optimizer states"] = peak - sum(sizes.values())
    return Estimate(
        setup=setup,
        kinds=tuple(sizes.items()),
        peak_bytes=peak,
        peak_where="in backward of the step (aten.mm.default)",
        low_bytes=round(0.99 * peak),
        high_bytes=round(1.06 * peak),
        memory_bytes=80 * GIB,
        step_seconds=seconds,
        plain_seconds=1.0,
        flops=10**15,
        extra_flops=round((seconds - 1) * 10**15),
        joules=700 * seconds,
        hardware="H100",
    )


def too_large() -> Fit:
    """A step that needs 150 GiB, and what was tried about it."""
    asked = Option((), made(150))
    halves = Setup(batch=2, length=8192, precision="bf16", accumulation=2)
    sharded = Setup(batch=4, length=8192, precision="bf16", sharding="fsdp", ranks=8)
    tried = (
        asked,
        Option((CHECKPOINTING,), made(74, 1.24)),
        Option((SMALLER,), made(90, 1.02, halves)),
        Option((EIGHT_BIT, CHECKPOINTING), made(75, 1.12)),
        Option((SHARDING,), made(70, 1.01, sharded)),
    )
    return Fit("LlamaForCausalLM", asked, tried, ("bytes are those of tensors, within 1 %",))
