"""Seeing the calls of attached models and the steps of optimizers, without touching either.

Calls of a model are seen through its class: ``type(model).__call__`` is replaced while any instance is attached, so the
instance itself, its names, its state_dict, copies and pickles stay as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.errors import AttachError
from lowtide.tape.compilation import keep_untraced, skip


class Observer(Protocol):
    """Who wants to run the calls of a model."""

    def run(self, number: int, original: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run one call of the model that was added as ``number``."""

    def model_died(self) -> None:
        """One of the models is gone."""


class Interception:
    """Replaces ``__call__`` of the classes of attached models, and puts it back."""

    def __init__(self) -> None:
        self._observers: dict[int, tuple[Observer, int, weakref.ref[nn.Module]]] = {}
        self._kinds: dict[int, type] = {}  # as they were: sharding gives a model another class
        self._classes: dict[type, tuple[Any, int]] = {}
        self._paused: set[int] = set()

    def add(self, models: Sequence[nn.Module], observer: Observer) -> None:
        """Let ``observer`` run all calls of ``models``.

        Raises:
            AttachError: one of them is taken.
        """
        for model in models:
            if self.observer_of(model) is not None:
                raise AttachError(
                    f"this {type(model).__name__} is attached already; call detach() on its handle first, or use the "
                    "handle as a context manager"
                )
        for number, model in enumerate(models):
            self._replace(type(model))
            self._observers[id(model)] = (observer, number, weakref.ref(model))
            self._kinds[id(model)] = type(model)
            weakref.finalize(model, self._forget, id(model), type(model), observer)

    def remove(self, models: Sequence[nn.Module | None], observer: Observer) -> None:
        """Undo ``add``; None stands for a model that is gone."""
        for model in models:
            if model is not None and self.observer_of(model) is observer:
                self._forget(id(model), self._kinds[id(model)])

    def observer_of(self, model: nn.Module) -> Observer | None:
        """Who runs the calls of ``model``, if anybody does."""
        known = self._observers.get(id(model))
        return known[0] if known is not None and known[2]() is model else None

    def attached(self) -> list[tuple[Observer, nn.Module]]:
        """All attached models and who runs their calls."""
        rows = [(observer, ref()) for observer, _, ref in self._observers.values()]
        return [(observer, model) for observer, model in rows if model is not None]

    @contextmanager
    def paused(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Let ``models`` run for a while as if nobody looked on."""
        pause = {id(model) for model in models if id(model) in self._observers} - self._paused
        self._paused |= pause
        try:
            yield
        finally:
            self._paused -= pause

    def _replace(self, kind: type) -> None:
        own, users = self._classes.get(kind, (kind.__dict__.get("__call__"), 0))
        if not users:
            kind.__call__ = self._wrapper(kind.__call__)  # type: ignore[method-assign]
        self._classes[kind] = (own, users + 1)

    def _forget(self, key: int, kind: type, died: Observer | None = None) -> None:
        known = self._observers.get(key)
        if known is None or (died is not None and known[0] is not died):
            return  # taken off before
        del self._observers[key], self._kinds[key]
        if died is not None:
            died.model_died()
        own, users = self._classes[kind]
        if users > 1:
            self._classes[kind] = (own, users - 1)
            return
        del self._classes[kind]
        if own is None:
            del kind.__call__
        else:
            kind.__call__ = own  # type: ignore[method-assign]

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        observers, paused = self._observers, self._paused

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            keep_untraced()
            known = observers.get(id(module))
            if known is None or known[2]() is not module or id(module) in paused:
                return original(module, *args, **kwargs)
            return known[0].run(known[1], original, module, args, kwargs)

        return skip(__call__)


class Optimizers:
    """Remembers which optimizers make steps, by a hook of torch's own, from the first attach on."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hook: Any = None

    def watch(self) -> None:
        """Begin to look, if that has not happened yet."""
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._seen.add(optimizer))

    def of(self, models: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
        """The optimizers that train parameters of ``models``."""
        wanted = {id(p) for model in models for p in model.parameters()}
        return [
            optimizer
            for optimizer in self._seen
            if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"])
        ]


interception = Interception()
optimizers = Optimizers()
