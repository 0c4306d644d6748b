"""What is known about each ATen operator before it runs, read once from its schema.

Relies on torch's schemas (alias annotations) and tags as of torch 2.9 to 2.14; where they are silent or wrong
the sets below correct them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.tape.functions import trusted_operators

Position = int | str | tuple[int | str, int]
"""Where an argument sits: positional index, keyword, or (one of these, index in a list argument)."""


class Operator:
    """One operator overload: what it writes, whether its results are new memory, and why it must be kept."""

    __slots__ = (
        "blank",
        "call",
        "chance",
        "declared",
        "func",
        "keep",
        "key",
        "lists",
        "makes_new",
        "name",
        "overload",
        "random",
        "safe_on_cpu_only",
        "several",
        "swaps_memory",
        "takes_dtype",
        "two_valued",
        "undeclared",
        "view",
        "whole",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        self.func = func  # also keeps id(func) from being used again
        self.call = getattr(func, "_op", func)  # the same without a Python frame in between
        self.key = id(func)
        self.keep: str | None = None  # why results are never recomputed
        self.declared = False  # recomputable whatever calls it: torch runs the forward of its autograd without grad
        self.writes: tuple[int | str, ...] = ()  # arguments that the schema says are written
        self.undeclared: tuple[int | str, ...] = ()  # arguments written although the schema does not say so
        self.chance: int | str | None = None  # where its probability is given: with 0 it draws nothing
        self.takes_dtype = False
        self.lists = False  # writes the items of a list, whose versions no mode lets torch count
        self.two_valued = False  # draws zeros and ones in place
        self.several = False  # more than one result: a mask beside what it masked
        self.makes_new = True  # some results are memory of their own
        self.view = self.blank = self.random = self.swaps_memory = self.whole = self.safe_on_cpu_only = False
        if not isinstance(func, torch._ops.OpOverload):
            self.name, self.overload = str(getattr(func, "__name__", func)), ""
            self.keep = "a higher-order operator"
            return
        namespace, short = func._schema.name.split("::")
        self.name, self.overload = f"{namespace}.{short}", func._overloadname
        self._read_schema(func._schema)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.two_valued = short == "bernoulli_"
        self.blank = short in _BLANK
        self.swaps_memory = short in _SWAPS_MEMORY
        self.lists = short.startswith("_foreach_") and bool(self.writes)
        self.whole = self.whole or short in _OVERWRITES_WHOLE
        self.safe_on_cpu_only = short in _NOT_REPRODUCIBLE_OFF_CPU or (
            _NOT_BITWISE is not None and _NOT_BITWISE in func.tags
        )
        # The schema calls _unsafe_view's result a new tensor, but it shares memory; prim only asks questions.
        self.view = self.view or short == "_unsafe_view" or namespace in ("prim", "profiler")
        if short == "detach_":  # writes nothing: seen in inference mode, elsewhere autograd does it
            self.writes, self.view = (), True
        if namespace not in _KNOWN_NAMESPACES:
            self.keep = _REASONS.get(namespace, "a custom operator not declared recomputable")
        elif short in _PARTLY_WRITTEN:
            self.keep = "leaves part of its results unwritten"

    def _read_schema(self, schema: Any) -> None:
        writes: list[int | str] = []
        undeclared: list[int | str] = []
        for index, argument in enumerate(schema.arguments):
            position = argument.name if argument.kwarg_only else index
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes.append(position)
            elif argument.name == "dropout_p":
                self.chance = position
            elif argument.name == "dtype":
                self.takes_dtype = True
            elif argument.name in _WRITTEN_ARGUMENTS:
                undeclared.append(position)
        self.writes, self.undeclared = tuple(writes), tuple(undeclared)
        self.whole = any(isinstance(position, str) for position in writes)  # out= variants
        shared = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
        makes_tensors = any("Tensor" in str(r.type) for r in schema.returns)
        self.view = not writes and (any(shared) or not makes_tensors)
        self.several = len(schema.returns) > 1
        self.makes_new = any(r.alias_info is None for r in schema.returns)


def argument(position: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument at ``position``, or None where it was left at its default."""
    if isinstance(position, str):
        return kwargs.get(position)
    return args[position] if position < len(args) else None


def tensors_at(positions: tuple[int | str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments at ``positions``, list arguments flattened."""
    if len(positions) == 1 and type(positions[0]) is int and isinstance(args[positions[0]], Tensor):
        return [args[positions[0]]]
    found: list[Tensor] = []
    for position in positions:
        value = argument(position, args, kwargs)
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def tensors_in(value: Any, depth: int = 6) -> list[Tensor]:
    """The tensors in nested containers, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0:
        return []
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)
    elif hasattr(value, "__dataclass_fields__"):
        items = [getattr(value, name, None) for name in value.__dataclass_fields__]
    else:
        return []
    return [tensor for item in items for tensor in tensors_in(item, depth - 1)]


_NOT_BITWISE: torch.Tag | None = getattr(
    torch.Tag, "nondeterministic_bitwise", None
)  # younger than the oldest release supported
_KNOWN_NAMESPACES = {"aten", "prims"}
_REASONS = {
    "c10d": "communication between processes",
    "_c10d_functional": "communication between processes",
    "_c10d_functional_autograd": "communication between processes",
    "fsdp": "moves sharded parameters",
    "symm_mem": "communication between processes",
}
_BLANK = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_SWAPS_MEMORY = {"set_", "set_data", "resize_", "resize_as_", "_resize_output_", "resize", "swap_tensors"}
# In-place operators whose result does not depend on what the tensor held before.
_OVERWRITES_WHOLE = {
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_", "zero_", "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip
# Batch norm of every backend updates its statistics whether or not its schema says so.
_WRITTEN_ARGUMENTS = {"running_mean", "running_var"}
_PARTLY_WRITTEN = {"_ctc_loss"}
# Sums in the order in which atomics arrive on an accelerator; torch.use_deterministic_algorithms lists them.
_NOT_REPRODUCIBLE_OFF_CPU = {
    "_index_put_impl_", "bincount", "cumsum", "cumsum_", "embedding_bag", "_embedding_bag", "histc", "index_add",
    "index_add_", "index_copy", "index_put", "index_put_", "index_reduce", "index_reduce_", "kthvalue", "median",
    "nanmedian", "put_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "segment_reduce",
}  # fmt: skip

_known: dict[int, Operator] = {}


def operator(func: Any) -> Operator:
    """The knowledge about ``func``, read on first sight."""
    known = _known.get(id(func))
    if known is None:
        known = _known[id(func)] = Operator(func)
        if known.keep is not None and known.name in _declared:
            known.keep, known.declared = None, True
    return known


_declared: set[str] = set()


def declare(name: str) -> None:
    """Take the operator called ``name`` ("namespace.op") as safe to recompute."""
    _declared.add(name)
    trusted_operators.add(name.replace(".", "_"))
    for known in _known.values():
        if known.name == name:
            known.keep, known.declared = None, True
