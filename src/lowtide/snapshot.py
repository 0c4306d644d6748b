"""What a step can change, and putting it back: the model, gradients, the optimizer, random state.

capture                                                         restore
containers   dictionaries of modules and optimizer, and the     the same entries
             lists and dictionaries in them, one level deep
gradients    which tensor is whose gradient                     the same tensors
contents     of parameters, buffers, gradients, states, and     the same bits, written only where they differ,
             of tensors that modules have as attributes         so that no version counter moves for nothing
random       torch on every device, python, numpy               the same states
generators   the step's own, met on the way, see Discovery      the same states
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide.tape import randomness
from lowtide.tape.proof import same_bits

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


class Snapshot:
    """The state of a model, an optimizer and all random numbers; a context manager that puts it back.

    Contents are copied to host memory. ``restore`` may be called any number of times in between. Without ``weights``
    those of parameters are left out.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, weights: bool = True
    ) -> None:
        self.devices = _devices(model)
        self.generators: list[torch.Generator] = []
        self._containers: list[tuple[Any, Any]] = []
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._contents: dict[int, tuple[Tensor, Tensor]] = {}
        self._states = randomness.states_of(self.devices)
        self._python = random.getstate()
        self._numpy = _numpy_state()
        self._generator_states: list[Tensor] = []
        self._weights = weights
        self._read(model, optimizer)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()

    def _read(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        for container in (*_of_model(model), *_of_optimizer(optimizer)):
            self._containers.append((container, container.copy()))
            for value in _values(container):
                if isinstance(value, Tensor):
                    self.add_tensor(value)

    def add_tensor(self, tensor: Tensor) -> None:
        """Put the contents and the gradient of ``tensor`` back as well, as they are now."""
        if id(tensor) in self._contents or id(tensor) in self._gradients or tensor.is_meta:
            return
        if self._weights or not isinstance(tensor, nn.Parameter):
            self._contents[id(tensor)] = (tensor, host_copy(tensor))
        if tensor.is_leaf and tensor.requires_grad:
            self._gradients[id(tensor)] = (tensor, tensor.grad)
            if tensor.grad is not None:
                self.add_tensor(tensor.grad)

    def add_generator(self, generator: torch.Generator) -> None:
        """Put the state of ``generator`` back as well, as it is now."""
        if not any(generator is known for known in self.generators):
            self.generators.append(generator)
            self._generator_states.append(generator.get_state())

    def owners(self) -> list[Tensor]:
        """The tensors whose gradients are put back."""
        return [tensor for tensor, _ in self._gradients.values()]

    def restore(self) -> None:
        """Put everything back that differs."""
        for container, entries in self._containers:
            _refill(container, entries)
        for tensor, gradient in self._gradients.values():
            tensor.grad = gradient
        with torch.no_grad():
            for tensor, content in self._contents.values():
                _write(tensor, content)
        randomness.leave(self._states)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for generator, state in zip(self.generators, self._generator_states, strict=True):
            generator.set_state(state)

    def random_states(self) -> dict[str, Any]:
        """The present states of all generators by name, comparable with ``==`` or bit by bit."""
        states: dict[str, Any] = {
            f"of {device}": randomness.get_state(device) for device in sorted(self.devices, key=str)
        }
        states["of python"] = random.getstate()
        numpy = _numpy_state()
        if numpy is not None:
            states["of numpy"] = (numpy[0], numpy[1].tobytes(), *numpy[2:])
        own = enumerate(self.generators, 1)
        return states | {f"of the step's generator {i}": generator.get_state() for i, generator in own}


# ---- tensors -----------------------------------------------------------------------------------------------


def host_copy(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` in host memory; one of another kind than a plain tensor is copied where it is."""
    with torch.no_grad():
        if is_traceable_wrapper_subclass(tensor) or tensor.device.type == "cpu":
            return tensor.detach().clone()
        return tensor.detach().to("cpu", copy=True)


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense plain tensors that ``tensor`` consists of: itself, indices and values, or those it wraps."""
    tensor = tensor.detach()
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return tuple(part for name in names for part in parts_of(getattr(tensor, name)))
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.is_quantized:
        return (tensor.int_repr(),)
    return (tensor.to_dense() if tensor.is_mkldnn else tensor,)


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors on any devices agree in layout, shape, dtype and every bit."""
    if one.layout is not other.layout:
        return False
    ours, theirs = parts_of(one), parts_of(other)
    return len(ours) == len(theirs) and all(
        same_bits(a.to("cpu"), b.to("cpu")) for a, b in zip(ours, theirs, strict=True)
    )


def _write(tensor: Tensor, content: Tensor) -> None:
    if equal(tensor, content):
        return
    if tensor.shape != content.shape or tensor.dtype != content.dtype or tensor.layout is not content.layout:
        tensor.data = content.to(tensor.device, copy=True)
    else:
        tensor.copy_(content)


# ---- containers --------------------------------------------------------------------------------------------


def _of_model(model: nn.Module) -> Iterator[Any]:
    """The dictionaries of all modules, and the containers in them."""
    for module in model.modules():
        yield vars(module)
        yield from _inside(vars(module).values())


def _of_optimizer(optimizer: torch.optim.Optimizer | None) -> Iterator[Any]:
    if optimizer is None:
        return
    yield optimizer.state
    yield from _inside(optimizer.state.values())
    yield optimizer.param_groups
    for group in optimizer.param_groups:
        yield group
        yield from _inside(group.values())


def _inside(values: Iterable[Any]) -> Iterator[Any]:
    return (value for value in values if type(value) in _CONTAINERS)


def _values(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _refill(container: Any, entries: Any) -> None:
    """Give ``container`` exactly ``entries``, the same objects in the same order, if it has others."""
    mine, wanted = _values(container), _values(entries)
    same = len(mine) == len(wanted) and all(a is b for a, b in zip(mine, wanted, strict=True))
    if same and (not isinstance(container, dict) or list(container) == list(entries)):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(entries)
    else:
        container.extend(entries)


# ---- random state ------------------------------------------------------------------------------------------


def _devices(model: nn.Module) -> set[torch.device]:
    """The devices whose generators a step of ``model`` can draw from."""
    tensors = (*model.parameters(), *model.buffers())
    devices = {torch.device("cpu"), *(t.device for t in tensors if not t.is_meta)}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices |= {torch.device("cuda", index) for index in range(torch.cuda.device_count())}
    return devices


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()
