"""Where in the program an operation sits: the modules being run, their paths, and the source line."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide.tape.sharding import class_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lowtide.structure import Structure
    from lowtide.tape.policy import Policy

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


class Home:
    """One module's ledger: what has been proven there, what must not be recomputed, and the routes in force."""

    __slots__ = (
        "__weakref__",
        "distrusted",
        "module",
        "passes",
        "path",
        "policy",
        "proven",
        "restores",
        "routes",
        "scoped",
    )

    def __init__(self, path: str, module: nn.Module | None) -> None:
        self.path = path
        self.module = weakref.ref(module) if module is not None else None
        self.proven: set[int] = set()
        self.distrusted: set[int] = set()
        self.policy: Policy | None = None
        self.scoped: Policy | None = None
        self.restores = False
        self.routes: dict[int, Any] = {}  # operators that are recorded: how
        self.passes: dict[int, Callable[..., Any]] = {}  # operators that only run: the call

    def obey(self, policy: Policy) -> None:
        """Put ``policy`` in force in this module."""
        if self.policy is not policy:
            if self.policy != policy:
                self.routes, self.passes = {}, {}
                self.scoped = policy.within(self.path)
                self.restores = policy.restores(self.path)
            self.policy = policy

    def distrust(self, key: int) -> None:
        """Keep the results of the operator ``key`` in this module from now on."""
        self.distrusted.add(key)
        self.routes.pop(key, None)


class Site:
    """Where one operation ran, for messages."""

    __slots__ = ("home", "line")

    def __init__(self, home: Home, line: str) -> None:
        self.home = home
        self.line = line

    def describe(self) -> str:
        """Module path and source line."""
        return f"in {self.home.path or 'no module'}, {self.line}"


class Tree:
    """The paths and homes of the modules of a program: below one outermost module, or below several."""

    def __init__(self, roots: Sequence[tuple[str, nn.Module]]) -> None:
        self._roots = [(prefix, weakref.ref(root)) for prefix, root in roots]
        self.paths: dict[int, str] = {}
        self.homes: dict[int, Home] = {}
        self.placed: tuple[Policy | None, Tree, bool] = (None, self, False)
        """How a policy that was made for a larger or a smaller model names the modules of this one."""
        self._bound: tuple[Policy | None, Policy | None] = (None, None)
        self._name()

    def _name(self) -> None:
        for prefix, ref in self._roots:
            root = ref()
            if root is not None:
                for path, module in root.named_modules():
                    self.paths[id(module)] = join(prefix, path)
        self._bound = (None, None)
        self.placed = (None, self, False)

    def structure(self) -> Structure | None:
        """Paths and classes of all modules, as they are now; None if one of the roots is gone."""
        roots = [(prefix, ref()) for prefix, ref in self._roots]
        if len(roots) == 1:
            return None if roots[0][1] is None else structure_of(roots[0][1])
        rows = [("", SEVERAL)]
        for prefix, root in roots:
            if root is None:
                return None
            rows += [(join(prefix, path), kind) for path, kind in structure_of(root)]
        return tuple(rows)

    def bind(self, policy: Policy) -> Policy:
        """``policy`` for this tree, worked out once."""
        known, bound = self._bound
        if bound is None or known != policy:
            structure = self.structure()
            bound = policy.bind(structure) if structure is not None else policy
            self._bound = (policy, bound)
        return bound

    def home(self, module: nn.Module, parent: Home) -> Home:
        """The home of ``module``, whose call came from ``parent``."""
        home = self.homes.get(id(module))
        if home is not None and home.module is not None and home.module() is module:
            return home
        if id(module) not in self.paths:
            self._name()  # modules may have been added since
        if id(module) not in self.paths:
            stranger = f"{parent.path}.<{type(module).__name__}>".lstrip(".")
            for path, part in module.named_modules():
                self.paths.setdefault(id(part), join(stranger, path))
        home = self.homes[id(module)] = Home(self.paths[id(module)], module)
        return home


def join(prefix: str, path: str) -> str:
    """``path`` below ``prefix``."""
    return f"{prefix}.{path}" if prefix and path else prefix or path


SEVERAL = "Models"
"""Stands for the class of what holds several models together."""


class Models(nn.ModuleList):
    """Several models as one, without touching them; their paths begin with their numbers."""


def together(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """One module that has all of ``model`` in it: itself, or its members."""
    return model if isinstance(model, nn.Module) else Models(model)


def names_of(model: nn.Module | Sequence[nn.Module] | None) -> Tree | None:
    """The tree of a program whose model or models are known."""
    if model is None or isinstance(model, nn.Module):
        return None if model is None else tree_of(model)
    return Tree([(str(number), one) for number, one in enumerate(model)])


class Counts:
    """How often each module path was called, and each operation outside of modules, so far in a step."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.operations: dict[int, int] = {}


def structure_of(root: nn.Module) -> Structure:
    """Path and class name of every module below ``root``."""
    return tuple((path, class_name(module)) for path, module in root.named_modules())


_trees: weakref.WeakKeyDictionary[nn.Module, dict[str, Tree]] = weakref.WeakKeyDictionary()


def tree_of(root: nn.Module, prefix: str = "") -> Tree:
    """The tree below ``root``, which sits at ``prefix``; made once."""
    trees = _trees.get(root)
    if trees is None:
        trees = _trees[root] = {}
    if prefix not in trees:
        trees[prefix] = Tree([(prefix, root)])
    return trees[prefix]


def tree_for(root: nn.Module, policy: Policy) -> tuple[Tree, bool]:
    """The names of an outermost module and what is in it: its own, or those of the policy's model.

    And whether it has that whole model in it.
    """
    own = tree_of(root)
    if not policy.places:
        return own, False
    known, tree, whole = own.placed
    if known is None or known != policy:
        place = policy.place(structure_of(root))
        above, below = place or ("", "")
        tree, whole = tree_of(root.get_submodule(below) if below else root, above), place is not None and not above
        own.placed = (policy, tree, whole)
    return tree, whole


def source_line() -> str:
    """File and line of the innermost frame that is neither torch's nor lowtide's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH)) and not name.startswith("<"):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown line"


# ---- module calls -------------------------------------------------------------------------------------------


class ModuleWatch:
    """Tells the recorder of each thread when a module's forward begins and ends.

    By torch's global module hooks, there only while somebody records. (Replacing ``nn.Module.__call__`` instead
    makes Python forget what it cached about every module class: a millisecond each time.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._hooks: list[Any] = []
        self._local = threading.local()

    def start(self, enter: Callable[[nn.Module], None], leave: Callable[[nn.Module, Any], None]) -> None:
        """Call ``enter`` and ``leave`` around module calls of this thread."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                registry = nn.modules.module
                self._hooks = [
                    registry.register_module_forward_pre_hook(self._before),
                    registry.register_module_forward_hook(self._after, always_call=True),
                ]
        self._local.calls = (enter, leave)

    def stop(self) -> None:
        """End what ``start`` began."""
        self._local.calls = None
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for hook in self._hooks:
                    hook.remove()
                self._hooks = []

    def _before(self, module: nn.Module, _: Any) -> None:
        calls = getattr(self._local, "calls", None)
        if calls is not None:
            calls[0](module)

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        calls = getattr(self._local, "calls", None)
        if calls is not None:
            calls[1](module, output)


watch = ModuleWatch()
