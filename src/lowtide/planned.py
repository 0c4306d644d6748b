"""A plan as a policy of the tape."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from lowtide.plan import Plan
from lowtide.policies import keep_all
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


def policy_of(plan: Plan) -> Policy:
    """The policy that obeys ``plan``."""
    deep = dict(plan.depths)
    sites: dict[str, dict[str, int]] = defaultdict(dict)
    for site in plan.recompute:
        sites[site.partition("/")[0]][site] = deep.get(site, 0)
    inside = {path: _Inside(own, frozenset(_name(site) for site in own)) for path, own in sites.items()}
    return _Planned(plan, inside)


def _name(site: str) -> str:
    """``aten.addmm`` of ``blocks.0/0:aten.addmm.default/1``."""
    return site.rpartition(":")[2].rpartition("/")[0].rpartition(".")[0]
