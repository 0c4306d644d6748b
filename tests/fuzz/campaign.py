"""Many programs on several processes: a worker that dies or hangs is a finding like any other."""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .generation import Tally, draw_program
from .judging import Verdict, judge
from .programs import Decisions, Setting, script
from .recorders import MakeRecorder, bystander_recorder, lowtide_recorder
from .shrinking import Case, Shrinker

PATIENCE_SECONDS = 120.0  # for one program, shrinking included
SHRINK_SECONDS = 60.0


@dataclasses.dataclass
class Result:
    """What became of one program. `small` is the shrunk program as text."""

    seed: int
    verdict: Verdict
    rules: Counter[str]
    tally: Tally
    small: str = ""
    bucket: str = ""


def draw_setting(seed: int) -> Setting:
    """Draw what is asked of the recorder: share of kept ops, which checks, one recording or several."""
    rng = random.Random(f"setting {seed}")
    share = rng.choice([0.0, 0.0, 0.25, 0.5, 0.75])
    check: Any = rng.choice(["new", "never", "always", "never"])
    every = rng.choice([0, 0, 2]) if check == "new" else 0
    return Setting(Decisions(seed, share), check, every, rng.random() < 0.5, rng.random() < 0.3)


def search(
    seed: int,
    make: MakeRecorder = lowtide_recorder,
    shrink: bool = True,
    announce: Callable[[str], None] = lambda text: None,
) -> Result:
    """Draw the program of this seed, announce it, judge it; make it small if it fails."""
    tally = Tally()
    program, setting = draw_program(seed, tally), draw_setting(seed)
    announce(script(program, setting, f"Program {seed}"))
    verdict = judge(program, setting, make)
    result = Result(seed, verdict, Counter(i.rule for i in program.body), tally)
    if verdict.outcome != "fails":
        return result
    title = f"Program {seed} {verdict.signature}"
    result.small, result.bucket = script(program, setting, title), verdict.signature
    again = judge(program, setting, make)
    if again.outcome != "fails":
        result.bucket = f"{verdict.signature} | only once, then {again.outcome} {again.signature}"
    elif shrink:
        shrinker = Shrinker(Case(program, setting), make, SHRINK_SECONDS)
        small = shrinker.run()
        result.small = script(small.program, small.setting, title)
        result.bucket = bucket(small, shrinker.verdict)
    return result


def bucket(case: Case, verdict: Verdict) -> str:
    """Name a failure so that programs with one cause fall together."""
    if verdict.signature.startswith("raises") and "(in " in verdict.signature:
        return verdict.signature
    rules = sorted({i.rule for i in case.program.body})
    dropped = sorted({name for name, _ in case.setting.decisions.flips})
    alone = judge(case.program, case.setting, bystander_recorder).outcome == "fails"
    note = " | so does a dispatch mode that does nothing" if alone else ""
    return f"{verdict.signature} | {', '.join(rules)} | drops {', '.join(dropped)}{note}"


def work(connection: Connection, seeds: range, make: MakeRecorder, shrink: bool) -> None:
    """Judge programs one after the other and send each result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    for seed in seeds:
        connection.send(f"python -m tests.fuzz --show {seed}  # died while it was drawn")
        connection.send(search(seed, make, shrink, connection.send))
    connection.close()


@dataclasses.dataclass
class Worker:
    """One process and the seeds it has still to do."""

    seeds: range
    make: MakeRecorder
    shrink: bool
    current: str = ""  # the program at hand, as text

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, child = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(child, self.seeds, self.make, self.shrink), daemon=True)
        self.process.start()
        child.close()

    def receive(self) -> Iterator[Result]:
        """Take the next message; make up a result for the program that killed the process."""
        try:
            message: str | Result = self.connection.recv()
        except EOFError:
            self.process.join()
            yield self.restart(f"kills the process with exit code {self.process.exitcode}")
            return
        if isinstance(message, str):
            self.current = message
        else:
            self.seeds = self.seeds[1:]
            yield message

    def restart(self, signature: str) -> Result:
        """End the process, blame the program it was at, and go on behind it."""
        seed, self.seeds = self.seeds[0], self.seeds[1:]
        self.stop()
        if self.seeds:
            self.start()
        return Result(seed, Verdict("fails", signature), Counter(), Tally(), self.current, signature)

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


def run_campaign(
    seeds: range, jobs: int, make: MakeRecorder = lowtide_recorder, shrink: bool = True
) -> Iterator[Result]:
    """Yield a result for every seed, in the order in which they come."""
    workers = [Worker(seeds[job::jobs], make, shrink) for job in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        while busy := [worker for worker in workers if worker.seeds]:
            ready = wait([worker.connection for worker in busy], PATIENCE_SECONDS)
            if not ready:
                yield from (worker.restart("hangs") for worker in busy)
            for worker in busy:
                if worker.connection in ready:
                    yield from worker.receive()
    finally:
        for worker in workers:
            worker.stop()
