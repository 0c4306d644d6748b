"""A plan as a policy of the tape."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from lowtide.plan import Plan, site_parts
from lowtide.policies import keep_all
from lowtide.structure import Structure
from lowtide.tape.policy import Op, Policy


@dataclass(frozen=True)
class _Planned(Policy):
    """Keep everything but the results at the plan's sites."""

    plan: Plan
    inside: dict[str, _Inside] = field(repr=False, compare=False, hash=False)

    def __call__(self, op: Op) -> bool:
        return op.site not in self.plan.recompute

    def by_name(self, name: str) -> bool | None:
        return None if "" in self.inside else True

    def within(self, path: str) -> Policy:
        return self.inside.get(path, keep_all)

    def bind(self, structure: Structure) -> Policy:
        # A teacher under no_grad is another model, but nothing of it is recorded.
        if torch.is_grad_enabled() and not _is_part(structure, self.plan.structure):
            self.plan.check(structure)
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

    Once a model runs under it that is not the one that the plan was made for, ``PlanMismatch`` is raised.
    """
    deep = dict(plan.depths)
    sites: dict[str, dict[str, int]] = defaultdict(dict)
    for site in plan.recompute:
        sites[site_parts(site)[0]][site] = deep.get(site, 0)
    inside = {path: _Inside(own, frozenset(_name(site) for site in own)) for path, own in sites.items()}
    return _Planned(plan, inside)


def _is_part(structure: Structure, whole: Structure) -> bool:
    """Whether this is a part of the plan's model, called by itself, or has no children, like a loss."""
    if len(structure) <= 1:
        return True
    for at, (path, kind) in enumerate(whole):
        if kind == structure[0][1] and path:
            inside = (row for row in whole[at:] if row[0] == path or row[0].startswith(f"{path}."))
            if tuple((inner[len(path) + 1 :], kind) for inner, kind in inside) == structure:
                return True
    return False


def _name(site: str) -> str:
    """``aten.addmm`` of ``blocks.0/0:aten.addmm.default/1``."""
    return site.rpartition(":")[2].rpartition("/")[0].rpartition(".")[0]
