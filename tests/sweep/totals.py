"""Add up verdicts and say what was tried and what failed."""

from __future__ import annotations

import dataclasses
from collections import Counter

from .trials import OUTCOMES, SHORT, Trial, Verdict, setting_of


@dataclasses.dataclass
class Totals:
    """Counts over all trials so far, and what did not agree."""

    case_count: int
    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    rounds: Counter[int] = dataclasses.field(default_factory=Counter)
    steps: int = 0
    long_steps: int = 0
    followed: int = 0
    asked_count: int = 0
    dropped_count: int = 0
    failures: list[tuple[Trial, Verdict]] = dataclasses.field(default_factory=list)
    apart: dict[str, Verdict] = dataclasses.field(default_factory=dict)

    def add(self, trial: Trial, verdict: Verdict) -> None:
        self.outcomes[verdict.outcome] += 1
        self.rounds[trial.round] += 1
        self.steps += verdict.steps
        self.long_steps += verdict.steps if verdict.steps > SHORT else 0
        self.followed += verdict.followed
        self.asked_count += verdict.asked_count
        self.dropped_count += verdict.dropped_count
        if verdict.outcome == "fails":
            self.failures.append((trial, verdict))
        elif verdict.outcome not in ("agrees", "refused"):
            self.apart[trial.name] = verdict

    def is_complete(self, number: int) -> bool:
        """Whether every case of a round has its verdict."""
        return self.rounds[number] == self.case_count

    def line(self) -> str:
        """Say in a few words how it stands."""
        return f"{self.outcomes.total()} trials, {self.steps} steps, {self.outcomes['fails']} fail"

    def lines(self) -> list[str]:
        """Write the totals."""
        whole = sum(map(self.is_complete, self.rounds))
        trials = self.outcomes.total()
        more = trials - whole * self.case_count
        counts = ", ".join(f"{self.outcomes[name]} {text}" for name, text in OUTCOMES.items())
        lines = [
            f"{trials} trials: {whole} whole rounds of {self.case_count} cases and {more} more",
            counts,
            f"{self.steps} steps under lowtide, {self.followed} of the {self.long_steps} in long trials followed",
            f"{self.asked_count} results asked about, {self.dropped_count} of them to be dropped",
        ]
        lines += [f"{v.outcome}: {name}: {v.difference}" for name, v in sorted(self.apart.items())]
        names = Counter(trial.name for trial, _ in self.failures)
        return [*lines, *(f"{count:6d} x {name} fails" for name, count in names.most_common())]


def described(trial: Trial, verdict: Verdict) -> str:
    """Write a failure: how to see it again, the first difference, what was drawn, what has to be dropped."""
    dropped = [f"  drops {site}" for site in verdict.dropped[:12]]
    more = [f"  and {len(verdict.dropped) - 12} more"] if len(verdict.dropped) > 12 else []
    return "\n".join([f"FAILS {trial.command}", f"  {verdict.difference}", f"  {setting_of(trial)}", *dropped, *more])
