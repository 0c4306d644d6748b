"""A step that breaks anywhere: the error arrives, nothing stays attached, nothing leaks, the next step is exact."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from harness import Case, assert_same, attached, observe
from lowtide.tape.interrupts import HeldBack
from troubles.breaking import ERRORS, Breaking, Injected, Step, break_at, interrupted_after, operations, run
from zoo import CASES

POLICIES: dict[str, Callable[[], Any]] = {
    "recompute_all": lambda: lowtide.record(lowtide.policies.recompute_all),
    "keep_matmuls": lambda: lowtide.record(lowtide.policies.keep_matmuls),
    "proving always": lambda: lowtide.record(lowtide.policies.recompute_all, check="always"),
    "never proving": lambda: lowtide.record(lowtide.policies.recompute_all, check="never"),
    "sqrt": lambda: lowtide.record(lowtide.policies.sqrt),
}


@cache
def counted(policy: str) -> tuple[int, int]:
    return operations(POLICIES[policy]())


def places(policy: str, warm: bool, count: int, seed: int) -> list[int]:
    """Operations at which to break: first, last, and some by lot in between."""
    total = counted(policy)[warm]
    drawn = random.Random(f"{policy} {warm} {seed}").sample(range(2, total), min(count, total - 2))
    return [1, total, *drawn]


@pytest.mark.parametrize("warm", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("policy", ["recompute_all", "keep_matmuls"])
def test_a_step_broken_at_some_operations(policy: str, error: str, warm: bool) -> None:
    seen = Counter[str]()
    for at in places(policy, warm, 8, seed=len(error)):
        outcome = break_at(POLICIES[policy](), at, ERRORS[error], warm=warm, allocating=False)
        assert outcome.broke
        seen[outcome.where] += 1
    assert set(seen) == {"forward", "backward"}


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_broken_at_every_operation(policy: str, warm: bool) -> None:
    errors = list(ERRORS.values())
    for at in range(1, counted(policy)[warm] + 1):
        assert break_at(POLICIES[policy](), at, errors[at % len(errors)], warm=warm, allocating=False).broke


@pytest.mark.parametrize("error", ["out of memory on a device", "out of memory on the CPU"])
def test_memory_runs_out_at_some_allocation(error: str) -> None:
    for at in random.Random(error).sample(range(1, 60), 8):
        break_at(POLICIES["recompute_all"](), at, ERRORS[error], warm=True, allocating=True)


@pytest.mark.parametrize("policy", ["recompute_all", "keep_matmuls"])
def test_broken_steps_leave_no_memory_behind(policy: str) -> None:
    step, recording = Step.build(), POLICIES[policy]()
    run(step, recording)
    numbers = places(policy, True, 6, seed=3)

    def broken(at: int) -> None:
        with contextlib.suppress(Injected), Breaking(at, Injected):
            run(step, recording)
        step.model.zero_grad()
        step.x.grad = None

    def living() -> int:
        run(step, recording)  # torch holds on to the last failed backward until the next one
        step.model.zero_grad()
        step.x.grad = None
        gc.collect()
        kinds = [type(each) for each in gc.get_objects()]
        return sum(issubclass(kind, Tensor) or str(kind.__module__).startswith("lowtide.tape") for kind in kinds)

    for at in numbers:
        broken(at)
    before = living()
    for at in numbers:
        broken(at)
    assert living() <= before


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_break_do_not_disturb_threads_that_train(seed: int) -> None:
    """Random state is one for all threads, so these steps draw nothing."""

    def step(width: int) -> tuple[torch.nn.Module, Tensor]:
        model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width))
        with torch.no_grad():
            for n, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p) * (n + 1))
        return model, torch.linspace(-2, 2, 4 * width).view(4, width)

    def gradients(width: int, context: Callable[[], Any], times: int) -> list[Tensor | None]:
        model, x = step(width)
        for _ in range(times):
            with context():
                loss = model(x).exp().sin().sum()
            loss.backward()
        return [p.grad for p in model.parameters()]

    results: dict[int, list[Tensor | None]] = {}
    failures: list[BaseException] = []

    def train(width: int) -> None:
        try:
            results[width] = gradients(width, partial(lowtide.record, lowtide.policies.recompute_all), 6)
        except BaseException as error:  # whatever it is belongs into the main thread
            failures.append(error)

    def breaks(width: int) -> None:
        draw = random.Random(seed * 10 + width)
        for _ in range(8):
            with contextlib.suppress(Injected), Breaking(draw.randrange(1, 30), Injected):
                gradients(width, partial(lowtide.record, lowtide.policies.recompute_all), 1)

    threads = [threading.Thread(target=train, args=(w,)) for w in (4, 5)]
    threads += [threading.Thread(target=breaks, args=(w,)) for w in (6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for width in (4, 5):
        wanted = gradients(width, contextlib.nullcontext, 6)
        assert all(torch.equal(a, b) for a, b in zip(wanted, results[width], strict=True))  # type: ignore[arg-type]
    assert attached() == (0, 0, False)


@contextlib.contextmanager
def swallowed() -> Iterator[list[tuple[type[BaseException], str]]]:
    """Collect what Python cannot raise: signals that land in a callback of its collector; hypothesis has one."""
    found: list[tuple[type[BaseException], str]] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda missed: found.append((missed.exc_type, repr(missed.object)))
    try:
        yield found
    finally:
        sys.unraisablehook = before


def interrupt_at_random(count: int, seed: int, number: int = signal.SIGINT) -> Counter[str]:
    """Steps interrupted by real signals wherever they are; after each, a step of a fresh recording is exact."""
    with swallowed() as lost:
        seen = _interrupt_at_random(count, seed, number)
    assert {kind for kind, _ in lost} <= {KeyboardInterrupt}
    assert not any("lowtide" in where for _, where in lost)
    assert len(lost) <= max(2, 0.02 * count), lost
    assert seen.total() == count
    return seen


def _interrupt_at_random(count: int, seed: int, number: int) -> Counter[str]:
    draw, seen = random.Random(seed), Counter[str]()
    plain = Step.build()
    wanted = run(plain, contextlib.nullcontext())
    for _ in range(count):
        step, recording = Step.build(), lowtide.record(lowtide.policies.recompute_all)
        try:
            with interrupted_after(draw.uniform(0.0005, 0.015), number):  # half of a step, or a little more
                run(step, recording)
            seen["whole"] += 1
        except KeyboardInterrupt:
            seen["interrupted"] += 1
        assert attached() == (0, 0, False)
        assert torch.is_grad_enabled()
        fresh = Step.build()
        assert run(fresh, lowtide.record(lowtide.policies.recompute_all)) == wanted
        assert run(Step.build(), contextlib.nullcontext()) == wanted
    return seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_real_signals_anywhere(number: int) -> None:
    assert interrupt_at_random(25, 1, number)["interrupted"] > 5


def test_signals_that_were_held_back_are_handed_on_in_order() -> None:
    seen: list[str] = []

    def late(*_: object) -> None:
        seen.append("late")
        raise TimeoutError

    def ended(*_: object) -> None:
        seen.append("ended")
        raise SystemExit

    def section() -> None:
        with HeldBack():
            for number in handlers:
                signal.raise_signal(number)
            seen.append("the section ends")

    handlers = {signal.SIGALRM: late, signal.SIGTERM: ended, signal.SIGUSR2: lambda *_: seen.append("noted")}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with pytest.raises(SystemExit) as raised:
            section()
        assert isinstance(raised.value.__context__, TimeoutError)
        assert seen == ["the section ends", "late", "ended", "noted"]
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("raises", [False, True], ids=["whole", "raising"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "inside of itself"])
def test_an_interruption_before_the_first_instruction_of_the_exit(twice: bool, raises: bool) -> None:
    """As a signal's handler may raise there; when the exception arrives, nothing is attached any more."""
    step, recording, due = Step.build(), lowtide.record(lowtide.policies.recompute_all), [True]

    def interrupt(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is lowtide.Recording._leave_entry.__code__ and due:
            due.pop()
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with recording:
            with recording if twice else contextlib.nullcontext():
                step.loss()
            step.loss()
            if raises:
                raise ValueError
    except KeyboardInterrupt:
        assert attached() == (0, 0, False)
    finally:
        sys.settrace(before)
    assert not due
    assert run(Step.build(), recording) == run(Step.build(), contextlib.nullcontext())


def test_a_recording_is_left_by_whoever_entered_it() -> None:
    """Overlapping blocks of one recording end as many as began; a function that was fetched and let go of ends none."""
    step, recording = Step.build(), lowtide.record(lowtide.policies.recompute_all)

    def block() -> Generator[int, None, None]:
        with recording:
            yield attached()[0]
            step.loss()
            yield attached()[0]

    plain = attached()
    one, other = block(), block()
    assert next(one) == next(other) == next(one) > 0
    one.close()
    assert next(other) > 0
    other.close()
    assert attached() == plain

    leave = recording.__exit__
    with recording:
        del leave
        assert attached() != plain
        leave = recording.__exit__
        del leave
        assert attached() != plain
    assert attached() == plain
    recording.__enter__()
    recording.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="not entered"):
        recording.__exit__(None, None, None)
    assert attached() == plain


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_real_signals_anywhere() -> None:
    assert interrupt_at_random(1500, seed=2)["interrupted"] > 500


# ---- other ways in, other programs ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["policy", "budget"])
def test_an_attached_model_broken_at_some_operations(how: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Dropout(0.2),
                                                      torch.nn.Linear(64, 16)) for _ in range(3)))  # fmt: skip
    x = torch.randn(32, 16)

    def step() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        loss = model(x).square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    wanted, draw = step(), random.Random(how)
    options: dict[str, Any] = {"policy": lowtide.policies.segments("*")} if how == "policy" else {"budget": "90%"}
    with lowtide.attach(model, **options):
        for at in [1, 2, *(draw.randrange(3, 60) for _ in range(8))]:
            with contextlib.suppress(Injected), Breaking(at, Injected):
                step()
            assert attached() == (0, 0, False)
            assert all(torch.equal(a, b) for a, b in zip(wanted, step(), strict=True))
    assert "__call__" not in torch.nn.Sequential.__dict__
    assert all(torch.equal(a, b) for a, b in zip(wanted, step(), strict=True))


@contextlib.contextmanager
def survived(breaking: Breaking) -> Iterator[None]:
    """Swallow what was raised, or what the program made of it: torch.jit.trace raises an error of its own."""
    try:
        with breaking:
            yield
    except Exception:
        if breaking.raised is None:
            raise


COMPILED = "contexts-higher_order_operator"
"""Compiles, which other dispatch modes than lowtide's forbid."""
BREAKABLE = [case for case in CASES if not (case.fails or case.may_refuse or str(case) == COMPILED)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", BREAKABLE, ids=str)
def test_a_hazard_of_the_zoo_broken_at_some_operations(case: Case) -> None:
    """The same recording, entered again after it broke, gives what the plain step gives."""
    plain, draw = observe(case, contextlib.nullcontext), random.Random(case.name)
    for inside in (False, True):
        recording = lowtide.record(lowtide.policies.recompute_all)
        with Breaking(-1, Injected) as counter:
            observe(case, lambda: lowtide.record(lowtide.policies.recompute_all), backward_inside=inside)
        for _ in range(2):
            with survived(Breaking(draw.randrange(1, counter.seen + 1), Injected)):
                observe(case, lambda recording=recording: recording, backward_inside=inside)  # type: ignore[misc]
            assert attached() == (0, 0, False)
            assert_same(plain, observe(case, contextlib.nullcontext))  # the program itself survives it
            assert_same(plain, observe(case, lambda recording=recording: recording, backward_inside=inside))  # type: ignore[misc]


STARVED = """
import gc, resource, torch, lowtide
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)))
x = torch.randn(64, 256)

def step(x, context):
    model.zero_grad(set_to_none=True)
    with context:
        loss = model(x).square().sum()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]

class Nothing:
    def __enter__(self): pass
    def __exit__(self, *_): pass

recording = lowtide.record(lowtide.policies.recompute_all)
wanted, first = step(x, Nothing()), step(x, recording)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
broken = 0
for spare in range(40, 200, 8):
    resource.setrlimit(resource.RLIMIT_AS, (used + spare * 2**20, resource.RLIM_INFINITY))
    try:
        step(torch.randn(8192, 256), recording)
    except (RuntimeError, MemoryError):
        broken += 1
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    gc.collect()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert all(torch.equal(a, b) for a, b in zip(wanted, step(x, recording)))
print("broken", broken)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_memory_really_runs_out() -> None:
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 5
