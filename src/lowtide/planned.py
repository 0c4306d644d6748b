"""A plan as a policy of the tape."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from lowtide.errors import RecomputeWarning
from lowtide.plan import Plan, site_parts
from lowtide.policies import keep_all
from lowtide.structure import Structure
from lowtide.tape.policy import Op, Policy


@dataclass(frozen=True)
class _Planned(Policy):
    """Keep everything but the results at the plan's sites."""

    plan: Plan
    inside: dict[str, _Inside] = field(repr=False, compare=False, hash=False)
    accepted: list[Structure] = field(default_factory=list, repr=False, compare=False, hash=False)
    """What ran under the plan first, once it is known to be the plan's model or a part of it."""
    places = True

    @property
    def keeps_all(self) -> bool:
        # Where nothing is recomputed a step is recorded only to see whether it is a step of the plan's model.
        return not self.plan.recompute and (len(self.plan.structure) <= 1 or bool(self.accepted))

    def __call__(self, op: Op) -> bool:
        return op.site not in self.plan.recompute

    def by_name(self, name: str) -> bool | None:
        return None if "" in self.inside else True

    def within(self, path: str) -> Policy:
        return self.inside.get(path, keep_all)

    def place(self, structure: Structure) -> tuple[str, str] | None:
        above, below = seats(structure, self.plan.structure)
        if len(above) == 1 and not below:
            return above[0], ""
        return ("", below[0]) if len(below) == 1 else None

    def bind(self, structure: Structure) -> Policy:
        # A teacher under no_grad is another model, but nothing of it is recorded.
        if not self.plan.structure or len(structure) <= 1 or not torch.is_grad_enabled():
            return self
        above, below = seats(structure, self.plan.structure)
        if not above and not below:
            self.plan.check(structure)
        if max(len(above), len(below)) > 1:
            warnings.warn(
                f"everything in a {structure[0][1]} is kept: it may be {' or '.join(above or below)} of the model that "
                "the plan was made for. Say which model it is: record(plan, model=...)",
                RecomputeWarning,
                stacklevel=2,
            )
            return keep_all
        if not self.accepted:
            self.accepted.append(structure)
        return self


@dataclass(frozen=True)
class _Inside(Policy):
    """The decisions in one module."""

    depths: dict[str, int] = field(hash=False)
    names: frozenset[str]

    def __call__(self, op: Op) -> bool:
        return op.site not in self.depths

    def depth(self, op: Op) -> int:
        return self.depths.get(op.site, -1)

    def by_name(self, name: str) -> bool | None:
        return None if name in self.names else True


@lru_cache(maxsize=32)
def policy_of(plan: Plan) -> Policy:
    """The policy that obeys ``plan``.

    Once a model runs under it that is not the one that the plan was made for, nor a part of it, nor has it in it,
    ``PlanMismatch`` is raised. A plan with nothing to recompute looks at models only until it has seen its own: after
    that nothing is recorded under it.
    """
    deep = dict(plan.depths)
    sites: dict[str, dict[str, int]] = defaultdict(dict)
    for site in plan.recompute:
        sites[site_parts(site)[0]][site] = deep.get(site, 0)
    inside = {path: _Inside(own, frozenset(_name(site) for site in own)) for path, own in sites.items()}
    return _Planned(plan, inside)


def seats(structure: Structure, planned: Structure) -> tuple[list[str], list[str]]:
    """Where a model of ``structure`` may sit in the planned one, and where the planned one may sit in it.

    A single module without children, like a loss, is at home everywhere and has no seat. Both lists are empty
    where the two have nothing to do with each other; equal ones have the seat "".
    """
    if structure == planned and planned:
        return [""], []
    if len(structure) <= 1 or not planned:
        return [], []
    return list(_places(structure, planned)), list(_places(planned, structure))


def _places(part: Structure, whole: Structure) -> Iterator[str]:
    for at, (path, kind) in enumerate(whole):
        if kind == part[0][1] and path and at + len(part) <= len(whole):
            inside = whole[at : at + len(part)]
            end = whole[at + len(part)][0] if at + len(part) < len(whole) else ""
            if not end.startswith(f"{path}.") and all(
                name == (f"{path}.{own}" if own else path) and kind == own_kind
                for (name, kind), (own, own_kind) in zip(inside, part, strict=True)
            ):
                yield path


def _name(site: str) -> str:
    """``aten.addmm`` of ``blocks.0/0:aten.addmm.default/1``."""
    return site.rpartition(":")[2].rpartition("/")[0].rpartition(".")[0]
