"""Add up the results of a campaign and say what was tried, what ran and what failed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

from .campaign import Result
from .rules import KINDS

OUTCOMES = {
    "agrees": "agree",
    "refused": "refused by lowtide alone",
    "torch": "changed by any dispatch mode",
    "fails": "fail",
    "discarded": "discarded",
}


@dataclasses.dataclass
class Summary:
    """Counts over all programs so far, and one small program for each kind of failure."""

    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    discarded: Counter[str] = dataclasses.field(default_factory=Counter)
    rules: Counter[str] = dataclasses.field(default_factory=Counter)
    asked: Counter[str] = dataclasses.field(default_factory=Counter)
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    kept: Counter[str] = dataclasses.field(default_factory=Counter)
    warned: Counter[str] = dataclasses.field(default_factory=Counter)
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    buckets: dict[str, list[Result]] = dataclasses.field(default_factory=dict)
    tried: int = 0
    accepted: int = 0
    finite: int = 0
    plainly_refused: int = 0

    def add(self, result: Result) -> None:
        verdict = result.verdict
        self.outcomes[verdict.outcome] += 1
        self.tried += result.tally.tried
        self.accepted += result.tally.accepted
        self.refused += result.tally.refused
        if verdict.outcome == "discarded":
            self.discarded[verdict.signature[:60]] += 1
            return
        self.rules += result.rules
        self.asked += verdict.asked
        self.dropped += Counter(name for name, _ in verdict.dropped)
        self.kept += verdict.kept
        self.warned += verdict.warned
        self.finite += verdict.finite
        self.plainly_refused += verdict.plainly_refused
        if verdict.outcome == "fails":
            self.buckets.setdefault(result.bucket, []).append(result)

    def lines(self, details: bool) -> list[str]:
        """Write the summary; with `details` every table in full."""
        programs = sum(self.outcomes.values())
        ran = max(1, programs - self.outcomes["discarded"])
        kinds = Counter({k: sum(self.rules[r.name] for r in rules) for k, rules in KINDS.items()})
        idle = [r.name for rules in KINDS.values() for r in rules if not self.rules[r.name]]
        outcomes = ", ".join(f"{self.outcomes[name]} {text}" for name, text in OUTCOMES.items())
        lines = [
            f"{programs} programs: {outcomes}; {ran / max(1, programs):.1%} run plainly and repeat",
            f"{self.accepted} of {self.tried} instructions run, {self.rules.total() / ran:.1f} a program",
            f"{self.finite / ran:.1%} have finite gradients; plain PyTorch refuses {self.plainly_refused}",
            f"{self.asked.total()} ops asked about, {self.dropped.total()} of them dropped",
            f"instructions by kind: {listing(kinds)}",
            f"rules never used: {', '.join(idle)}",
        ]
        for title, table in (
            ("discarded because", self.discarded),
            ("warnings", self.warned),
            ("kept because", self.kept),
        ):
            lines += [
                f"{title}:",
                *(f"  {n:6d} {text}" for text, n in table.most_common(None if details else 12)),
            ]
        if details:
            lines += [
                "instructions: " + listing(self.rules),
                "ops: " + listing(self.asked),
                "refused: " + listing(self.refused),
            ]
        for bucket, results in sorted(self.buckets.items(), key=lambda item: -len(item[1])):
            lines.append(f"{len(results):6d} x {bucket}  (seeds {', '.join(str(r.seed) for r in results[:8])})")
        return lines

    def save(self, folder: Path) -> list[Path]:
        """Write the shortest program of each kind of failure into a folder; return the files."""
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for bucket, results in self.buckets.items():
            smallest = min(results, key=lambda r: len(r.small))
            files.append(folder / f"program_{smallest.seed}.py")
            files[-1].write_text(f"{smallest.small}\n# {bucket}\n# also seeds {[r.seed for r in results]}\n")
        return files


def listing(table: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in table.most_common())
