"""Trials on processes of their own: one that dies or hangs is a finding like any other."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from .trials import MakeRecording, Trial, Verdict, judge, lowtide_recording

PATIENCE_SECONDS = 300.0  # for one trial, narrowing down included; the first one imports and builds as well


def work(connection: Connection, make: MakeRecording) -> None:
    """Judge each trial that comes, until None does, or whoever sends them is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while (trial := connection.recv()) is not None:
            connection.send(judge(trial, make))


class Worker:
    """One process, started when there is something to do and anew where it ended, and the trial it is at."""

    def __init__(self, make: MakeRecording) -> None:
        self.make = make
        self.trial: Trial | None = None
        self.process: SpawnProcess | None = None

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, child = context.Pipe()
        self.process = context.Process(target=work, args=(child, self.make), daemon=True)
        self.process.start()
        child.close()

    def begin(self, trial: Trial) -> None:
        if self.process is None:
            self.start()
        self.trial, self.since = trial, time.monotonic()
        self.connection.send(trial)

    def finish(self) -> tuple[Trial, Verdict]:
        """Take the verdict; make one up if the process has ended."""
        assert self.trial is not None
        assert self.process is not None
        trial, self.trial = self.trial, None
        try:
            return trial, self.connection.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            self.stop()
            return trial, Verdict("fails", f"ends the process with exit code {code}")

    def give_up(self) -> tuple[Trial, Verdict]:
        """End a process that hangs."""
        assert self.trial is not None
        trial, self.trial = self.trial, None
        self.stop()
        return trial, Verdict("fails", f"hangs: no verdict after {PATIENCE_SECONDS:.0f} s")

    def stop(self) -> None:
        if self.process is not None:
            self.connection.close()
            self.process.kill()
            self.process.join()
            self.process = None


def swept(
    trials: Iterator[Trial], jobs: int = 1, make: MakeRecording = lowtide_recording
) -> Iterator[tuple[Trial, Verdict]]:
    """Yield the verdict of every trial, in the order in which they come; trials are taken as workers are free."""
    workers = [Worker(make) for _ in range(jobs)]
    try:
        while True:
            for worker in workers:
                if worker.trial is None and (trial := next(trials, None)) is not None:
                    worker.begin(trial)
            busy = [worker for worker in workers if worker.trial is not None]
            if not busy:
                return
            ready = wait([worker.connection for worker in busy], 1.0)
            for worker in busy:
                if worker.connection in ready:
                    yield worker.finish()
                elif time.monotonic() - worker.since > PATIENCE_SECONDS:
                    yield worker.give_up()
    finally:
        for worker in workers:
            worker.stop()
