"""A small GPT trained on real text under several ways to spend memory, side by side."""

from __future__ import annotations
