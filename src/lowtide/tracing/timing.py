"""How long one operation takes: it is run several times on the same input before it is run for the step."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.tape import bits, randomness
from lowtide.tape.buffers import clone_storage, layout_of, place
from lowtide.tape.operators import Operator, tensors_at, tensors_in
from lowtide.tracing.workspaces import device_of

SHORT_SECONDS = 5e-5
"""Operations below it are run several times between two looks at the clock."""
BATCH = 4


def tried(
    op: Operator, args: Any, kwargs: Any, repeats: int, watched: Callable[[Callable[[], Any]], tuple[Any, int]]
) -> tuple[float, int]:
    """Seconds of the operation, the median of repeats, and its workspace, as ``watched`` sees it in a first run.

    What it writes is written on copies, and random state is put back.
    """
    drew = randomness.drawn(op, args, kwargs) if op.random else None
    written = distinct(tensors_at((*op.writes, *op.undeclared), args, kwargs))
    shared = Counter(t.untyped_storage()._cdata for t in tensors_in((args, kwargs)) if has_memory(t))
    copies = {}
    for tensor in written:
        whole = shared[key := tensor.untyped_storage()._cdata] > 1
        copies[key] = _copy(tensor, whole), whole
    args, kwargs = _on_copies(args, kwargs, copies)
    before = randomness.enter((drew or ((), None))[0] or ())
    generators = [(value, value.get_state()) for value in kwargs.values() if isinstance(value, torch.Generator)]
    try:
        out, workspace = watched(partial(op.call, *args, **kwargs))
        del out
        return _median_seconds(op.call, args, kwargs, repeats), workspace
    finally:
        randomness.leave(before)
        for generator, state in generators:
            generator.set_state(state)


def packing_seconds(mask: Tensor, repeats: int) -> float:
    """Seconds of packing what was drawn into ``mask``, and of putting it there again."""
    return _median_seconds(lambda drawn: bits.put(drawn, bits.pack(drawn)), [torch.zeros_like(mask)], {}, repeats)


def _median_seconds(call: Any, args: Any, kwargs: Any, repeats: int) -> float:
    clock = _clock(args)
    times: list[float] = []
    batch = 1
    while len(times) < repeats:
        start = clock()
        for _ in range(batch):
            call(*args, **kwargs)
        _synchronize(args)
        seconds = (clock() - start) / batch
        if batch == 1 and seconds < SHORT_SECONDS:
            batch = BATCH  # the first look only said that it is short
        else:
            times.append(seconds)
    return statistics.median(times)


def _copy(tensor: Tensor, shared: bool) -> Tensor:
    """A copy to write on: of all of its memory only where another argument lies in it. A bucket may be large."""
    return clone_storage(tensor) if shared else tensor.clone()


def _on_copies(args: Any, kwargs: Any, copies: dict[int, tuple[Tensor, bool]]) -> tuple[list[Any], dict[str, Any]]:
    def swap(value: Any) -> Any:
        if isinstance(value, Tensor) and has_memory(value):
            copy, whole = copies.get(value.untyped_storage()._cdata, (value, False))
            return place(copy, layout_of(value)) if whole else copy
        if isinstance(value, (list, tuple)):
            return [swap(item) for item in value]
        return value

    if not copies:
        return list(args), kwargs
    return [swap(value) for value in args], {key: swap(value) for key, value in kwargs.items()}


def _clock(args: Any) -> Callable[[], float]:
    """The clock for an operation: where one thread does it all, CPU time, which other processes disturb little."""
    alone = torch.get_num_threads() == 1 and device_of(args, {}).type == "cpu"
    return time.thread_time if alone else time.perf_counter


def step_clock(model: torch.nn.Module | None) -> Callable[[], float]:
    """The clock for a whole step of ``model``."""
    devices = {} if model is None else {p.device.type: p for p in model.parameters()}
    clock = _clock(list(devices.values())[:1])

    def now() -> float:
        _synchronize(devices.values())
        return clock()

    return now


def _synchronize(args: Any) -> None:
    device = next((value.device for value in args if isinstance(value, Tensor)), None)
    if device is not None and device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize()


def has_memory(tensor: Tensor) -> bool:
    """Whether ``tensor`` lies in a storage."""
    return tensor.layout is torch.strided and not tensor.is_mkldnn


def distinct(tensors: list[Tensor]) -> list[Tensor]:
    """One tensor for each storage."""
    return list({t.untyped_storage()._cdata: t for t in tensors if has_memory(t)}.values())
