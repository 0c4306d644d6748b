"""Golden texts of the tables of fit, advice and frontier, and what values look like in a notebook."""

from __future__ import annotations

import pytest

import lowtide
from estimates import made, too_large
from lowtide.advice import Advice, _costs
from lowtide.estimation import Fit
from lowtide.estimation.limits import Limit
from lowtide.estimation.trials import CHECKPOINTING, Option
from lowtide.reports import render_frontier, text_of
from lowtide.reports.content import Point
from tiny import gpt_step

FIT = """\
LlamaForCausalLM on H100: 4 × 8192, bfloat16, adamw
does not fit: 148 GiB to 159 GiB needed, 80.0 GiB there
150 GiB of tensors at the peak, in backward of the step (aten.mm.default)
1.00 s a step, 32,768 tokens/s

at the peak             bytes    share
──────────────────────────────────────────────────────
weights              37.5 GiB   25.0 %   ██████
gradients                 0 B    0.0 %
optimizer states     37.5 GiB   25.0 %   ██████
activations          75.0 GiB   50.0 %   ████████████
temporaries               0 B    0.0 %
inputs and buffers        0 B    0.0 %
there is             80.0 GiB            ████████████▊

what fits, fastest first                peak   of memory    time    results
───────────────────────────────────────────────────────────────────────────
fsdp over 8 ranks                   70.0 GiB        93 %   ×1.01   the same
8-bit optimizer and checkpointing   75.0 GiB        99 %   ×1.12     differ
checkpointing                       74.0 GiB        98 %   ×1.24   the same

assumed
  - bytes are those of tensors, within 1 %
"""
ADVICE = """\
LlamaForCausalLM on H100: 4 × 8192, bfloat16, adamw
does not fit: 148 GiB to 159 GiB needed, 80.0 GiB there
150 GiB of tensors at the peak, in backward of the step (aten.mm.default)
1.00 s a step, 32,768 tokens/s

Take checkpointing.
Mostly activations: checkpointing can bring the peak from 150 GiB to 60.0 GiB.

at the peak             bytes    share
──────────────────────────────────────────────────────
weights              37.5 GiB   25.0 %   ██████
gradients                 0 B    0.0 %
optimizer states     37.5 GiB   25.0 %   ██████
activations          75.0 GiB   50.0 %   ████████████
temporaries               0 B    0.0 %
inputs and buffers        0 B    0.0 %
there is             80.0 GiB            ████████████▊

each alone                        peak   of memory    time    results
─────────────────────────────────────────────────────────────────────
as asked                       150 GiB       199 %   ×1.00   the same
batch 2, accumulated over 2   90.0 GiB       119 %   ×1.02   the same
checkpointing                 74.0 GiB        98 %   ×1.24   the same
fsdp over 8 ranks             70.0 GiB        93 %   ×1.01   the same

what fits, fastest first                peak   of memory    time    results
───────────────────────────────────────────────────────────────────────────
fsdp over 8 ranks                   70.0 GiB        93 %   ×1.01   the same
8-bit optimizer and checkpointing   75.0 GiB        99 %   ×1.12     differ
checkpointing                       74.0 GiB        98 %   ×1.24   the same

step          1.24 s, 240 ms of it recomputation
throughput    ×0.81 of the step as asked
recomputed    240 Tflop a step
energy        868 J a step, 168 J of it recomputation
10,000 steps  3 h 27 min, 2.41 kWh

largest that fits  keeping all  checkpointing
batch                        1              5
length                    none          9,216

assumed
  - bytes are those of tensors, within 1 %
"""
FRONTIER = """\
GPT, 4 × 512

plan               peak   of plain     time
──────────────────────────────────────────────────────────────────────
planned        4.00 GiB    100.0 %   ×1.000   ████████████████████████
planned        3.00 GiB     75.0 %   ×1.052   ██████████████████
planned        1.00 GiB     25.0 %   ×1.300   ██████
keep_matmuls   3.50 GiB     87.5 %   ×1.100   █████████████████████
"""


def advice() -> Advice:
    found = too_large()
    best = found.tried[1]
    least = Option((CHECKPOINTING,), made(60, 1.33))
    return Advice(
        found, least, best, _costs(best, found.asked, 10_000), (Limit("batch", 1, 5, 1), Limit("length", 0, 9216, 128))
    )


def frontier() -> str:
    points = [
        Point("frontier", 4 << 30, 1.0, "frontier"),
        Point("frontier", 3 << 30, 1.0525, "frontier"),
        Point("frontier", 1 << 30, 1.3, "frontier"),
        Point("keep_matmuls", 7 << 29, 1.1, "by hand"),
    ]
    return text_of(render_frontier("GPT, 4 × 512", points))


def test_fit_as_a_table() -> None:
    assert str(too_large()) == FIT.strip("\n")


def test_a_step_that_fits_shows_no_options() -> None:
    fitting = Option((), made(40))
    shown = str(Fit("Model", fitting, (fitting,), ()))
    assert "what fits" not in shown
    assert "\nfits: 39.6 GiB to 42.4 GiB needed, 80.0 GiB there\n" in shown


def test_where_nothing_fits_the_nearest_is_named() -> None:
    asked = Option((), made(150))
    shown = str(Fit("Model", asked, (asked, Option((CHECKPOINTING,), made(100, 1.3))), ()))
    assert "Nothing that was tried fits. Nearest: checkpointing, 106 GiB." in shown


def test_advice_as_tables() -> None:
    assert str(advice()) == ADVICE.strip("\n")


def test_frontier_as_a_table() -> None:
    assert frontier() == FRONTIER.strip("\n")


@pytest.mark.parametrize("kind", ["plan", "graph", "timeline", "verdict", "measurement", "fit", "advice"])
def test_values_show_themselves_in_a_notebook(kind: str) -> None:
    own = gpt_step(blocks=2)
    graph = own.trace(optimizer="adamw")
    plan = lowtide.solve(graph, policy=lowtide.policies.segments())
    make = {
        "plan": lambda: plan,
        "graph": lambda: graph,
        "timeline": lambda: lowtide.simulate(graph, plan),
        "verdict": lambda: lowtide.verify(own.step, own.model, plan),
        "measurement": lambda: lowtide.measure(own.step, own.model, plan, rounds=1),
        "fit": too_large,
        "advice": advice,
    }
    shown = make[kind]()._repr_html_()
    assert shown.lstrip().startswith("<")
    assert "<script" not in shown
    assert shown.count("<pre") == shown.count("</pre>") >= 1
