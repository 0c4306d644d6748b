"""What values look like: golden texts of a drawn step, and HTML that a module's name cannot break."""

from __future__ import annotations

from textwrap import dedent

import pytest
from rich.console import Console

import lowtide
from blocks import net
from lowtide.memory_table import MemoryRow, MemoryTable
from lowtide.reports.terminal import bar, html_of, text_of
from lowtide.reports.timeline import course

GELU = frozenset(op.site for op in net().ops if op.name == "aten.gelu.default")
PLAN = lowtide.Plan(GELU, structure=net().structure)


def test_the_memory_of_a_step_as_text() -> None:
    assert f"{net().memory_table(PLAN)}\n" == dedent("""\
        2.78 MiB at the peak, in backward of blocks.2.mlp.2 (aten.mul_backward.Tensor)

        kind                     bytes     share
        ─────────────────────────────────────────────────────────
        saved activations     1.56 MiB    56.2 %   █████████████▌
          addmm                768 KiB    27.0 %   ██████▌
          gelu                 256 KiB     9.0 %   ██▏
          ge                   192 KiB     6.7 %   █▋
          native_layer_norm    192 KiB     6.7 %   █▋
          add                  128 KiB     4.5 %   █▏
          embedding           64.0 KiB     2.2 %   ▌
        optimizer states       600 KiB    21.1 %   █████
        parameters             483 KiB    17.0 %   ████▏
        temporaries            128 KiB     4.5 %   █▏
          add_backward        64.0 KiB     2.2 %   ▌
          mul_backward        64.0 KiB     2.2 %   ▌
          mse_loss                 4 B     0.0 %
        gradients             32.0 KiB     1.1 %   ▎
        inputs                4.00 KiB     0.1 %

        module                   bytes     share
        ───────────────────────────────────────────────────────────
        blocks.0-2            1.82 MiB    65.3 %   ███████████████▋
        (optimizer states)     600 KiB    21.1 %   █████
        embed                  320 KiB    11.2 %   ██▊
        head                  64.0 KiB     2.2 %   ▌
        (inputs)              4.00 KiB     0.1 %
        (model)                    4 B     0.0 %
        """)


def test_many_operations_and_modules_are_cut_short_and_nothing_is_lost() -> None:
    rows = [MemoryRow(f"part{n}", "saved activations", f"op{n}", 1000 - n, 1) for n in range(40)]
    table = MemoryTable(tuple(rows), sum(row.bytes for row in rows), "in forward of part0")
    text = str(table)
    assert "  34 other operations" in text
    assert "24 other modules" in text
    assert len(text.splitlines()) < 40


def test_what_reads_as_nothing_is_put_together() -> None:
    rows = [MemoryRow("large", "parameters", "", 10**9, 1)]
    rows += [MemoryRow(f"small{n}", "parameters", "", 4, 1) for n in range(3)]
    table = MemoryTable(tuple(rows), 10**9 + 12, "at the start")
    assert "3 other modules" in str(table)


def test_a_timeline_as_text() -> None:
    assert f"{lowtide.simulate(net(), PLAN)}\n" == dedent("""\
        peak       2.78 MiB   in backward of blocks.2.mlp.2 (aten.mul_backward.Tensor)
        step       62.0 ms
        recompute  3.00 ms    3 operations run again
        bytes      ▄▄▅▅▅▆▆▆▅▅▅▆▇▇▇▇▆▆▆▇▇████████████████████▇█▇▇▇▇▇▇▇▇▇▇▆▇▆▆▆▆▆▆▆▅▆▆▅▆▅▅▅▅▅
        """)


def test_a_timeline_without_a_trail_has_no_course() -> None:
    text = str(lowtide.simulate(net(), frozenset(), trail=False))
    assert text.splitlines()[1:] == ["step       59.0 ms", "recompute  nothing"]


@pytest.mark.parametrize(
    ("fraction", "text"), [(0, ""), (1, "████"), (0.5, "██"), (0.25 / 8, "▏"), (2, "████"), (-1, "")]
)
def test_a_bar_is_as_long_as_its_fraction(fraction: float, text: str) -> None:
    assert bar(fraction, 4) == text


def test_the_course_shows_the_highest_of_each_part() -> None:
    assert course([0, 9, 0, 0], columns=2) == "█▁"
    assert course([1], columns=72) == "█"
    assert len(course(range(1000))) == 72


@pytest.mark.parametrize(
    "value",
    [net(), net().memory_table(), lowtide.simulate(net(), PLAN), PLAN, PLAN.explain(net())],
    ids=["graph", "memory table", "timeline", "plan", "explanation"],
)
def test_a_notebook_shows_the_same_text(value: object) -> None:
    html = value._repr_html_()  # type: ignore[attr-defined]
    assert html.startswith("<pre")
    assert str(value).splitlines()[0] in html


def test_names_are_text_not_markup() -> None:
    row = MemoryRow("[red]<script>", "parameters", "", 10, 1)
    table = MemoryTable((row,), 10, "in [bold]forward")
    assert "[red]<script>" in str(table)
    assert "in [bold]forward" in str(table)
    assert "<script>" not in table._repr_html_()
    plan = lowtide.Plan(frozenset({"[red]<script>/0:aten.add.Tensor/0"}))
    assert "[red]&lt;script&gt;" in plan._repr_html_()


def test_rich_prints_a_memory_table_with_colours() -> None:
    console = Console(force_terminal=True, color_system="standard", width=88, legacy_windows=False)
    with console.capture() as captured:
        console.print(net().memory_table())
    assert "\x1b[36m█" in captured.get()


def test_text_and_html_are_as_wide_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = text_of(net().memory_table()), html_of(net().memory_table())
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    assert (text_of(net().memory_table()), html_of(net().memory_table())) == wide
