"""Operations that write into their arguments.

    storage of x      ──▶ B0 ─────────────────▶ B1 = recipe(copy of B0, op)
    x.mul_(y)             read by old recipes        what the storage holds now

If B0 can be made again, B1 can; then both are only recipes. If B0 is memory that is there (kept, a parameter,
an input), the result is there as well and nothing is dropped; recipes that read B0 get a copy of it first.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide.tape import bits, proof, randomness
from lowtide.tape.buffers import (
    HELD,
    MADE,
    Buffer,
    alias,
    blank,
    clone_storage,
    expose,
    find,
    layout_of,
    rare,
    release_held,
    shared_layout,
)
from lowtide.tape.operators import Operator, tensors_at
from lowtide.tape.recipes import FullRecipe, capture
from lowtide.tape.sharding import keep_across, needs

if TYPE_CHECKING:
    from lowtide.tape.recorder import Recorder


class Target:
    """One storage that an operation writes: the tensor it is written through and its version so far."""

    __slots__ = ("declared", "layouts", "old", "storage", "tensor")

    def __init__(self, storage: torch.UntypedStorage, tensor: Tensor, old: Buffer | None, declared: bool) -> None:
        self.declared = declared  # the schema says that it is written, so autograd counts a version
        self.storage = storage
        self.tensor = tensor
        self.old = old
        self.layouts: list[Any] = []
        if old is not None and old.rare is not None:  # may be blank: then it matters what is written
            self.layouts.append(layout_of(tensor))


def write(recorder: Recorder, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that writes, and note the new versions it makes."""
    out = _write(recorder, op, args, kwargs)
    if op.lists:
        torch.autograd.graph.increment_version(tensors_at(op.writes, args, kwargs))
    return out


def _write(recorder: Recorder, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    targets = targets_of(recorder, op, args, kwargs)
    for target in targets.values():
        release_held(target.storage, target.tensor, declared=target.declared)
    depth = _depth(recorder, op, targets)
    if depth < 0:
        for target in targets.values():
            overwrite(target, None)
        return op.call(*args, **kwargs)
    if recorder.must_prove(op):
        return proof.run_write(recorder, op, targets, args, kwargs, depth)
    recipe = prepare(recorder, op, targets, args, kwargs, depth)
    out = op.call(*args, **kwargs)
    remember(recorder, recipe, args)
    commit(recorder, recipe, targets, out)
    return out


def targets_of(recorder: Recorder, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Target]:
    """The storages that the operation writes, by id."""
    targets: dict[int, Target] = {}
    declared = tensors_at(op.writes, args, kwargs)
    undeclared = tensors_at(op.undeclared, args, kwargs) if op.undeclared else ()
    for tensor in (*declared, *undeclared):
        if tensor.layout is not torch.strided:
            continue
        if recorder.read is not find:
            keep_across(tensor, recorder.frame.around)
        storage = tensor.untyped_storage()
        known = targets.get(id(storage))
        if known is not None:
            if known.layouts:
                known.layouts.append(layout_of(tensor))
            continue
        buffer = getattr(storage, MADE, None)
        if buffer is not None:
            if buffer.rare is not None:
                proof.watch_memory(recorder, tensor)
            if not storage.resizable():
                expose(storage, tensor)
            buffer = getattr(storage, MADE, None)
        targets[id(storage)] = Target(storage, tensor, buffer, not undeclared or any(tensor is t for t in declared))
    return targets


def _depth(recorder: Recorder, op: Operator, targets: dict[int, Target]) -> int:
    """The depth at which the operation's results are recomputed, -1 if they are kept."""
    home = recorder.frame.home
    policy = home.scoped or recorder.rule
    decision = policy.by_name(op.name)
    nth = recorder.count(op) if decision is None else -1
    if not torch.is_grad_enabled() and not op.declared and not recorder.trusts_caller():
        return -1
    known = [target.old for target in targets.values() if target.old is not None]
    if not known and not op.makes_new:
        return -1
    if not op.whole and any(blank(old) is not None for old in known):
        return -1  # reads memory that was never seen being written
    if decision is None:
        depth = recorder.depth(op, nth, [target.tensor for target in targets.values()])
    else:
        depth = -1 if decision else recorder.base_depth
    if depth < 0:
        return depth
    reason = op.keep or ("found not to be reproducible" if op.key in home.distrusted else None)
    if reason is None and op.safe_on_cpu_only and not all(t.tensor.is_cpu for t in targets.values()):
        reason = "not reproducible from run to run on this device"
    if reason is not None:
        recorder.ledger.note(op, home, reason)
        return -1
    return depth


def prepare(
    recorder: Recorder, op: Operator, targets: dict[int, Target], args: Any, kwargs: Any, depth: int
) -> FullRecipe:
    """The recipe of an operation that writes, taken before it runs.

    Memory that is there and about to be overwritten is copied: running statistics are replayed on that copy.
    """
    steals = {}
    originals: dict[int, Buffer] = {}
    for key, target in targets.items():
        buffer = target.old
        if buffer is None:
            buffer = Buffer(None, clone_storage(target.tensor))
            recorder.copied(buffer, target.tensor)
        originals[key] = buffer
        steals[id(buffer)] = target.old is None or not buffer.used
        buffer.used = True

    def read(tensor: Tensor) -> Buffer:
        original = originals.get(id(tensor.untyped_storage())) if tensor.layout is torch.strided else None
        return recorder.read(tensor) if original is None else original

    drew = (randomness.drawn(op, args, kwargs) if op.random and not recorder.packs(op, args) else None) or (None, None)
    recipe = FullRecipe(op, *capture(args, kwargs, read))
    recipe.states, recipe.generators = drew
    recipe.written = steals
    recipe.level = depth
    recipe.needs = needs(recipe, recorder.frame.around)
    return recipe


def remember(recorder: Recorder, recipe: FullRecipe, args: tuple[Any, ...]) -> Tensor | None:
    """Let a recipe that took no random state, though it draws, put its results instead; returns them packed."""
    if not recipe.op.two_valued or recipe.states is not None or recipe.generators is not None:
        return None
    packed = bits.pack(args[0])
    buffer = Buffer(None, packed)
    bits.remember(recipe, buffer, shared_layout(packed))
    recorder.packed(buffer)
    return packed


def commit(recorder: Recorder, recipe: FullRecipe, targets: dict[int, Target], out: Any) -> list[Buffer]:
    """Give the new versions and the new results of an operation that ran their buffers."""
    buffers = []
    for target in targets.values():
        if target.old is None:
            continue
        new = Buffer(recipe)
        missing = _still_blank(target)
        if missing is not None:
            rare(new).blank = missing
        recipe.made.append((id(target.old), weakref.ref(new)))
        overwrite(target, new)
        recorder.adopt(target.storage, new)
        buffers.append(new)
    if recipe.op.makes_new:
        buffers += _new_results(recorder, recipe, out)
    return buffers


def _new_results(recorder: Recorder, recipe: FullRecipe, out: Any) -> list[Buffer]:
    results = [(-1, out)] if isinstance(out, Tensor) else list(enumerate(out))
    buffers = []
    for which, result in results:
        if not isinstance(result, Tensor) or not recorder.droppable(recipe.op, result):
            continue
        storage = result.untyped_storage()
        if hasattr(storage, MADE) or hasattr(storage, HELD):
            continue
        buffer = Buffer(recipe)
        recipe.outs.append((which, weakref.ref(buffer)))
        recorder.adopt(storage, buffer)
        buffers.append(buffer)
    return buffers


def _still_blank(target: Target) -> frozenset[Any] | None:
    """What has been written of memory that began as ``empty``, or None once all of it has been."""
    before = blank(target.old) if target.old is not None else None
    if before is None:
        return None
    parts = before.union(target.layouts)
    written = 0
    for size, _, _, dtype, _ in parts:
        written += size.numel() * dtype.itemsize
    return None if written >= target.storage.nbytes() else parts


def overwrite(target: Target, new: Buffer | None) -> None:
    """``target``'s present version is past; ``new``, or the memory itself, follows it."""
    old = target.old
    if old is None:
        return
    saves = [save for save in old.saves or () if not save.stale]
    for save in saves if target.declared else ():
        save.written_through(target.tensor)
    follow = [save for save in saves if not save.stale]
    if new is None:
        delattr(target.storage, MADE)
        if follow:
            new = Buffer(None, alias(target.tensor))
    elif old.saves:
        new.saves = follow
    for save in follow:
        save.move(new)
