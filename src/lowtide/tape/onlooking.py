"""Onlooking: below a few calls of a followed step, each operation is compared after all.

arguments       the same function, the same arguments: not all that decides what runs below
operations      the known ones, on tensors that lie alike, with the same numbers?   no: record from the next call on
what they read  taken hold of before they run, where no function is given it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.tape.buffers import release_held
from lowtide.tape.operators import operator, tensors_at
from lowtide.tape.recipes import get
from lowtide.tape.transcript import DRAWN, SHOWN_TO_HOOKS, Call, step_of

if TYPE_CHECKING:
    from lowtide.tape.following import Follower


def look_on(follower: Follower, call: Call, args: Any, kwargs: Any) -> Any:
    """Make a known call, its operations compared one by one."""
    with Onlooker(follower, call):
        return call.func(*args, **kwargs)


class Onlooker(TorchDispatchMode):
    """Looks on at the operations below a call whose arguments do not tell all of them.

    Some depend on data, such as lengths in a tensor; some read or write what no function shows, such as a mask.
    """

    def __init__(self, follower: Follower, call: Call) -> None:
        super().__init__()
        self.call = call
        self.follower = follower
        self.nth = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in TapeMode

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self.nth != len(self.call.operations):
            self.follower.nth = -1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = operator(func)
        if op.name not in SHOWN_TO_HOOKS:
            nth, known = self.nth, self.call.operations
            self.nth += 1
            if nth >= len(known) or known[nth] != step_of(func, args, kwargs):
                self.follower.nth = -1  # nothing that is saved from here on is as it was
            if op.writes or op.undeclared:
                for tensor in tensors_at((*op.writes, *op.undeclared), args, kwargs):
                    release_held(tensor.untyped_storage(), tensor)
            catches = self.call.catches.get(nth, ()) if self.follower.nth >= 0 else ()
            instance: Any = self.follower.instance  # there is one in a call
            for position, slot, offset, how in catches:
                if how != DRAWN:
                    instance.take(get(args, kwargs, position), slot, offset, how)
            out = func(*args, **kwargs)
            for position, slot, offset, how in catches:
                if how == DRAWN:
                    instance.take(get(args, kwargs, position), slot, offset, how)
            return out
        return func(*args, **kwargs)
