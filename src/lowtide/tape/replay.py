"""Replay: run the recorded operations that lead to a dropped buffer, and nothing else.

    kept ─▶ a ─▶ b ─▶ c (asked for)          run in recorded order: a, b, c
                 └──▶ ticket                 b is cached: a ticket still needs it; a goes when b has been made

What a replay makes is cached as long as another ticket or recipe can use it, by reference counting alone.

Deep chains need more than one level: then what a replay passes through is dropped again, except a staircase of
levels towards the target. A result of level n stays if nothing of a lower level lies between it and the target:

    level      1 . . . 3 . . . 2 . . . 3 . 4 T
    cached     x               x       x   x x         the rest is made again when it is asked for
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import ReplayMismatch
from lowtide.tape.buffers import Buffer, clone_storage, place
from lowtide.tape.recipes import FullRecipe, Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Operators are replayed exactly as they were recorded: below autograd, autocast and version counting.
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
for _name in dir(torch._C.DispatchKey):
    if _name.startswith("Autocast") or (_name.startswith("Autograd") and "Functionality" not in _name):
        _BELOW = _BELOW | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name))
for _name in ("VmapMode", "FuncTorchVmapMode"):  # of a backward that runs batched
    _BELOW = _BELOW | torch._C.DispatchKeySet(torch._C._parse_dispatch_key(_name))  # type: ignore[arg-type]


class TapeMode(TorchDispatchMode):
    """A dispatch mode that writes a tape, and can be told to look away while operations are replayed."""

    paused = 0

    def moved(self, mover: object) -> None:
        """Note that ``mover`` gathered sharded parameters or gave them back."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that torch would add costs as much as the mode itself


def pause(step: int) -> None:
    """Let this thread's recorders look away (1), or look on again (-1)."""
    for mode in tapes():
        mode.paused += step


def tapes() -> list[TapeMode]:
    """This thread's recorders and tracers that are looking on."""
    stack = (torch._C._get_dispatch_stack_at(index) for index in range(torch._C._len_torch_dispatch_stack()))
    return [mode for mode in stack if isinstance(mode, TapeMode)]


lock = threading.RLock()
_transform_in_force = torch._C._functorch.peek_interpreter_stack
_modes_in_force = torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled
set_grad_enabled = torch._C._set_grad_enabled
_Exclude = torch._C._ExcludeDispatchKeyGuard


def rebuild(buffer: Buffer) -> Tensor:
    """The contents of ``buffer``: as they are, or made again from what is still there."""
    if buffer.recipe is not None:
        below(_make, buffer)
    return buffer.contents()


def below(work: Callable[..., None], *args: Any) -> None:
    """Run ``work`` below autograd and autocast, unseen by this thread's recorders, one thread at a time."""
    if _transform_in_force() is not None:  # a batched backward: replay outside of it
        with temporarily_clear_interpreter_stack():
            return below(work, *args)
    with lock:
        grad = _grad_enabled()
        recording = _modes_in_force() > 0
        if recording:
            pause(1)
        try:
            with _Exclude(_BELOW):
                work(*args)
        finally:
            if recording:
                pause(-1)
            set_grad_enabled(grad)
    return None


def _make(buffer: Buffer) -> None:
    if buffer.recipe is None or _is_one_step(buffer):  # another thread was faster
        return
    for step in _plan(buffer):
        if step.recipe.grad is not _grad_enabled():
            set_grad_enabled(step.recipe.grad)
        _follow(step)


def _is_one_step(buffer: Buffer) -> bool:
    """Make ``buffer`` by its own recipe alone, if that has one result and all that it reads is there."""
    recipe = buffer.recipe
    if type(recipe) is not Recipe or (buffer.rare is not None and buffer.rare.print is not None):
        return False
    for _, read, _ in recipe.reads:
        if read.recipe is not None:
            return False
    inputs = [place(read.contents(), layout) for _, read, layout in recipe.reads]
    set_grad_enabled(recipe.grad)
    buffer.value = recipe.run(inputs)
    buffer.recipe = None
    return True


class Step:
    """One recipe to run; ``target`` is one of its results."""

    __slots__ = ("again", "last", "recipe", "target", "wanted")

    def __init__(self, target: Buffer, recipe: Recipe) -> None:
        self.target = target
        self.recipe = recipe
        self.again = False  # its results are dropped again after use, so the recipe is not forgotten
        self.wanted: frozenset[int] = frozenset()  # ids of those results that a later step reads
        self.last: tuple[Buffer, ...] = ()  # passed results that no later step reads


def _plan(buffer: Buffer) -> Iterable[Step]:
    """The recipes that lead to ``buffer``, in the order in which they were recorded.

    Iterative: a chain may be as long as the program.
    """
    recipe = buffer.recipe
    assert recipe is not None
    missing = []
    for read in recipe.reads:
        if read[1].recipe is not None:
            missing.append(read[1])
    if not missing:
        return (Step(buffer, recipe),)
    found = {recipe.order: Step(buffer, recipe)}
    deep = 0
    while missing:
        target = missing.pop()
        recipe = target.recipe
        if recipe is None or recipe.order in found:
            continue
        found[recipe.order] = Step(target, recipe)
        deep = max(deep, recipe.level)
        missing += [read for _, read, _ in recipe.reads if read.recipe is not None]
    steps = _Draining(found[order] for order in sorted(found))
    if deep:
        _build_staircase(steps)
    return steps


def _build_staircase(steps: list[Step]) -> None:
    """Mark what is dropped again, and after which step each of it has been read for the last time."""
    lowest = steps[-1].recipe.level
    passed: dict[int, Step] = {}
    for step in reversed(steps[:-1]):
        step.again = step.recipe.level > lowest
        lowest = min(lowest, step.recipe.level)
        if step.again:
            passed[step.recipe.order] = step
    seen: set[int] = set()
    for step in reversed(steps):
        for _, read, _ in step.recipe.reads:
            maker = passed.get(read.recipe.order) if read.recipe is not None else None
            if maker is not None:
                maker.wanted |= {id(read)}
                if id(read) not in seen:
                    seen.add(id(read))
                    step.last += (read,)


class _Draining(list[Any]):
    """A list that lets go of its items as it is iterated: a recipe that is done must not hold its inputs."""

    def __iter__(self) -> Any:
        self.reverse()
        while self:
            yield self.pop()


def _follow(step: Step) -> None:
    """Run one recipe and give its results to the buffers that are still wanted."""
    target, recipe = step.target, step.recipe
    if type(recipe) is FullRecipe:
        _follow_full(step, recipe)
    else:
        inputs = [place(read.contents(), layout) for _, read, layout in recipe.reads]
        _fill(target, recipe.run(inputs), step)
    for read in step.last:
        if read.recipe is not None:
            read.value = None


def _follow_full(step: Step, recipe: FullRecipe) -> None:
    bases: dict[int, Tensor] = {}
    if recipe.written:
        for _, read, _ in recipe.reads:
            alone = recipe.written.get(id(read))
            if alone is not None and id(read) not in bases:
                bases[id(read)] = _base(read, alone, step.again)
    inputs = [
        place(bases[id(read)] if id(read) in bases else read.contents(), layout) for _, read, layout in recipe.reads
    ]
    result = recipe.run(inputs)
    del inputs
    if not recipe.outs and not recipe.made:
        _fill(step.target, result, step)
    for which, ref in recipe.outs:
        _fill(ref(), result[which] if which >= 0 else result, step)
    for old, ref in recipe.made:
        _fill(ref(), bases[old], step)


def _base(read: Buffer, alone: bool, again: bool) -> Tensor:
    """The memory that an operation writes in place: a copy of the old version, or itself if nobody else reads it."""
    value = read.contents()
    if not alone or read.version is not None or (again and read.recipe is None):
        return clone_storage(value)
    read.value = None
    return value


def _fill(buffer: Buffer | None, value: Tensor, step: Step) -> None:
    if buffer is None or buffer.recipe is not step.recipe:
        return
    if buffer.rare is not None and buffer.rare.print is not None:
        _compare(buffer, value, step.recipe)
    if step.again:
        if id(buffer) in step.wanted:
            buffer.value = value
        return
    buffer.value = value
    buffer.recipe = None


def _compare(buffer: Buffer, value: Tensor, recipe: Recipe) -> None:
    from lowtide.tape.proof import fingerprint

    assert buffer.rare is not None
    if fingerprint(value.untyped_storage()) != buffer.rare.print:
        site = buffer.rare.site
        site.home.distrust(recipe.op.key)
        raise ReplayMismatch(
            f"recomputing {recipe.op.name} gave other values than the forward pass did ({site.describe()}). It "
            "depends on something that changed since, so gradients would have been wrong. Its results are kept "
            "from now on: run the step again."
        )
