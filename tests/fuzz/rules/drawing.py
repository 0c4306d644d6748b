"""How a rule draws its operands and constants from the variables that are alive."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Constant: TypeAlias = int | float | str
Choice: TypeAlias = tuple[tuple[int, ...], tuple[Constant, ...]]
Want: TypeAlias = Callable[[Any], bool]
Relation: TypeAlias = Callable[[Any], Want]
"""Given the first operand, say what the other must be like."""


class NoChoice(Exception):
    """No variable that is alive suits the rule."""


@dataclasses.dataclass
class Draw:
    """The variables alive at one point of a program, by number, and the randomness to choose by."""

    rng: random.Random
    pool: dict[int, Any]

    def __getitem__(self, number: int) -> Any:
        return self.pool[number]

    def pick(self, want: Want) -> int:
        """Choose a variable, later ones and those that require grad more often."""
        numbers = [n for n, value in self.pool.items() if want(value)]
        if not numbers:
            raise NoChoice
        weights = [(1 + i) * (3 if getattr(self.pool[n], "requires_grad", False) else 1) for i, n in enumerate(numbers)]
        return self.rng.choices(numbers, weights)[0]

    def number(self) -> float:
        """Draw a scalar that neither vanishes nor explodes."""
        return self.rng.choice([-1.5, -0.5, 0.25, 0.5, 0.75, 1.25, 2.0])


Part: TypeAlias = Callable[[Draw, Any], Constant]
"""Draws one constant, given the first operand."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of instruction.

    `template` is Python text: operands a b c d, constants x y z u w, results r s t. A `risky` rule may make
    an earlier saved tensor stale, so the program so far is tried after it; a rule that `removes` ends its
    first operand's life; `scope` is a `with` the instruction needs. An
    `unseen` rule writes past version counters, or makes a name through which others do: only a recorder that
    watches can know of it, so no risky rule follows it where nobody watches.
    """

    name: str
    template: str
    choose: Callable[[Draw], Choice]
    weight: float = 1.0
    risky: bool = False
    removes: bool = False
    unseen: bool = False
    scope: str | None = None

    @property
    def results(self) -> int:
        return sum("{" + letter + "}" in self.template for letter in "rst")


def tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32


def full(value: Any) -> bool:
    """Whether it is a real tensor that holds at least one number."""
    return real(value) and value.numel() > 0


def imaginary(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def numeric(value: Any) -> bool:
    return real(value) or imaginary(value)


def whole(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64


def logical(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


def module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def learning(value: Any) -> bool:
    return numeric(value) and bool(value.requires_grad)


def constant(value: Any) -> bool:
    return real(value) and not value.requires_grad


def dims(least: int, most: int = 5, kind: Want = full) -> Want:
    """Want a tensor of `least` to `most` dimensions."""
    return lambda t: kind(t) and least <= t.dim() <= most


def both(first: Want, second: Want) -> Want:
    return lambda t: first(t) and second(t)


def anything(first: Any) -> Want:
    return real


def same_shape(first: Any) -> Want:
    return lambda t: numeric(t) and t.shape == first.shape and t.dtype == first.dtype


def same_dtype(first: Any) -> Want:
    return lambda t: tensor(t) and t.dtype == first.dtype


def broadcasts(first: Any) -> Want:
    """Want a real tensor that broadcasts with the first operand to at most its shape or its own."""

    def fits(t: Any) -> bool:
        pairs = zip(reversed(t.shape), reversed(first.shape), strict=False) if real(t) else []
        return real(t) and all(m == n or 1 in (m, n) for m, n in pairs)

    return fits


def expands(first: Any) -> Want:
    """Want a real tensor that broadcasts to exactly the first operand's shape."""

    def fits(t: Any) -> bool:
        if not real(t) or t.dim() > first.dim():
            return False
        return all(m in (n, 1) for m, n in zip(reversed(t.shape), reversed(first.shape), strict=False))

    return fits


def one(want: Want, *parts: Part) -> Callable[[Draw], Choice]:
    """Draw one operand and its constants."""

    def choose(d: Draw) -> Choice:
        a = d.pick(want)
        return (a,), tuple(part(d, d[a]) for part in parts)

    return choose


def pair(want: Want, relation: Relation, *parts: Part) -> Callable[[Draw], Choice]:
    """Draw two operands, the second suiting the first, and constants for the first."""

    def choose(d: Draw) -> Choice:
        a = d.pick(want)
        b = d.pick(relation(d[a]))
        return (a, b), tuple(part(d, d[a]) for part in parts)

    return choose


def triple(want: Want, second: Relation, third: Relation, *parts: Part) -> Callable[[Draw], Choice]:
    """Draw three operands, the second and third suiting the first, and constants for the first."""

    def choose(d: Draw) -> Choice:
        a = d.pick(want)
        return (a, d.pick(second(d[a])), d.pick(third(d[a]))), tuple(part(d, d[a]) for part in parts)

    return choose


def none(*parts: Part) -> Callable[[Draw], Choice]:
    """Draw constants only."""
    return lambda d: ((), tuple(part(d, None) for part in parts))


def number(d: Draw, first: Any) -> Constant:
    return d.number()


def axis(d: Draw, first: Any) -> Constant:
    """Draw a dimension of the first operand, counted from either end."""
    if first.dim() == 0:
        raise NoChoice
    return d.rng.randrange(-first.dim(), first.dim())


def small(d: Draw, first: Any) -> Constant:
    return d.rng.randrange(1, 4)


def truth(d: Draw, first: Any) -> Constant:
    return d.rng.choice(["True", "False"])


def seed(d: Draw, first: Any) -> Constant:
    return d.rng.randrange(1000)


def among(*choices: Constant) -> Part:
    """Draw one of the given constants."""
    return lambda d, first: d.rng.choice(choices)


def shape_of(d: Draw, first: Any) -> Constant:
    """Write the first operand's shape, as a tuple."""
    return repr(tuple(first.shape))


def called(d: Draw) -> Choice:
    """Draw a module and a tensor that it takes."""
    m = d.pick(module)
    return (m, d.pick(lambda t: single(t) and d[m].accepts(t))), ()
