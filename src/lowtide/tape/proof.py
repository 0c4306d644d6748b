"""Proof: an operation is run twice before it is dropped for the first time, and dropped memory is watched.

    run ──▶ results ──┬─ run again with the same random state ─▶ same bits?   else kept from now on, a warning
                      ├─ arguments unchanged?                                 else kept, the arguments too
                      └─ fingerprint of each dropped result
    later read or save of a dropped result ─▶ same fingerprint?   else something unseen wrote it: memory is kept
    replay in backward                     ─▶ same fingerprint?   else ReplayMismatch

All but the last happen while the values are still there, so the step under proof is right even where it warns.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide.errors import ReplayMismatch
from lowtide.tape import inplace, randomness
from lowtide.tape.buffers import HELD, MADE, Buffer, blank, clone_storage, expose, place, rare
from lowtide.tape.sites import Site, source_line

if TYPE_CHECKING:
    from lowtide.tape.operators import Operator
    from lowtide.tape.recorder import Recorder


def fingerprint(storage: torch.UntypedStorage) -> int:
    """A checksum of all bytes of ``storage``."""
    if storage.device.type == "cpu":
        size = storage.nbytes()
        if size == 0 or storage.data_ptr() == 0:
            return 0
        return zlib.crc32((ctypes.c_char * size).from_address(storage.data_ptr()))
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return _sum_on_device(data)


def _sum_on_device(data: Tensor) -> int:
    total = 0
    for chunk in data.split(1 << 24):
        weights = torch.arange(1, chunk.numel() + 1, device=data.device) * 0x9E3779B1
        total = (total * 31 + int((chunk.long() * weights).sum())) & 0xFFFFFFFFFFFFFFFF
    return total


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit; NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [t.resolve_conj().resolve_neg().contiguous() for t in (one, other)]
    return torch.equal(*(t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in flat))


def watch_memory(recorder: Recorder, tensor: Tensor) -> None:
    """Notice that something unseen wrote to a dropped result that is about to be read or saved."""
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    buffer: Buffer | None = getattr(storage, MADE, None)
    if storage is None or buffer is None or buffer.rare is None or buffer.recipe is None:
        return
    seen = buffer.rare.print
    if seen is not None and fingerprint(storage) != seen:
        _distrust(
            recorder,
            buffer.recipe.op,
            buffer.rare.site,
            "its result was written by code that the dispatcher does not see",
        )
        expose(storage, tensor)


def run(recorder: Recorder, op: Operator, args: Any, kwargs: Any, nth: int) -> Any:
    """Run an operation that only makes new results, and prove that it can be run again.

    The policy is asked about it if it is the ``nth`` of its kind, not if ``nth`` is -1.
    """
    from lowtide.tape.recorder import results_of

    inputs = [tensor for tensor in tensors(args, kwargs) if tensor.layout is torch.strided]
    provable = not op.blank and all(_is_real(tensor) for tensor in inputs)
    for tensor in inputs:
        watch_memory(recorder, tensor)
    before = [fingerprint(tensor.untyped_storage()) for tensor in inputs] if provable else []
    drew = randomness.drawn(op, args, kwargs) if op.random else None
    out = op.func(*args, **kwargs)
    results = results_of(out)
    depth = recorder.depth(op, nth, results) if nth >= 0 else recorder.base_depth
    if depth < 0:
        return out
    _pend(recorder, op)
    if not provable or not all(_is_real(result) for result in results):
        recorder.drop(op, args, kwargs, out, drew, depth)
        return out
    site = Site(recorder.frame.home, source_line())
    changed = [t for t, crc in zip(inputs, before, strict=True) if fingerprint(t.untyped_storage()) != crc]
    if changed:
        _distrust(recorder, op, site, "it writes to an argument that its schema does not declare as written")
        for tensor in changed:
            _give_up(op, site, tensor)
        return out
    again = results_of(_run_again(op, args, kwargs, drew))
    pairs = zip(results, again, strict=True)
    if not all(same_bits(a, b) for a, b in pairs if a.is_floating_point() or a.is_complex()):
        _distrust(recorder, op, site, "two runs on the same input gave different results")
        return out
    del again
    for buffer, storage in _pairs(recorder.drop(op, args, kwargs, out, drew, depth), results):
        _stamp(buffer, storage, site)
    return out


def run_write(
    recorder: Recorder, op: Operator, targets: dict[int, inplace.Target], args: Any, kwargs: Any, depth: int
) -> Any:
    """Run an operation that writes into its arguments, and prove that it can be run again."""
    from lowtide.tape.recorder import results_of

    if not all(_is_real(tensor) for tensor in tensors(args, kwargs)):
        recipe = inplace.prepare(recorder, op, targets, args, kwargs, depth)
        out = op.func(*args, **kwargs)
        inplace.remember(recorder, recipe, args)
        inplace.commit(recorder, recipe, targets, out)
        return out
    copies = {key: clone_storage(target.tensor) for key, target in targets.items()}
    recipe = inplace.prepare(recorder, op, targets, args, kwargs, depth)
    inputs = []
    for position, _, layout in recipe.reads:
        tensor = _at(position, args, kwargs)
        copy = copies.get(id(tensor.untyped_storage())) if tensor.layout is torch.strided else None
        inputs.append(tensor if copy is None else place(copy, layout))
    out = op.func(*args, **kwargs)
    _pend(recorder, op)
    site = Site(recorder.frame.home, source_line())
    packed = inplace.remember(recorder, recipe, args)
    again = recipe.run(inputs if packed is None else [inputs[0], packed])
    same = all(
        fingerprint(copies[key].untyped_storage()) == fingerprint(target.storage) for key, target in targets.items()
    )
    if op.makes_new:
        pairs = zip(results_of(out), results_of(again), strict=True)
        same = same and all(same_bits(a, b) for a, b in pairs if a.is_floating_point())
    if not same:
        _distrust(recorder, op, site, "two runs on the same input gave different results")
        for target in targets.values():
            inplace.overwrite(target, None)
        return out
    buffers = inplace.commit(recorder, recipe, targets, out)
    wholes = [target.tensor if target.tensor._base is None else target.tensor._base for target in targets.values()]
    storages = {id(buffer): storage for buffer, storage in _pairs(buffers, [*wholes, *results_of(out)])}
    for target in targets.values():  # a part of what was whole: chunks have no base
        if target.old is not None and target.old.rare is not None and target.old.rare.print is not None:
            storages[id(getattr(target.storage, MADE, None))] = target.storage
    for buffer in buffers:
        if id(buffer) in storages:
            _stamp(buffer, storages[id(buffer)], site)
    return out


def _stamp(buffer: Buffer, storage: torch.UntypedStorage, site: Site) -> None:
    if blank(buffer) is None:
        rare(buffer).site = site
        rare(buffer).print = fingerprint(storage)


def _pairs(buffers: list[Buffer], results: list[Tensor]) -> list[tuple[Buffer, torch.UntypedStorage]]:
    """Dropped buffers with their storages, where the result fills its storage (gaps hold anything)."""
    pairs = []
    for result in results:
        if result.layout is not torch.strided:
            continue
        storage = result.untyped_storage()
        buffer = getattr(storage, MADE, None)
        fills = result.numel() * result.element_size() == storage.nbytes()
        if fills and buffer is not None and any(buffer is b for b in buffers):
            pairs.append((buffer, storage))
    return pairs


def _give_up(op: Operator, site: Site, tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    held = [ref() for ref in getattr(storage, HELD, ())]
    if any(buffer is not None for buffer in held):
        raise ReplayMismatch(
            f"{op.name} {site.describe()} wrote to an argument that its schema does not declare as written, and a "
            f"recomputation still needs what was there (a tensor of shape {tuple(tensor.shape)}). Declare the "
            "argument as mutated where the operator is registered, or keep the results of the operations before it."
        )
    expose(storage, tensor)


def _distrust(recorder: Recorder, op: Operator, site: Site | None, why: str) -> None:
    where = site.describe() if site is not None else "in an unknown place"
    home = site.home if site is not None else recorder.frame.home
    home.distrust(op.key)
    recorder.ledger.warn(op, home, why, f"{op.name} {where} is kept instead of recomputed: {why}.", recorder.strict)


def _pend(recorder: Recorder, op: Operator) -> None:
    frame = recorder.frame
    frame.pending = frame.pending or set()
    frame.pending.add(op.key)


def tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _is_real(tensor: Tensor) -> bool:
    """Whether there are bytes to look at."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and type(tensor).__name__ != "FakeTensor"
        and not tensor.is_mkldnn
        and not torch._is_zerotensor(tensor)
    )


def _at(position: Any, args: Any, kwargs: Any) -> Tensor:
    if isinstance(position, tuple):
        outer, item = position
        tensor = (kwargs if isinstance(outer, str) else args)[outer][item]
    else:
        tensor = (kwargs if isinstance(position, str) else args)[position]
    return tensor


def _run_again(op: Operator, args: Any, kwargs: Any, drew: Any) -> Any:
    states, generators = drew or (None, None)
    args, kwargs = list(args), dict(kwargs)
    for position, generator, state in generators or ():
        (kwargs if isinstance(position, str) else args)[position] = randomness.twin(generator, state)
    before = randomness.enter(states or ())
    try:
        return op.func(*args, **kwargs)
    finally:
        randomness.leave(before)
