"""Run a program plainly and under a context, and compare all that can be seen of the two, bit for bit.

```
build ─> [ enter ─ forward ─ (exit) ─ after_forward ─ dirty memory ─ backward ─ (exit) ─ after_step ─ look ]
         └──────────────────────────────────── once a step ────────────────────────────────────────────────┘
```

A `Program` is one freshly built training step, a `Case` knows how to build it, an `Observation` is everything
the program left behind. Two observations are equal only if every bit is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

MakeContext = Callable[[], AbstractContextManager[Any]]

# Bytes: the sizes of the zoo's tensors and the malloc bins around them, several blocks of each small one.
SMALL_BLOCKS = [size for size in range(64, 4_097, 64) for _ in range(4)]
LARGE_BLOCKS = [*range(4_608, 16_385, 512), *(2**k for k in range(15, 22))]
GARBAGE = 255  # as a byte; NaN in every floating dtype, -1 in every integer one


def _backward(loss: Tensor) -> None:
    if loss.requires_grad:
        loss.backward()


def _nothing() -> None:
    return None


@dataclasses.dataclass
class Program:
    """One training step, freshly built.

    `step` runs the forward and returns the loss; `backward` does the rest. `leaves` are the tensors beside
    the model's parameters whose values and gradients count. `python_state` returns anything countable.
    `after_forward` runs between forward and backward (it may overwrite things), `after_step` at the end.
    """

    step: Callable[[], Tensor]
    model: nn.Module | None = None
    leaves: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    python_state: Callable[[], object] = _nothing
    backward: Callable[[Tensor], object] = _backward
    after_forward: Callable[[], object] = _nothing
    after_step: Callable[[], object] = _nothing


@dataclasses.dataclass(frozen=True)
class Case:
    """A named program and what may be asked of it.

    `blocks` is a module pattern where the program repeats itself. `needs_proof`: memory is written behind the
    dispatcher's back, so only a proof can notice. `fails`: the plain step raises in backward, and so must any
    other. `may_refuse`: an error is a fair answer, wrong numbers are not. `around` wraps the whole run.
    """

    name: str
    build: Callable[[], Program]
    blocks: str | None = None
    needs_proof: bool = False
    fails: bool = False
    may_refuse: bool = False
    around: MakeContext = contextlib.nullcontext

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Observation:
    """Everything one run left behind, by name, in the order in which it is compared."""

    seen: Mapping[str, object]
    error: Exception | None = None


_inner: list[MakeContext] = [contextlib.nullcontext]


def inner() -> AbstractContextManager[Any]:
    """Make a second context of the kind under test; programs that nest recordings call it in their step."""
    return _inner[-1]()


@contextlib.contextmanager
def _seeded(seed: int, make_context: MakeContext) -> Iterator[None]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    _inner.append(make_context)
    try:
        yield
    finally:
        _inner.pop()


def observe(case: Case, make_context: MakeContext, *, backward_inside: bool = False, steps: int = 2) -> Observation:
    """Build the case's program and run `steps` steps of it, entering one context anew for each.

    The context is made once, so that a recording is used as a training loop uses it. Raises whatever the
    program raises, unless the case says that it fails or may be refused.
    """
    seen: dict[str, object] = {}
    with _seeded(0, make_context), case.around():
        program = case.build()
        context = make_context()
        for step in range(1, steps + 1):
            try:
                loss = _run(program, context, backward_inside)
            except Exception as error:
                if not (case.fails or case.may_refuse):
                    raise
                seen |= _at(step, _random_state() | _ambient_state())
                return Observation(seen, error)
            seen |= _at(step, _look(program, loss))
            del loss
    return Observation(seen)


def _at(step: int, seen: Mapping[str, object]) -> dict[str, object]:
    return {f"step {step}: {name}": value for name, value in seen.items()}


def _run(program: Program, context: AbstractContextManager[Any], backward_inside: bool) -> Tensor:
    for tensor in _gradient_owners(program).values():
        tensor.grad = None
    with context:
        loss = program.step()
        if backward_inside:
            _finish(program, loss)
    if not backward_inside:
        _finish(program, loss)
    program.after_step()
    return loss


def _finish(program: Program, loss: Tensor) -> None:
    program.after_forward()
    squatters = dirty_memory()
    program.backward(loss)
    del squatters


def dirty_memory() -> list[Tensor]:
    """Fill freed memory with garbage and return blocks that sit on every other freed address.

    A result that was dropped and then read where it used to be becomes NaN, and an address no longer tells
    whose memory it is. Modes do not see any of it.
    """
    with _disable_current_modes(), torch.no_grad():
        blocks = [torch.full((size,), GARBAGE, dtype=torch.uint8) for size in (*SMALL_BLOCKS, *LARGE_BLOCKS)]
        return blocks[::2]


def _gradient_owners(program: Program) -> dict[str, Tensor]:
    parameters = dict(program.model.named_parameters()) if program.model is not None else {}
    return parameters | dict(program.leaves)


def _look(program: Program, loss: Tensor) -> dict[str, object]:
    owners = _gradient_owners(program)
    buffers = dict(program.model.named_buffers()) if program.model is not None else {}
    with torch.no_grad():
        seen: dict[str, object] = {"loss": freeze(loss)}
        seen |= {f"gradient of {name}": freeze(tensor.grad) for name, tensor in owners.items()}
        seen |= {f"value of {name}": freeze(tensor) for name, tensor in owners.items()}
        seen |= {f"buffer {name}": freeze(buffer) for name, buffer in buffers.items()}
        seen["python state"] = freeze(program.python_state())
    return seen | _random_state() | _ambient_state()


def _random_state() -> dict[str, object]:
    return {
        "torch random state": freeze(torch.get_rng_state()),
        "python random state": random.getstate(),
        "numpy random state": freeze(np.random.get_state()),
    }


def attached() -> tuple[int, int, bool]:
    """Say what is attached to this thread: dispatch modes, function modes, any saved-tensor hooks."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(), hooks is not None


def _ambient_state() -> dict[str, object]:
    return {
        "modes and hooks attached": attached(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "default dtype": torch.get_default_dtype(),
    }


def freeze(value: object) -> object:
    """Turn a value into plain data that compares bit for bit; of a tensor, dtype, shape, strides, bytes."""
    if isinstance(value, Tensor):
        return _freeze_tensor(value)
    if isinstance(value, torch.Generator):
        return ("generator", freeze(value.get_state()))
    if isinstance(value, random.Random):
        return ("random", value.getstate())
    if isinstance(value, np.random.Generator):
        return ("numpy generator", freeze(value.bit_generator.state))
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, Mapping):
        return {str(key): freeze(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [freeze(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: freeze(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, bool | int | str | bytes | complex | torch.dtype | torch.Size):
        return value
    raise TypeError(f"cannot freeze a {type(value).__name__}")


def _freeze_tensor(tensor: Tensor) -> object:
    if is_traceable_wrapper_subclass(tensor):
        parts, _ = tensor.__tensor_flatten__()
        return (type(tensor).__name__, [freeze(getattr(tensor, part)) for part in parts])
    if tensor.layout == torch.sparse_coo:
        parts = [freeze(tensor._indices()), freeze(tensor._values())]
        return ("sparse", tensor.shape, tensor.is_coalesced(), *parts)
    kind = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone(memory_format=torch.contiguous_format)
    return (*kind, plain.reshape(-1).view(torch.uint8).numpy().tobytes())


def assert_same(plain: Observation, other: Observation) -> None:
    """Fail with the name of the first thing that differs between the two runs."""
    if (plain.error is None) != (other.error is None):
        raise AssertionError(f"plain raised {plain.error!r}, the other raised {other.error!r}") from other.error
    for name, expected in plain.seen.items():
        assert name in other.seen, f"{name}: missing"
        difference = first_difference(expected, other.seen[name])
        assert difference is None, f"{name}: {difference}"
    extra = [name for name in other.seen if name not in plain.seen]
    assert not extra, f"{extra[0]}: only in the other run"


def first_difference(expected: object, received: object) -> str | None:
    """Describe the first difference of two frozen values, None where they are equal."""
    if expected == received:
        return None
    if isinstance(expected, dict) and isinstance(received, dict) and expected.keys() == received.keys():
        inside = {key: first_difference(expected[key], received[key]) for key in expected}
        return next(f"{key}: {text}" for key, text in inside.items() if text is not None)
    if isinstance(expected, list | tuple) and isinstance(received, list | tuple) and len(expected) == len(received):
        if _is_tensor(expected) and _is_tensor(received) and expected[:-1] == received[:-1]:
            return _numbers_differ(expected, received)
        texts = [first_difference(a, b) for a, b in zip(expected, received, strict=True)]
        return next(f"[{index}] {text}" for index, text in enumerate(texts) if text is not None)
    return f"expected {_short(expected)}, received {_short(received)}"


def _is_tensor(frozen: Sequence[object]) -> bool:
    return len(frozen) == 6 and isinstance(frozen[0], torch.dtype)


def _numbers_differ(expected: Sequence[Any], received: Sequence[Any]) -> str:
    a, b = (torch.frombuffer(bytearray(x[-1]), dtype=expected[0]) for x in (expected, received))
    bits_a, bits_b = (t.view(torch.uint8).view(a.numel(), -1) for t in (a, b))
    where = (bits_a != bits_b).any(1)
    first = int(where.nonzero()[0])
    share = f"{int(where.sum())} of {a.numel()} elements of {tuple(expected[1])} {expected[0]}"
    return f"{share} differ, first at flat index {first}: expected {a[first].item()}, received {b[first].item()}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
