"""What all verbs have in common: options, how hardware and memory are named, how files are written, progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowtide.configurations.configured import Configured
    from lowtide.configurations.scripted import Scripted
    from lowtide.estimation import Setup
    from lowtide.graph import StepGraph
    from lowtide.hardware import Accelerator
    from lowtide.plan import Plan
    from lowtide.tape.policy import Policy

Source = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG|FILE.py:FUNCTION",
        help="A config.json of transformers, a folder with one, or a function that returns (step, model).",
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples that a device handles at once.")]
Seq = Annotated[int | None, typer.Option(min=1, help="Tokens of a sample; by default the model's, up to 4096.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="fp32, bf16, fp16: of weights and all. bf16-mixed, fp16-mixed: autocast over fp32 weights. By default "
        "bf16, or what the function makes."
    ),
]
OptimizerName = Annotated[
    str, typer.Option(help="adamw, adamw-fused, adamw-8bit, sgd, sgd-momentum, adafactor or lion.")
]
Hardware = Annotated[str, typer.Option(help="A name such as h100, or a file that `lowtide calibrate` wrote.")]
Budget = Annotated[str | None, typer.Option(help="Memory to fit into, such as '40 GiB' or '90%'.")]
Lora = Annotated[int, typer.Option(min=0, help="Train only adapters of this rank.")]
LoraTargets = Annotated[str, typer.Option(help="Which layers get one, such as q_proj,v_proj; by default all.")]
Freeze = Annotated[list[str] | None, typer.Option(help="A part not to train, such as model.embed_tokens.")]
Ranks = Annotated[int, typer.Option(min=1, help="Devices that train together.")]
Sharding = Annotated[str, typer.Option(help="none (DDP), zero1, zero2, or fsdp (ZeRO-3).")]
Accumulate = Annotated[int, typer.Option(min=1, help="Batches for each step of the optimizer.")]
Attention = Annotated[
    str | None,
    typer.Option(help="efficient (fused, flash) or plain (stores the scores); by default what the model can."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, no table.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="A plan that `lowtide plan` wrote.")]
PolicyName = Annotated[str | None, typer.Option("--policy", help="A hand policy, such as keep_matmuls or segments.")]

POLICIES = ("keep_all", "keep_matmuls", "recompute_all", "segments", "sqrt")


def accelerator_of(text: str) -> Accelerator:
    """The accelerator of the catalogue with that name, or the one in that file."""
    from lowtide import hardware

    return hardware.load(text) if text.endswith(".json") else hardware.find(text)


def setup_of(workload: Configured | Scripted, **settings: Any) -> Setup:
    """A setup in which a batch or length that was not given is the workload's own."""
    from dataclasses import replace

    from lowtide.estimation import Setup

    if settings.get("batch") is None:
        settings["batch"] = getattr(workload, "batch", 1)
    settings["precision"] = workload.precision(settings.get("precision"))
    settings["attention"] = workload.attention(settings.get("attention"))
    setup = Setup(**{name: value for name, value in settings.items() if value is not None})
    return replace(setup, length=workload.length(setup.length))


def graph_of(source: str, accelerator: Accelerator, **settings: Any) -> tuple[StepGraph, str, tuple[str, ...]]:
    """The graph of a source under a setup with its name and what it assumes; a saved graph as it is."""
    from dataclasses import replace

    from lowtide.configurations import workload_of
    from lowtide.estimation.optimizers import state_bytes

    saved = saved_graph(source)
    if saved is not None:
        return saved, Path(source).name, ()
    workload = workload_of(source, accelerator, lora=settings.pop("lora", 0))
    setup = setup_of(workload, **settings)
    traced = workload.trace(setup)
    graph = replace(traced.graph, optimizer_bytes=state_bytes(setup.optimizer, traced.trained))
    return graph, f"{workload.name}, {setup.text}, on {accelerator.name}", traced.remarks


def saved_graph(source: str) -> StepGraph | None:
    """The graph that `StepGraph.save` wrote to this file; None if it is something else."""
    from lowtide.graph import StepGraph

    path = Path(source)
    if path.suffix != ".json" or not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        return StepGraph.load(path) if "lowtide.StepGraph" in file.read(200) else None


def decided(budget: str | None, plan: Path | None, policy: str | None) -> int | str | Plan | Policy:
    """The one of the three that was given.

    Raises:
        LowtideError: none or several were, or there is no such policy or file.
    """
    from lowtide import policies
    from lowtide.units import parse_bytes

    if sum(one is not None for one in (budget, plan, policy)) != 1:
        raise LowtideError("Name exactly one of --budget, --plan and --policy.")
    if plan is not None:
        return load_plan(plan)
    if budget is not None:
        return budget if budget.strip().endswith("%") else parse_bytes(budget)
    if policy not in POLICIES:
        raise LowtideError(f"There is no policy {policy!r}; there are {', '.join(POLICIES)}.")
    found: Policy = policies.segments() if policy == "segments" else getattr(policies, policy)
    return found


def planned(
    graph: StepGraph, wanted: int | str | Plan | Policy, tell: Callable[[str], object] = lambda text: None
) -> Plan:
    """What was decided on, as a plan for ``graph``; ``tell`` hears how far the planning is."""
    from lowtide.plan import Plan
    from lowtide.planning import solve

    if isinstance(wanted, Plan):
        return wanted
    if not isinstance(wanted, int | str):
        return solve(graph, policy=wanted)
    return solve(graph, budget=wanted, progress=lambda done, total: tell(f"planning, {done} of {total} menus tried"))


def load_plan(path: Path) -> Plan:
    """The plan in a file."""
    from lowtide.plan import Plan

    if not path.is_file():
        raise LowtideError(f"{path}: no such file. `lowtide plan ... --output {path}` writes one.")
    return Plan.load(path)


def show(shown: RenderableType, record: Any, as_json: bool) -> None:
    """Print a table, or one JSON object in its place."""
    if as_json:
        typer.echo(json.dumps(record, indent=2))
        return
    from rich.console import Console

    Console().print(shown)


def refuse_to_overwrite(path: Path | None, force: bool) -> None:
    """Say so before any work is done where ``path`` could not be written in the end."""
    if path is None:
        return
    if path.exists() and not force:
        raise LowtideError(f"{path} is there already. --force replaces it, --output names another file.")
    if not path.parent.is_dir():
        raise LowtideError(f"{path.parent} is no folder. Make it first, or name another --output.")


def write(path: Path, text: str) -> None:
    """Write a file; the error says why not."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LowtideError(f"Cannot write {path}: {error.strerror}.") from error


@contextmanager
def working(text: str, quiet: bool = False) -> Iterator[Any]:
    """Show on standard error what is being done; gives a function that is told."""
    if quiet:
        yield lambda told: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(text) as status:
        yield status.update
