"""Random programs, run plainly and under lowtide, compared bit for bit: `python -m tests.fuzz --help`.

```
rules ─> generation ─> Program ─> text ─> judging (plain, plain, lowtide) ─> shrinking ─> a small Program
                                    └─ support: the names it may use
```

A program is data, what it may contain is a table, and its text is the one thing that runs.
"""

from __future__ import annotations
