"""Tables with bars for a terminal, the same as plain text, and as HTML for a notebook."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.memory_table import MemoryTable

WIDTH = 88
"""Columns of plain text and HTML."""
BAR = 24
"""Columns of a bar of 100 %."""
NAME = 40
"""Columns of a name, at most."""
OPS = 6
"""How many operations of one kind are shown."""
MODULES = 16
EIGHTHS = " ▏▎▍▌▋▊▉"

Line = tuple[str, int, str]
"""Name, bytes, style."""

_FRAME = '<pre style="font-family:monospace;line-height:1.2">{code}</pre>'


def render_memory(table: MemoryTable) -> RenderableType:
    """Lay out what fills the peak: by kind, activations and temporaries by operation, then by module."""
    total = max(1, table.total_bytes)
    kinds: list[Line] = []
    for kind, size in table.kinds:
        kinds.append((kind, size, "bold"))
        made = [(op, part) for op, part in table.ops(kind) if op]
        kinds += [(f"  {op}", part, "dim") for op, part in _shortened(made, total, OPS, "operations")]
    modules = [(name, size, "") for name, size in _shortened(table.modules, total, MODULES, "modules")]
    width = min(NAME, max(len(name) for name, _, _ in [*kinds, *modules, ("module", 0, "")]))
    title = Text(f"{format_bytes(table.total_bytes)} at the peak, {table.where}", style="bold")
    return Group(title, Text(), _bars("kind", kinds, total, width), Text(), _bars("module", modules, total, width))


def bar(fraction: float, width: int = BAR) -> str:
    """``fraction`` of ``width`` columns, to an eighth of a column.

    >>> bar(0.5, 4)
    '██'
    """
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def text_of(shown: RenderableType, width: int = WIDTH) -> str:
    """``shown`` as plain text without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def html_of(shown: RenderableType, width: int = WIDTH) -> str:
    """``shown`` as a piece of HTML that needs nothing else; a string is taken as it is, not as markup."""
    console = Console(file=io.StringIO(), width=width, record=True, legacy_windows=False)
    console.print(Text(shown) if isinstance(shown, str) else shown)
    return console.export_html(inline_styles=True, code_format=_FRAME)


def _bars(heading: str, lines: list[Line], total: int, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(heading, overflow="fold", width=width)
    table.add_column("bytes", justify="right", no_wrap=True, width=8)
    table.add_column("share", justify="right", no_wrap=True, width=7)
    table.add_column("", no_wrap=True)
    for name, size, style in lines:
        share = size / total
        cells = format_bytes(size), f"{100 * share:.1f} %", Text(bar(share), style="cyan")
        table.add_row(Text(name, style=style), *cells)
    return table


def _shortened(items: Sequence[tuple[str, int]], total: int, most: int, what: str) -> list[tuple[str, int]]:
    """The largest ``most`` items, without those that read 0.0 %; two or more others as one."""
    shown = min(most, sum(size >= total / 2000 for _, size in items))
    others = items[shown:]
    if len(others) < 2:
        return list(items)
    return [*items[:shown], (f"{len(others)} other {what}", sum(size for _, size in others))]
