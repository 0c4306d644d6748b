"""Every hand-made hazard and every real architecture under random keep sets, round after round: `./run sweep --help`.

```
subjects ─> Trial (round, case, seed) ─> setting ─> judged (plain, plain, lowtide) ─> Verdict ─> Totals
                                                       └─ in a process of its own, which may die or hang
```

Where the fuzzer draws programs, the sweep draws what is kept of programs that are known to be difficult.
"""

from __future__ import annotations
