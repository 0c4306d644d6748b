"""The examples for frameworks run, each in under a minute."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.integration

NEEDS = {"with_transformers": "accelerate", "with_lightning": "lightning", "with_diffusers": "diffusers"}


def run(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        timeout=280,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 60  # of the processors, as a busy machine takes longer
    return done.stdout


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_trains_the_same(name: str) -> None:
    pytest.importorskip(NEEDS[name])
    assert "the same to the last bit" in run(f"examples.{name}")


def test_adapters_train_the_same() -> None:
    pytest.importorskip("peft")
    assert "the same to the last bit" in run("examples.with_transformers", "--lora")


@pytest.mark.parametrize("name", ["with_fsdp", "with_deepspeed"])
def test_two_processes_through_torchrun_train_the_same(name: str) -> None:
    if name == "with_deepspeed":
        pytest.importorskip("deepspeed")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert run(*torchrun, "-m", f"examples.{name}").count("the same to the last bit") == 2
