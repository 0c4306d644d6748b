"""Make a failing program small: fewer steps, scopes, instructions, drops, as long as it fails alike."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from .judging import judge
from .programs import RECORD, Conduct, Decisions, Instruction, Program, Setting
from .recorders import MakeRecorder
from .rules import RULES

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Case:
    """A program and what is asked of the recorder."""

    program: Program
    setting: Setting

    def but(self, **changes: object) -> Case:
        return dataclasses.replace(self, program=dataclasses.replace(self.program, **changes))  # type: ignore[arg-type]

    def conducted(self, **changes: object) -> Case:
        return self.but(conduct=dataclasses.replace(self.program.conduct, **changes))  # type: ignore[arg-type]

    def asked(self, **changes: object) -> Case:
        return dataclasses.replace(self, setting=dataclasses.replace(self.setting, **changes))  # type: ignore[arg-type]


def alike(signature: str) -> str:
    """Reduce a signature to what must stay the same while shrinking: the kind, and the exception's type."""
    return signature.split(":", maxsplit=1)[0]


class Shrinker:
    """Try smaller cases and keep each that still fails alike; stop after `seconds`."""

    def __init__(self, case: Case, make: MakeRecorder, seconds: float = 60.0) -> None:
        self.case, self.make = case, make
        self.deadline = time.monotonic() + seconds
        self.verdict = judge(case.program, case.setting, make)
        self.tried = 1
        if self.verdict.outcome != "fails":
            raise ValueError(f"only a failing program can be made smaller, this one {self.verdict.outcome}")

    def fails(self, case: Case) -> bool:
        """Try a case; take it if it fails like the first one did."""
        if case == self.case or time.monotonic() > self.deadline:
            return False
        self.tried += 1
        verdict = judge(case.program, case.setting, self.make)
        if verdict.outcome != "fails" or alike(verdict.signature) != alike(self.verdict.signature):
            return False
        self.case, self.verdict = case, verdict
        return True

    def run(self) -> Case:
        """Shrink until nothing helps any more."""
        while True:
            before = self.case
            self.simplify_conduct()
            self.drop_instructions()
            self.bypass_instructions()
            self.simplify_scopes()
            self.drop_terms()
            self.drop_sources()
            if self.case == before:
                break
        self.fewest_drops()
        return renumbered(self.case)

    def simplify_conduct(self) -> None:
        """Prefer one step, one backward pass outside, no checks, everything dropped."""
        plain = Conduct()
        for field in dataclasses.fields(Conduct):
            self.fails(self.case.conducted(**{field.name: getattr(plain, field.name)}))
        usual = Setting()
        for field in dataclasses.fields(Setting):
            self.fails(self.case.asked(**{field.name: getattr(usual, field.name)}))

    def drop_instructions(self) -> None:
        minimise(list(self.case.program.body), lambda body: self.fails(repaired(self.case.but(body=tuple(body)))))

    def bypass_instructions(self) -> None:
        """Leave an instruction out and let its readers read one of its operands instead."""
        for instruction in reversed(self.case.program.body):
            for operand in dict.fromkeys(instruction.operands):
                if self.fails(bypassed(self.case, instruction, operand)):
                    break

    def simplify_scopes(self) -> None:
        """Prefer no scopes beside the recording, and the whole program recorded."""
        self.fails(with_scopes(self.case, lambda scopes: tuple(s for s in scopes if s == RECORD)))
        self.fails(with_scopes(self.case, lambda scopes: (RECORD, *(s for s in scopes if s != RECORD))))
        body = self.case.program.body
        for i, instruction in enumerate(body):
            for j in reversed(range(len(instruction.scopes))):
                scopes = instruction.scopes[:j] + instruction.scopes[j + 1 :]
                changed = dataclasses.replace(instruction, scopes=scopes)
                if self.fails(self.case.but(body=(*body[:i], changed, *body[i + 1 :]))):
                    body, instruction = self.case.program.body, changed  # noqa: PLW2901

    def drop_terms(self) -> None:
        self.fails(self.case.but(held=()))
        minimise(list(self.case.program.held), lambda held: self.fails(self.case.but(held=tuple(held))))
        minimise(list(self.case.program.terms), lambda terms: self.fails(self.case.but(terms=tuple(terms))))

    def drop_sources(self) -> None:
        minimise(
            list(self.case.program.sources),
            lambda some: self.fails(repaired(self.case.but(sources=tuple(some)))),
        )

    def fewest_drops(self) -> None:
        """Name the fewest results that must be dropped, everything else kept."""
        dropped = list(dict.fromkeys(self.verdict.dropped))

        def fails(some: Sequence[tuple[str, int]]) -> bool:
            return self.fails(self.case.asked(decisions=Decisions(keep_share=1.0, flips=frozenset(some))))

        if fails(dropped):
            minimise(dropped, fails)


def minimise(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Remove stretches of items, long ones first, while the rest fails (delta debugging; Zeller 2002)."""
    items = list(items)
    size = max(1, len(items) // 2)
    while items:
        removed = False
        for start in reversed(range(0, len(items), size)):
            rest = items[:start] + items[start + size :]
            if fails(rest):
                items, removed = rest, True
        if size == 1 and not removed:
            break
        size = max(1, size // 2)
    return items


def repaired(case: Case) -> Case:
    """Leave out every instruction, term and held variable whose variables no longer exist."""
    program = case.program
    alive: set[int] = set()
    sources = tuple(survivors(program.sources, alive))
    body = tuple(survivors(program.body, alive))
    terms = tuple(n for n in program.terms if n in alive)
    return case.but(sources=sources, body=body, terms=terms, held=tuple(n for n in program.held if n in alive))


def survivors(instructions: Sequence[Instruction], alive: set[int]) -> Iterator[Instruction]:
    """Yield the instructions that still have their operands; keep `alive` up to date."""
    for instruction in instructions:
        if not alive.issuperset(instruction.operands):
            continue
        if RULES[instruction.rule].removes:
            alive.discard(instruction.operands[0])
        alive.update(instruction.results)
        yield instruction


def bypassed(case: Case, left_out: Instruction, operand: int) -> Case:
    """Leave one instruction out; later readers of its results read `operand`."""
    body: list[Instruction] = []
    names: dict[int, int] = {}
    for instruction in case.program.body:
        if instruction is left_out:
            names = {result: operand for result in instruction.results if result != operand}
            continue
        operands = tuple(names.get(n, n) for n in instruction.operands)
        names = {n: m for n, m in names.items() if n not in instruction.results}
        body.append(dataclasses.replace(instruction, operands=operands))
    terms = tuple(dict.fromkeys(names.get(n, n) for n in case.program.terms))
    return repaired(case.but(body=tuple(body), terms=terms))


def with_scopes(case: Case, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Case:
    """Change the scopes of all instructions and of the loss."""
    body = tuple(dataclasses.replace(i, scopes=change(i.scopes)) for i in case.program.body)
    return case.but(body=body, loss_scopes=change(case.program.loss_scopes))


def renumbered(case: Case) -> Case:
    """Number the variables in the order in which they appear."""
    program, numbers = case.program, {}  # type: ignore[var-annotated]

    def rename(ns: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(n, len(numbers)) for n in ns)

    def renamed(instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        return tuple(
            dataclasses.replace(i, operands=rename(i.operands), results=rename(i.results)) for i in instructions
        )

    sources, body = renamed(program.sources), renamed(program.body)
    return case.but(sources=sources, body=body, terms=rename(program.terms), held=rename(program.held))
