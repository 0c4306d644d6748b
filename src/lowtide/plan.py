"""Plan: which results to recompute, by site, and what that was predicted to cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import GraphError, PlanMismatch
from lowtide.graph import StepGraph, check_schema
from lowtide.repetition import Structure, boxes, fold, gather, join, numbers_of, ranges, split, unfold

if TYPE_CHECKING:
    from lowtide.explanation import Explanation

SCHEMA = 2
"""1 wrote every site and every module on its own; such files are read as well."""


@dataclass(frozen=True)
class Prediction:
    """What ``simulate`` says a plan costs."""

    peak_bytes: int
    step_seconds: float
    recompute_seconds: float
    extra_flops: int
    bound_seconds: float = 0.0
    """No plan within the budget can make a faster step."""
    gap: float = 0.0
    """How far the step is above that bound, as a fraction."""
    plain_seconds: float = 0.0
    """The step that keeps everything; 0 where that is not known."""
    plain_peak_bytes: int = 0
    """The peak of the step that keeps everything; 0 where that is not known."""


@dataclass(frozen=True)
class Plan:
    """Decisions by site: results of the operations at these sites are recomputed, all others are kept."""

    recompute: frozenset[str]
    fingerprint: str = ""
    """Of the structure of the model that the plan was made for."""
    structure: Structure = ()
    solver: str = ""
    budget_bytes: int | None = None
    hardware: str = ""
    prediction: Prediction | None = None
    depths: tuple[tuple[str, int], ...] = ()
    """Sites with a depth above 0: replays that only pass through drop their results again."""

    def __post_init__(self) -> None:
        deep = ((site, depth) for site, depth in self.depths if depth > 0 and site in self.recompute)
        object.__setattr__(self, "depths", tuple(sorted(deep)))

    def __str__(self) -> str:
        from lowtide.plan_text import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from lowtide.reports import html_of

        return html_of(str(self))

    def explain(self, graph: StepGraph | None = None) -> Explanation:
        """Say per module what is kept, what is recomputed, and why.

        Args:
            graph: the step that the plan was made for, from ``lowtide.trace``. Without it only what is
                recomputed is known, neither reasons nor bytes.

        Raises:
            PlanMismatch: the graph is of another model.

        Example:
            >>> print(plan.explain(graph))  # doctest: +SKIP
        """
        from lowtide.explanation import explain

        return explain(self, graph)

    def check(self, structure: Iterable[tuple[str, str]]) -> None:
        """Refuse a model whose modules are not exactly those that the plan was made for.

        Args:
            structure: path and class name of every module, in the order of ``named_modules``. A plan that was
                made without a model accepts every structure.

        Raises:
            PlanMismatch: it differs; the message names the first difference.

        Example:
            >>> plan = Plan(frozenset(), structure=(("", "Net"), ("fc", "Linear")))
            >>> plan.check([("", "Net"), ("fc", "Linear")])
        """
        found = tuple((path, kind) for path, kind in structure)
        if self.structure and found != self.structure:
            raise PlanMismatch(
                f"this plan was made for another model: {_first_difference(self.structure, found)}. "
                "Trace this model (with model= the module that the step calls) and solve again."
            )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1))

    def to_json(self) -> dict[str, Any]:
        """The plan as plain lists and dictionaries; what repeated blocks have in common is written once."""
        return {
            "kind": "lowtide.Plan",
            "schema": SCHEMA,
            "solver": self.solver,
            "budget_bytes": self.budget_bytes,
            "hardware": self.hardware,
            "prediction": asdict(self.prediction) if self.prediction else None,
            "fingerprint": self.fingerprint,
            "structure": fold(self.structure),
            "recompute": list(_fold_sites(self.recompute, dict(self.depths))),
        }

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that ``save`` wrote.

        Raises:
            GraphError: the file is no plan, is broken, or was written by a newer version.
        """
        try:
            data = json.loads(Path(path).read_text())
        except ValueError as error:
            raise GraphError(f"{path} is not a lowtide plan: {error}") from None
        return Plan.from_json(data, str(path))

    @staticmethod
    def from_json(data: Any, source: str = "this data") -> Plan:
        """The plan that ``to_json`` described; ``source`` names it in errors.

        Raises:
            GraphError: it is no plan, is broken, or was written by a newer version.
        """
        check_schema(data, "lowtide.Plan", SCHEMA, source)
        try:
            depths = dict(_unfold_sites(data["recompute"]))
            return Plan(
                recompute=frozenset(depths),
                fingerprint=data["fingerprint"],
                structure=tuple(unfold(data["structure"])),
                solver=data["solver"],
                budget_bytes=data["budget_bytes"],
                hardware=data["hardware"],
                prediction=Prediction(**data["prediction"]) if data["prediction"] else None,
                depths=tuple((depths | dict(data.get("depths", ()))).items()),
            )
        except KeyError as error:
            raise GraphError(f"{source} is a broken lowtide plan: {error} is missing") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise GraphError(f"{source} is a broken lowtide plan: {error}") from None


def site_parts(site: str) -> tuple[str, str]:
    """The module path of a site, and the rest: ``blocks.0`` and ``0:aten.addmm.default/1``."""
    head, _, tail = site.rpartition(":")
    module, _, call = head.rpartition("/")
    return module, f"{call}:{tail}"


# ---- sites as JSON -----------------------------------------------------------------------------------------


def _fold_sites(sites: Iterable[str], depths: dict[str, int]) -> Iterator[Any]:
    """Rows of modules, the ranges of their numbers, and operations; a site that fits no row as it is."""
    things = []
    for site in sorted(sites):
        module, tail = site_parts(site)
        if f"{module}/{tail}" != site or "*" in module.split("."):
            yield {"site": site, "depth": depths.get(site, 0)}
        else:
            things.append((*split(module), (depths.get(site, 0), tail)))
    for (pattern, points), tails in gather(things).items():
        modules = ".".join("*" if name is None else name for name in pattern)
        at = [[ranges(numbers) for numbers in box] for box in boxes(points)]
        for depth in sorted({depth for depth, _ in tails}):
            row: dict[str, Any] = {"modules": modules, "ops": [tail for own, tail in tails if own == depth]}
            yield row | ({"at": at} if at != [[]] else {}) | ({"depth": depth} if depth else {})


def _unfold_sites(rows: Any) -> Iterator[tuple[str, int]]:
    """The sites that ``_fold_sites`` wrote, with their depths."""
    if not isinstance(rows, list):
        raise TypeError(f"the sites are no list but a {type(rows).__name__}")
    for row in rows:
        if isinstance(row, str):
            yield row, 0
        elif "site" in row:
            yield row["site"], row["depth"]
        else:
            for module in _modules(row["modules"], row.get("at", [[]])):
                for tail in row["ops"]:
                    yield f"{module}/{tail}", row.get("depth", 0)


def _modules(pattern: str, at: Iterable[list[str]]) -> Iterator[str]:
    names = pattern.split(".")
    for box in at:
        if len(box) != names.count("*"):
            raise ValueError(f"{pattern!r} does not have {len(box)} places")
        found, places = [""], iter(box)
        for name in names:
            choices = [str(n) for n in numbers_of(next(places))] if name == "*" else [name]
            found = [join(path, choice) for path in found for choice in choices]
        yield from found


# ---- structures compared -----------------------------------------------------------------------------------


def _first_difference(planned: Structure, found: Structure) -> str:
    at = next((i for i, (a, b) in enumerate(zip(planned, found, strict=False)) if a != b), None)
    if at is None:
        at = min(len(planned), len(found))
    ours, theirs = dict(planned), dict(found)
    if at < len(planned) and planned[at][0] not in theirs:
        path, kind = planned[at]
        return f"{_name(path)} ({kind}) is missing here, the plan's model has it"
    if at < len(found) and found[at][0] not in ours:
        path, kind = found[at]
        return f"{_name(path)} ({kind}) is extra, the plan's model does not have it"
    path, kind = found[at] if at < len(found) else planned[at]
    if path in ours and ours[path] != kind:
        return f"{_name(path)} is of class {kind} here, of class {ours[path]} in the plan's model"
    return f"{_name(path)} ({kind}) comes at another place than in the plan's model"


def _name(path: str) -> str:
    return path or "the model itself"
