"""What lowtide's values look like: in a terminal, in a notebook, and as a page."""

from lowtide.reports.advice_table import advice_text, render_advice
from lowtide.reports.fit_table import fit_text, render_fit
from lowtide.reports.frontier_table import render_frontier
from lowtide.reports.terminal import html_of, render_memory, text_of
from lowtide.reports.timeline import timeline_text

__all__ = [
    "advice_text",
    "fit_text",
    "html_of",
    "render_advice",
    "render_fit",
    "render_frontier",
    "render_memory",
    "text_of",
    "timeline_text",
]
