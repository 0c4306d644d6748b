"""Every hazard of the zoo, under every policy, is what it is without a recording: bit for bit, and once."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from harness import Case, MakeContext, Observation, Program, assert_same, observe
from lowtide.errors import LowtideError, RecomputeWarning
from zoo import CASES

# The programs are what warns: of anomaly mode, sparse layouts, deprecated forms. They are here for that.
pytestmark = pytest.mark.filterwarnings("ignore")


def drawn_by_lot(seed: int) -> Any:
    """Make a policy that keeps about half of the operations, always the same ones."""
    return lambda op: bool(zlib.crc32(f"{seed} {op.site} {op.name}".encode()) & 1)


POLICIES = {
    "keep_all": lowtide.policies.keep_all,
    "recompute_all": lowtide.policies.recompute_all,
    "keep_matmuls": lowtide.policies.keep_matmuls,
    "lot_1": drawn_by_lot(1),
    "lot_2": drawn_by_lot(2),
}


@functools.cache
def plainly(case: Case) -> Observation:
    """Observe the case without a recording, twice: what does not equal itself proves nothing."""
    first, second = (observe(case, contextlib.nullcontext) for _ in range(2))
    assert_same(first, second)
    assert (first.error is not None) == case.fails, f"the plain step raised {first.error!r}"
    return first


def assert_same_under(case: Case, make_context: MakeContext, *, backward_inside: bool) -> None:
    """Observe the case under a recording and compare; an honest refusal passes where the case allows one."""
    plain = plainly(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecomputeWarning)
        other = observe(case, make_context, backward_inside=backward_inside)
    if case.may_refuse and other.error is not None:
        assert isinstance(other.error, LowtideError), repr(other.error)
        return
    if case.fails:
        assert isinstance(other.error, RuntimeError), repr(other.error)
    assert_same(plain, other)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_step_equals_itself_with_backward_inside_or_after(case: Case) -> None:
    assert_same(plainly(case), observe(case, contextlib.nullcontext, backward_inside=True))


def combinations() -> list[Any]:
    """Every policy with every check and both places of backward; the ones that tell least are marked slow."""
    found = []
    for policy, check, inside in itertools.product(POLICIES, ("new", "never"), (False, True)):
        telling = policy == "recompute_all" or (policy == "lot_1" and inside) or (check, inside) == ("new", False)
        name = f"{policy}-{check}-{'inside' if inside else 'after'}"
        found.append(pytest.param(policy, check, inside, id=name, marks=() if telling else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("policy", "check", "backward_inside"), combinations())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_is_exact(case: Case, policy: str, check: Any, backward_inside: bool) -> None:
    if case.needs_proof and check == "never":
        pytest.skip("only a proof can notice memory that is written behind the dispatcher's back")
    make = functools.partial(lowtide.record, POLICIES[policy], check=check)
    assert_same_under(case, make, backward_inside=backward_inside)


@pytest.mark.parametrize("check", ["new", "never", "always"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if case.blocks], ids=str)
def test_step_is_exact_in_segments(case: Case, size: int, check: Any) -> None:
    policy = lowtide.policies.segments(case.blocks, n=size)
    assert_same_under(case, functools.partial(lowtide.record, policy, check=check), backward_inside=False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_proving_every_step_is_exact(case: Case) -> None:
    make = functools.partial(lowtide.record, lowtide.policies.recompute_all, check="always")
    assert_same_under(case, make, backward_inside=False)


def batch_norm(checkpointed: bool, scale: float = 1.0) -> Case:
    def build() -> Program:
        model, x = nn.BatchNorm1d(4), torch.randn(6, 4, requires_grad=True)

        def step() -> Tensor:
            out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            return (out * scale).sin().sum()

        return Program(step, model=model, leaves={"x": x})

    return Case("batch norm", build)


def test_harness_names_the_buffer_that_moves_twice_under_torchs_checkpoint() -> None:
    with pytest.raises(AssertionError, match=r"^step 1: buffer running_mean: 4 of 4 elements"):
        assert_same(plainly(batch_norm(False)), observe(batch_norm(True), contextlib.nullcontext))


def test_harness_notices_the_last_bit() -> None:
    nearly_one = 1.0 + 2**-23
    with pytest.raises(AssertionError, match=r"^step 1: gradient of weight: . of 4 elements"):
        assert_same(plainly(batch_norm(False)), observe(batch_norm(False, nearly_one), contextlib.nullcontext))
