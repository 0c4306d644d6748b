"""What a step asks torch for: its calls in order, with everything that decides what they compute.

    transcript  call 0: linear(external 0, parameter w) -> result 0      below it: addmm, view; saves external 0
                call 1: gelu(result 0) -> result 1                       below it: gelu; saves result 0
                ...

The operations below a call follow from the call: function, arguments, torch's global state. So a later step that makes
the same calls on the same parameters computes the same operations, and its tape need not be written operation by
operation again (following.py). What breaks this reasoning is a *flaw*: then every step is recorded.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lowtide.tape.buffers import MADE, layout_of

CONSTANT, RESULT, PARAMETER, EXTERNAL, AGAIN, SEQUENCE, SLICE, DATA = range(8)
Pattern = tuple[int, Any, Any]
"""Kind of an argument and two values that it is compared with.

RESULT: number, version. AGAIN: number of an EXTERNAL, versions since it was seen first. DATA: class, dtype and shape.
"""
HELD, COPIED, DRAWN = range(3)
"""How an operation's argument is taken hold of: as it is, as a copy, or packed when it has been drawn (bits.py)."""
Place = tuple[Any, ...]
"""Where in (arguments, keyword arguments) or in a result something is: a chain of indices and keywords."""

_CONSTANTS = frozenset({
    int, float, bool, complex, str, type(None), type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
ESCAPES = frozenset({
    "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_",
    "set_", "resize_", "resize_as_", "__set__", "__cuda_array_interface__", "record_stream", "from_numpy", "frombuffer",
    "apply_", "map_", "map2_",
})  # fmt: skip
"""Functions through which memory gets out of torch's sight, or is exchanged, or Python code is run."""
_HARMLESS_SETTERS = frozenset({"requires_grad"})
"""Attributes of tensors that may be set: by then it is known which tensor that is."""
SILENT = frozenset(
    {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "grad", "__repr__"}
)
"""Functions that compute nothing of a forward pass."""
QUESTIONS = frozenset(
    [
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf",
                     "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested")
        if hasattr(Tensor, name)
    ] + [
        getattr(Tensor, name)
        for name in ("size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "storage_offset",
                     "is_floating_point", "is_complex", "is_contiguous", "__len__")
    ] + [torch.numel, torch.is_floating_point, torch.is_complex]
)  # fmt: skip
"""Functions that compute nothing: what depends on their answers shows in the calls that follow."""
SHOWN_TO_HOOKS = frozenset({"aten.detach", "aten.alias"})
"""Operations that make what saved-tensor hooks are given, and come and go with them."""

Meta = tuple[Any, ...]
Returned = tuple[Place, int, torch.Size, torch.dtype]
"""A tensor that a call returned: where, its number, shape and dtype."""


Position = Any
"""Where an operation takes an argument: index or keyword, or one of these and an index in a list."""
Step = tuple[Any, ...]
"""One operation below a call: which, and its arguments, of tensors how they lie."""


def step_of(func: Any, args: Any, kwargs: Any) -> Step:
    """What has to be the same for an operation to be the same; values of tensors do not."""
    found: list[Any] = [id(func)]
    pending: list[Any] = [*args, *(kwargs.items() if kwargs else ())]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            found.append((*meta_of(value)[:2], value.layout) if value.layout is not torch.strided else layout_of(value))
        elif isinstance(value, (list, tuple)):
            found.append(len(value))
            pending += value
        else:
            found.append(repr(value))
    return tuple(found)


def meta_of(tensor: Tensor) -> Meta:
    """What of a tensor, besides its contents and where they are, decides how operations treat it."""
    return (
        tensor.shape,
        tensor.dtype,
        tensor.requires_grad,
        tensor.stride(),
        tensor.device,
        tensor.layout,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_leaf,
    )


def byte_offset(tensor: Tensor) -> int:
    """Where in its storage a tensor begins, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


class ParameterRef(weakref.ref[Tensor]):
    """A weak reference that equals another if both are to the same parameter; comparing tensors compares values."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, weakref.ref) and self() is not None and self() is other()

    __hash__ = object.__hash__


class Flaw(Exception):
    """Why a step cannot be followed."""


class Call:
    """One call of a torch function, as it was made once."""

    __slots__ = (
        "alone",
        "args",
        "backends",
        "caches",
        "catches",
        "chooses",
        "collects",
        "copies",
        "counts",
        "draws",
        "func",
        "guard",
        "keeps",
        "kwargs",
        "modules",
        "nodes",
        "operations",
        "packs",
        "results",
        "roots",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        self.func = func
        self.args: tuple[Pattern, ...] = ()
        self.kwargs: dict[str, Pattern] = {}
        self.results: list[Returned] = []  # tensors that it returned
        self.alone: Returned | None = None  # its result, if that is one tensor
        self.guard: Any = None  # torch's global state
        self.backends: tuple[bool, ...] | None = None
        self.nodes = 0  # that autograd made: they tell apart what was computed and what was found in a cache
        self.caches = False  # such a cache is in force
        self.collects = False  # there is something to do before it
        self.chooses = False  # what it computes depends on them
        self.modules: tuple[Any, ...] = ()  # weak references to the modules then running, outermost first
        self.counts: dict[str, int] = {}  # how often each module had been called
        # What a follower has to do around it, by the program made from the transcript:
        self.roots: list[tuple[Place, int, int]] = []  # arguments to hold: where, slot, offset in bytes
        self.copies: list[tuple[Place, int, int]] = []  # arguments to copy before the call
        self.draws: tuple[torch.device, ...] = ()  # devices whose random state it draws from
        self.writes: tuple[Place, ...] = ()  # arguments that it writes
        self.catches: dict[int, list[tuple[Position, int, int, int]]] = {}
        """By operation below it, arguments to hold: where, slot, offset in bytes, and how."""
        self.keeps: list[tuple[Place, int, int]] = []  # results to hold: where, slot, offset in bytes
        self.operations: tuple[Step, ...] = ()  # below it, where they are to be compared one by one
        self.packs: list[Any] = []  # see program.py

    def returned(self, results: list[Returned], plain: bool) -> None:
        """Note the tensors that it returned; ``plain``, if that is one tensor of torch's own class."""
        self.results = results
        self.alone = results[0] if plain else None

    def tensors_of(self, out: Any) -> list[tuple[int, Tensor]] | None:
        """The tensors in ``out`` with their numbers; None if it is not what the call returned when it was known."""
        found = []
        try:
            for place, number, shape, dtype in self.results:
                tensor = out if not place else at(out, place)
                if tensor.shape != shape or tensor.dtype is not dtype:
                    return None
                found.append((number, tensor))
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
        return found

    def leaves(self) -> list[Pattern]:
        """The patterns of the tensors among its arguments."""
        found, pending = [], [*self.args, *self.kwargs.values()]
        while pending:
            pattern = pending.pop()
            if pattern[0] in (SEQUENCE, SLICE):
                pending += pattern[1]
            elif pattern[0] not in (CONSTANT, DATA):
                found.append(pattern)
        return found

    def externals(self) -> list[int]:
        """The numbers of tensors that it saw first."""
        return [number for kind, number, _ in self.leaves() if kind == EXTERNAL]

    def parameters(self) -> list[tuple[weakref.ref[Tensor], Meta]]:
        """Weak references to the parameters among its arguments, and what they were."""
        return [(ref, meta) for kind, ref, meta in self.leaves() if kind == PARAMETER]


class Transcriber:
    """Turns values into patterns and numbers the tensors it has seen."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.externals: dict[int, int] = {}  # the versions at which they were seen first
        self.owners: dict[int, Tensor] = {}  # by storage: the first tensor from outside that lies in it
        self.count = 0

    def pattern(self, value: Any) -> Pattern:
        """How an argument is recognised in another step.

        Raises:
            Flaw: it is of a kind that cannot be compared.
        """
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            return self._tensor(value)
        if kind in _CONSTANTS:
            return (CONSTANT, value, kind)
        if kind is tuple or kind is list or kind is torch.Size:
            return (SEQUENCE, tuple(map(self.pattern, value)), kind)
        if kind is slice:
            return (SLICE, tuple(map(self.pattern, (value.start, value.stop, value.step))), kind)
        raise Flaw(f"an argument of type {kind.__name__}")

    def data(self, value: Any) -> Pattern:
        """The same of an argument whose contents are copied and do not decide what is done."""
        if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
            return (DATA, type(value), (value.dtype, value.shape))
        return self.pattern(value)

    def _tensor(self, value: Tensor) -> Pattern:
        if value.layout is not torch.strided or value.is_inference():
            raise Flaw("a tensor that is not strided, or an inference tensor")
        known = self.known.get(id(value))
        if known is not None and known[0]() is value:
            first = self.externals.get(known[1])
            return (RESULT, known[1], value._version) if first is None else (AGAIN, known[1], value._version - first)
        storage = value.untyped_storage()
        if type(value) is Parameter:
            if self.owners.setdefault(storage._cdata, value) is not value:
                raise Flaw("parameters that share memory")
            return (PARAMETER, ParameterRef(value), (*meta_of(value), value.storage_offset()))
        if hasattr(storage, MADE):
            raise Flaw("a view that torch's functions did not show")
        number = self.number(value)
        self.externals[number] = value._version
        owner = self.owners.setdefault(storage._cdata, value)
        if type(owner) is Parameter:
            raise Flaw("a view of a parameter")
        distance = value.storage_offset() - owner.storage_offset()
        return (EXTERNAL, number, (self.known[id(owner)][1], distance, (*meta_of(value), storage.resizable())))

    def number(self, value: Tensor) -> int:
        """Give a tensor that is seen for the first time the next number."""
        known = self.known.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        self.known[id(value)] = (weakref.ref(value), self.count)
        self.count += 1
        return self.count - 1


def same_call(one: Call, other: Call) -> bool:
    """Whether two transcripts have the same call at this point."""
    return (
        one.func == other.func
        and one.args == other.args
        and one.kwargs == other.kwargs
        and one.results == other.results
        and one.nodes == other.nodes
        and one.backends == other.backends
    )


def same_constant(value: Any, one: Any, kind: type) -> bool:
    """Whether two constants are equal in every bit that counts: zeros have signs."""
    if type(value) is not kind or value != one:
        return False
    return bool(value and kind is not complex) or repr(value) == repr(one)


def tensors_with_places(value: Any, place: Place = ()) -> list[tuple[Place, Tensor]]:
    """The tensors in nested sequences and mappings, with where they are."""
    if isinstance(value, Tensor):
        return [(place, value)]
    if isinstance(value, (list, tuple)):
        return [found for at, item in enumerate(value) for found in tensors_with_places(item, (*place, at))]
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in tensors_with_places(item, (*place, key))]
    return []


def at(value: Any, place: Place) -> Any:
    """What is at ``place`` in ``value``."""
    for step in place:
        value = value[step]
    return value


def backends() -> tuple[bool, ...]:
    """Switches, besides those in torch's own guard, by which functions choose their operations."""
    c = torch._C
    return (
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
        c._get_mkldnn_enabled(),
        c._get_cudnn_enabled(),
        c._get_cudnn_benchmark(),
        c._get_nnpack_enabled(),
    )


def name_of(func: Any) -> str:
    """The short name of a torch function."""
    return str(getattr(func, "__name__", ""))


next_node = torch._C._autograd._get_sequence_nr
"""The number that this thread's next autograd node will have."""
transformed = torch._C._functorch.peek_interpreter_stack
"""Not None inside of a torch.func transform, where tensors may be wrappers without memory of their own."""


def escapes(func: Any) -> bool:
    """Whether memory may get out of torch's sight through a function."""
    name = name_of(func)
    setter = name == "__set__" and name_of(getattr(func, "__self__", None)) in _HARMLESS_SETTERS
    return name in ESCAPES and not setter


def is_foreign(func: Any) -> bool:
    """Whether a function is another library's, written in Python: what it does may depend on more than arguments."""
    if not isinstance(func, types.FunctionType):
        return False
    module = func.__module__ or ""
    return module != "torch" and not module.startswith("torch.")
