"""Run a program once and take down all that can be seen of it, so that two runs can be compared bit for bit.

```
setup ─> [ step: forward ─> dirty memory ─> backward ─> between ] once or twice ─> look
```
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import support
from .programs import Conduct
from .recorders import Recorder

Bits: TypeAlias = tuple[object, ...]
Observation: TypeAlias = dict[str, Bits]
Setup: TypeAlias = Callable[[], tuple[dict[str, Any], list[Any], torch.Generator]]
Step: TypeAlias = Callable[..., tuple[Tensor, list[Any]]]

NAMES = {
    "torch": torch,
    "F": F,
    "nn": nn,
    "random": random,
    **{n: getattr(support, n) for n in support.__all__},
}


def bits(value: Any) -> Bits:
    """Take down everything about a value that could differ, tensors byte by byte."""
    if not isinstance(value, Tensor):
        return ("value", type(value).__name__, repr(value))
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1).clone(memory_format=torch.contiguous_format)  # one number may have any stride
    raw = b"" if plain.numel() == 0 else flat.view(torch.uint8).numpy().tobytes()
    steps = tuple(step for step, size in zip(value.stride(), value.shape, strict=True) if size > 1)
    layout = (
        value.dtype,
        tuple(value.shape),
        steps,
        value.requires_grad,
        value.is_conj(),
        value.is_neg(),
    )
    return (*layout, raw)


def look(name: str, value: Any) -> Iterator[tuple[str, Bits]]:
    """Take down one thing a program left: a tensor with its gradient, or a module with all it holds."""
    if isinstance(value, nn.Module):
        for kind in (value.named_parameters, value.named_buffers):
            for inner, tensor in kind():
                yield from look(f"{name}.{inner}", tensor)
        yield f"{name} calls", bits(getattr(value, "calls", None))
        for i, item in enumerate(getattr(value, "items", [])):
            yield f"{name}.items[{i}]", bits(item)
        return
    yield name, bits(value)
    if isinstance(value, Tensor) and (value.is_leaf or value.retains_grad):
        yield f"{name}.grad", bits(value.grad)


def compiled(source: str) -> tuple[Setup, Step]:
    """Compile a program's text, line numbers included."""
    name = f"<program {hash(source) & 0xFFFFFFFF:x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    names = dict(NAMES)
    exec(compile(source, name, "exec"), names)
    return names["setup"], names["step"]


def learnable(state: dict[str, Any]) -> Iterator[Tensor]:
    """Go through all leaves and parameters that require grad."""
    for value in state.values():
        tensors = value.parameters() if isinstance(value, nn.Module) else [value]
        yield from (t for t in tensors if isinstance(t, Tensor) and t.requires_grad)


def pass_between(state: dict[str, Any], between: str) -> None:
    """Do what lies between two steps."""
    if between == "evaluate":
        for value in state.values():
            if isinstance(value, nn.Module):
                value.eval()
    if between in ("descend", "clear"):
        for leaf in learnable(state):
            if between == "descend" and leaf.grad is not None:
                leaf.detach().sub_(leaf.grad.detach(), alpha=0.05)
            leaf.grad = None


def observe(setup: Setup, step: Step, conduct: Conduct, record: Recorder) -> Observation:
    """Run a program once and take down what it returns and leaves behind."""
    torch.manual_seed(conduct.seed)
    random.seed(conduct.seed)
    state, log, gen = setup()
    seen: Observation = {}
    waiting: list[tuple[Tensor, list[Any]]] = []
    for turn in range(conduct.steps):
        loss, held = step(state, log, gen, turn, record)
        seen[f"loss {turn}"] = bits(loss)
        waiting.append((loss, held))
        del loss, held
        if conduct.interleaved and turn + 1 < conduct.steps:
            continue
        for i, (loss, held) in enumerate(waiting):
            support.dirty_memory()
            if not conduct.inside:
                support.run_backward(loss, conduct.backwards)
            for j, value in enumerate(held):
                seen |= look(f"held {turn} {i} {j}", value)
            del loss, held
        waiting.clear()
        for name, value in state.items():
            seen |= look(f"{name} after step {turn}", value)
        pass_between(state, conduct.between)
    for name, value in [*state.items(), *((f"log {i}", value) for i, value in enumerate(log))]:
        seen |= look(name, value)
    seen["generator"] = bits(gen.get_state())
    seen["default generator"] = bits(torch.get_rng_state())
    seen["python random"] = bits(random.getstate())
    return seen


def differences(expected: Observation, got: Observation) -> list[str]:
    """Name everything that is not the same in both."""
    return [f"{n}: {difference(expected.get(n), got.get(n))}" for n in expected | got if expected.get(n) != got.get(n)]


def difference(expected: Bits | None, got: Bits | None) -> str:
    """Say in a few words how two values differ."""
    if expected is None or got is None or len(expected) != len(got) or expected[:-1] != got[:-1]:
        return f"{expected and expected[:-1]} expected, {got and got[:-1]} found"
    a, b = expected[-1], got[-1]
    if not isinstance(a, bytes) or not isinstance(b, bytes):
        return f"{str(a)[:60]} expected, {str(b)[:60]} found"
    place = next((i for i, (m, n) in enumerate(zip(a, b, strict=False)) if m != n), min(len(a), len(b)))
    return f"bytes differ from byte {place} of {len(a)}"


def numbers(value: Bits) -> Tensor | None:
    """Give back the entries of a tensor that was taken down, flat; None for anything else."""
    raw, dtype = value[-1], value[0]
    if not isinstance(raw, bytes) or not isinstance(dtype, torch.dtype):
        return None
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)


def finite(seen: Observation) -> bool:
    """Say whether every gradient that was taken down holds finite numbers only."""
    grads = [numbers(value) for name, value in seen.items() if name.endswith(".grad")]
    return all(bool(g.isfinite().all()) for g in grads if g is not None)


def far_apart(expected: Observation, got: Observation) -> list[str]:
    """Name everything that differs by more than rounding."""
    return [f"{n}: numbers differ" for n in expected | got if not close(expected.get(n), got.get(n))]


def close(a: Bits | None, b: Bits | None) -> bool:
    """Say whether two values are the same up to rounding."""
    if a == b or a is None or b is None:
        return a == b
    one, other = numbers(a), numbers(b)
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return a[:1] == b[:1] == ("value",) and rounded(a[-1]) == rounded(b[-1])
    tolerance = 0.05 if one.dtype in (torch.bfloat16, torch.float16) else 1e-3
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def rounded(text: object) -> object:
    """Shorten a printed number to what rounding leaves alone."""
    try:
        return f"{float(str(text)):.2g}"
    except ValueError:
        return text
