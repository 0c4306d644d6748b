"""A plan as text: what it costs, and what is recomputed in which blocks, each block's part written once."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lowtide.repetition import Indices, Pattern, first_numbers, gather, labels, lists_in, number, split
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.plan import Plan, Prediction

WIDTH = 100
_ELSEWHERE = "elsewhere"
_WIDE = 0.02
"""A gap that is explained."""


def plan_text(plan: Plan) -> str:
    """``plan`` as a short table."""
    budget = "" if plan.budget_bytes is None else f", for a budget of {format_bytes(plan.budget_bytes)}"
    lines = [f"Plan ({plan.solver or 'by hand'}){budget}"]
    if plan.prediction is not None:
        lines += _costs(plan.prediction)
    lines.append(f"  recompute  {_amount(plan)}")
    rows = _rows(plan)
    width = min(32, max((len(where) for where, _ in rows), default=0))
    for where, what in rows:
        lines += textwrap.wrap(
            f"    {where:<{width}}  {what}",
            WIDTH,
            subsequent_indent=" " * (width + 6),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def percent(fraction: float) -> str:
    """A fraction as text, one decimal; ``0.0 %`` never has a sign."""
    return f"{100 * fraction:.1f} %".replace("-0.0 %", "0.0 %")


def short(op: str) -> str:
    """``gelu`` for ``aten.gelu.default``; the namespace stays where it is not PyTorch's own."""
    namespace, _, rest = op.partition(".")
    name = rest.rpartition(".")[0] if "." in rest else rest
    if namespace != "aten":
        return f"{namespace}.{name}"
    if "scaled_dot_product" in name:  # one kernel or another
        return "scaled_dot_product_attention" + ("_backward" if "backward" in name else "")
    return name.lstrip("_") or name


# ---- what it costs -----------------------------------------------------------------------------------------


def _costs(p: Prediction) -> list[str]:
    lines = [
        _cost("peak", format_bytes, p.peak_bytes, p.plain_peak_bytes),
        _cost("step", format_seconds, p.step_seconds, p.plain_seconds),
    ]
    if p.bound_seconds > 0:
        lines.append(
            f"  bound      {format_seconds(p.bound_seconds):<9}  no plan that keeps what blocks hand on is faster; "
            f"this one is {percent(p.gap)} above"
        )
        if p.gap > _WIDE:
            lines.append(
                "             (it counts in part only what replays hold for a moment: the least may lie higher)"
            )
    return lines


def _cost(name: str, text: Callable[[float], str], value: float, plain: float) -> str:
    line = f"  {name:<9}  {text(value):<9}"
    if plain > 0:
        sign = "+" if value > plain else ""
        line += f"  {sign}{percent(value / plain - 1)}, plain is {text(plain)}"
    return line.rstrip()


def _amount(plan: Plan) -> str:
    if not plan.recompute:
        return "nothing"
    count = len(plan.recompute)
    text = f"{count} operation{'s' if count > 1 else ''}"
    if plan.prediction is not None:
        text += f" in {format_seconds(plan.prediction.recompute_seconds)}"
    if plan.depths:
        text += f"; {1 + max(depth for _, depth in plan.depths)} levels deep"
    return text


# ---- what is recomputed ------------------------------------------------------------------------------------


def _rows(plan: Plan) -> list[tuple[str, str]]:
    """Where, and what is recomputed there; rows of the same blocks add up."""
    sites = _Sites(plan)
    groups: dict[Pattern, list[tuple[frozenset[Indices], list[tuple[str, str]]]]] = {}
    for (pattern, points), tokens in gather(sites.tokens()).items():
        groups.setdefault(pattern, []).append((points, tokens))
    rows: list[tuple[str, str]] = []
    for pattern, parts in groups.items():
        told: set[Indices] = set()
        for points, tokens in sorted(parts, key=lambda part: (-len(part[0]), min(part[0]))):
            also = "also " if not told.isdisjoint(points) else ""
            told |= points
            where = labels(pattern, points) or (_ELSEWHERE if len(groups) > 1 else "model")
            rows.append((where, also + ", ".join(_written(tokens))))
    return sorted(rows, key=lambda row: row[0] == _ELSEWHERE)


class _Sites:
    """The sites of a plan in the order of the model's modules, and how each module's part is called."""

    def __init__(self, plan: Plan) -> None:
        from lowtide.plan import site_parts

        self.order = {path: i for i, (path, _) in enumerate(plan.structure)}
        self.kinds = dict(plan.structure)
        self.ops: dict[str, set[str]] = {}
        for site in plan.recompute:
            module, tail = site_parts(site)
            self.ops.setdefault(module, set()).add(tail.partition(":")[2])
        self.lists = lists_in(plan.structure) if plan.structure else first_numbers(self.ops)
        above = [path.rpartition(".")[0] for path in (*self.kinds, *self.ops) if path]
        self.parents = {"", *above}
        self.most: dict[str, list[set[str]]] = {}
        for module, ops in self.ops.items():
            self.most.setdefault(self.kinds.get(module, module), []).append(ops)

    def tokens(self) -> Iterable[tuple[Pattern, Indices, tuple[str, str]]]:
        """Block, its numbers, and (path inside the block, what is recomputed of it)."""
        for module in sorted(self.ops, key=self._place):
            pattern, indices = split(module, self.lists)
            block = max((i + 1 for i, name in enumerate(pattern) if name is None), default=0)
            inside = ".".join(str(name) for name in pattern[block:])
            yield pattern[:block], indices, (inside, self._part(module, by_name=bool(inside)))

    def _place(self, module: str) -> tuple[int, list[tuple[int, str]]]:
        """Modules in their order, what a block does itself after what is inside it."""
        inner = module in self.parents
        names = [(-1 if number(name) is None else int(name), name) for name in module.split(".")]
        return self.order.get(module, 0) + (len(self.order) if inner else 0), names

    def _part(self, module: str, by_name: bool) -> str:
        """The operations; empty where the name says it: all that is ever recomputed of such a module."""
        ops = self.ops[module]
        whole = not any(ops < other for other in self.most[self.kinds.get(module, module)])
        if by_name and whole and module not in self.parents:
            return ""
        names = [short(op.rpartition("/")[0]) for op in sorted(ops, key=_position)]
        return ", ".join(dict.fromkeys(names))


def _position(op: str) -> tuple[str, int]:
    name, _, index = op.rpartition("/")
    return name, int(index) if index.isdigit() else 0


def _written(tokens: list[tuple[str, str]]) -> list[str]:
    """Tokens as text; modules that differ in their last number alone are written once."""
    alike: dict[tuple[Pattern, str], list[Indices]] = {}
    for inside, part in tokens:
        pattern, indices = split(inside, {inside.rpartition(".")[0]})
        alike.setdefault((pattern, part), []).append(indices)
    texts = [(labels(pattern, points), part) for (pattern, part), points in alike.items()]
    return [f"{where} ({part})" if where and part else where or part for where, part in texts]
