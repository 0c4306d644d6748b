"""What lowtide's values look like: in a terminal, and in a notebook."""

from lowtide.reports.terminal import html_of, render_memory, text_of
from lowtide.reports.timeline import timeline_text

__all__ = ["html_of", "render_memory", "text_of", "timeline_text"]
