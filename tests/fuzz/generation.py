"""Draw a program at random, trying every instruction as it is added, so that what is drawn runs."""

from __future__ import annotations

import dataclasses
import functools
import random
import warnings
from collections import Counter
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from .observing import NAMES
from .programs import RECORD, Conduct, Instruction, Program, Setting, blocks, hides_writes, recording
from .recorders import plain_recorder
from .rules import KINDS, RULES, SOURCES, Draw, NoChoice, Rule
from .support import weigh

SCOPES = {
    'torch.autocast("cpu", dtype=torch.bfloat16)': 3.0,
    'torch.autocast("cpu", enabled=False)': 0.7,
    RECORD: 0.5,  # a recording within a recording
    "torch.no_grad()": 2.5,
    "torch.enable_grad()": 1.0,
    "torch.inference_mode()": 0.2,
    "torch.random.fork_rng()": 0.7,
    "torch.autograd.graph.save_on_cpu()": 0.4,
    "torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)": 0.4,
    "torch.autograd.set_multithreading_enabled(False)": 0.2,
}
RECKLESS = 0.1  # share of programs that write in place wherever they like
INNERMOST = ("torch.autograd.graph.save", "torch.inference_mode")
"""Scopes that are not put around a recording: of saved-tensor hooks only the innermost count."""

MOST_NUMBERS = 160
LARGEST = 100.0
KIND_WEIGHTS = {
    "pointwise": 5.0,
    "views": 4.0,
    "reductions": 2.0,
    "indexing": 2.0,
    "layers": 5.0,
    "mutation": 5.0,
    "randomness": 2.5,
    "control": 4.0,
}


@dataclasses.dataclass
class Tally:
    """What became of the instructions and programs that were drawn."""

    tried: int = 0
    accepted: int = 0
    refused: Counter[str] = dataclasses.field(default_factory=Counter)


class Refused(Exception):
    """The instruction runs, but makes numbers too many, too large or not finite."""


def tame(value: Any) -> bool:
    """Say whether a variable keeps the program small and its numbers finite."""
    if not isinstance(value, Tensor):
        return True
    if value.numel() > MOST_NUMBERS or value.dim() > 5:
        return False
    if not (value.is_floating_point() or value.is_complex()) or value.numel() == 0:
        return True
    return bool(value.detach().abs().max() <= LARGEST)


@functools.lru_cache(4096)
def code(instruction: Instruction) -> CodeType:
    """Compile one instruction within its scopes."""
    return compile("\n".join(blocks([(instruction.scopes, instruction.text())])), "<instruction>", "exec")


class Workbench:
    """A program under construction together with the values its variables have at this point."""

    def __init__(self, rng: random.Random, tally: Tally) -> None:
        self.rng, self.tally = rng, tally
        self.reckless = rng.random() < RECKLESS
        self.sources: list[Instruction] = []
        self.body: list[Instruction] = []
        self.names: dict[str, Any] = {}
        self.alive: list[int] = []
        self.count = 0
        self.reset()

    def reset(self) -> None:
        """Start again from nothing, with the state a judge would start from."""
        torch.manual_seed(0)
        random.seed(0)
        self.names = dict(NAMES) | {
            "turn": 0,
            "log": [],
            "gen": torch.Generator().manual_seed(7),
            "total": 0.0,
        }
        self.names["record"] = plain_recorder(Setting())

    def execute(self, instruction: Instruction) -> None:
        """Run one instruction within its scopes."""
        exec(code(instruction), self.names)

    def replay(self) -> None:
        """Bring the values back to what the accepted instructions make of them."""
        self.reset()
        for instruction in [*self.sources, *self.body]:
            self.execute(instruction)

    def pool(self) -> dict[int, Any]:
        return {n: self.names[f"v{n}"] for n in self.alive if f"v{n}" in self.names}

    def backward_runs(self) -> None:
        """Run the backward pass of all that is alive, as the loss would; keep its graph."""
        loss = self.names["total"] + weigh(*self.pool().values())
        if isinstance(loss, Tensor):
            loss.backward(retain_graph=True)

    def draw(self, rule: Rule, scopes: tuple[str, ...]) -> Instruction:
        """Draw operands, constants and names for the results; some results take a name that is in use."""
        if hides_writes([*self.body, Instruction(rule.name, scopes=scopes)]):
            raise NoChoice
        if "record." in rule.template and innermost(scopes) and not recording(scopes):
            raise NoChoice
        operands, constants = rule.choose(Draw(self.rng, self.pool()))
        inner = (rule.scope,) if rule.scope and self.rng.random() < 0.95 else ()
        results = []
        for _ in range(rule.results):
            reused = self.rng.choice([*operands, None, None, None, None]) if operands and self.body else None
            fixed = reused in results or isinstance(self.names.get(f"v{reused}"), nn.Module) or rule.removes
            if reused is None or fixed:
                reused, self.count = self.count, self.count + 1
            results.append(reused)
        return Instruction(rule.name, operands, constants, tuple(results), (*scopes, *inner))

    def add(self, rule: Rule, scopes: tuple[str, ...], into: list[Instruction]) -> bool:
        """Draw one instruction and keep it if it runs and stays tame; say whether it was kept."""
        self.tally.tried += 1
        try:
            instruction = self.draw(rule, scopes)
        except (NoChoice, RuntimeError):  # some views refuse even to be looked at
            self.tally.tried -= 1
            return False
        before = self.names.copy(), self.alive
        into.append(instruction)
        try:
            self.execute(instruction)
            self.settle(rule, instruction)
            if rule.risky and not self.reckless:
                self.backward_runs()
        except Exception as error:
            into.pop()
            self.tally.refused[f"{rule.name}: {type(error).__name__}"] += 1
            self.names, self.alive = before
            if rule.risky:
                self.replay()
            return False
        self.tally.accepted += 1
        return True

    def settle(self, rule: Rule, instruction: Instruction) -> None:
        """Check what an instruction touched and bring the list of living variables up to date."""
        touched = [self.names.get(f"v{n}") for n in (*instruction.operands, *instruction.results)]
        if not all(tame(value) for value in touched):
            raise Refused
        gone = {*instruction.results, *(instruction.operands[:1] if rule.removes else ())}
        self.alive = [n for n in self.alive if n not in gone] + list(instruction.results)


def choose_rule(rng: random.Random) -> Rule:
    kind = rng.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0]
    return rng.choices(KINDS[kind], [rule.weight for rule in KINDS[kind]])[0]


def next_scopes(rng: random.Random, scopes: tuple[str, ...]) -> tuple[str, ...]:
    """Leave or enter a scope, now and then."""
    if scopes and rng.random() < 0.3:
        return scopes[:-1]
    if len(scopes) < 3 and rng.random() < 0.07:
        scope = rng.choices(list(SCOPES), list(SCOPES.values()))[0]
        if not (scope == RECORD and innermost(scopes)):
            return (*scopes, scope)
    return scopes


def innermost(scopes: tuple[str, ...]) -> bool:
    """Say whether a scope is among these that no recording may lie in."""
    return any(scope.startswith(INNERMOST) for scope in scopes)


def recorded_stretch(rng: random.Random, length: int) -> set[int]:
    """Choose which instructions are recorded: mostly all, else one or two stretches."""
    if rng.random() < 0.65:
        return set(range(length))
    cuts = sorted(rng.sample(range(length + 1), 4)) if length > 3 else [0, length, length, length]
    second = set(range(cuts[2], cuts[3])) if rng.random() < 0.5 else set()
    return set(range(cuts[0], cuts[1])) | second


def draw_sources(bench: Workbench) -> None:
    rng = bench.rng
    for name in ["leaf", *rng.choices(["leaf", "odd leaf", "constant", "buffers"], k=rng.randrange(1, 4))]:
        bench.add(RULES[name], (), bench.sources)
    for rule in rng.choices(SOURCES, [rule.weight for rule in SOURCES], k=rng.randrange(0, 5)):
        bench.add(rule, (), bench.sources)


def draw_body(bench: Workbench, length: int) -> None:
    recorded = recorded_stretch(bench.rng, length)
    scopes: tuple[str, ...] = ()
    within = bench.rng.random() < 0.9  # else the scopes lie around the recording
    for _ in range(8 * length):
        if len(bench.body) >= length:
            return
        scopes = next_scopes(bench.rng, scopes)
        record = (RECORD,) if len(bench.body) in recorded else ()
        around = not within and not innermost(scopes)
        bench.add(choose_rule(bench.rng), (*scopes, *record) if around else (*record, *scopes), bench.body)


FOLLOWED = 7
"""Steps after which a program that repeats itself is no longer recorded, but followed."""


def draw_conduct(rng: random.Random) -> Conduct:
    steps = rng.choice([1, 1, 1, 2, 2])
    inside = rng.random() < 0.35
    return Conduct(
        seed=rng.randrange(1000),
        steps=steps,
        between=rng.choice(["nothing", "descend", "clear", "evaluate"]),
        interleaved=steps == 2 and not inside and rng.random() < 0.2,
        backwards=2 if rng.random() < 0.12 else 1,
        inside=inside,
    )


def draw_program(seed: int, tally: Tally | None = None) -> Program:
    """Draw the program of this seed. It may still raise when judged, for what only a second step shows."""
    rng = random.Random(f"program {seed}")
    bench = Workbench(rng, tally or Tally())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw_sources(bench)
        draw_body(bench, rng.choice([rng.randrange(5, 15), rng.randrange(10, 30), rng.randrange(20, 61)]))
    learning = [n for n, value in bench.pool().items() if isinstance(value, Tensor) and value.requires_grad]
    tensors = [n for n, value in bench.pool().items() if isinstance(value, Tensor)]
    conduct = draw_conduct(rng)
    if seed % 3 == 0 and not conduct.interleaved:
        conduct = dataclasses.replace(conduct, steps=FOLLOWED)
    ends_recorded = bool(bench.body) and RECORD in bench.body[-1].scopes
    scopes = (RECORD,) if ends_recorded and (conduct.inside or rng.random() < 0.8) else ()
    held = tuple(n for n in tensors if rng.random() < 0.12)
    return Program(tuple(bench.sources), tuple(bench.body), tuple(learning), held, scopes, conduct)


__all__ = ["Tally", "draw_program"]
