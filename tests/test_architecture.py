"""Which part may know which: read from the import statements of the files that exist.

units, errors <- graph, plan <- cost, simulation <- solvers | reports   without torch
tape <- policies, recording <- checkpointing, tracing, ...              with torch
demo, integrations, cli                                                 on top, known by nobody below
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lowtide"
LONGEST_FILE_LINES = 400

BASE = {"units", "errors", "structure"}
SHOWN = {"reports", "memory_table", "plan_text", "explanation"}
"""What shows a value; the value's own methods import it, when they are called."""
VALUES = {"graph", "plan", "repetition", "simulation"}
TORCH_FREE = {
    "errors": set(),
    "structure": set(),
    "units": {"errors"},
    "hardware": BASE,
    "repetition": BASE,
    "graph": BASE | {"plan"} | SHOWN,  # plan for types alone
    "plan": BASE | {"graph", "repetition"} | SHOWN,
    "plan_text": BASE | VALUES,
    "explanation": BASE | VALUES | SHOWN,
    "memory_table": BASE | VALUES | SHOWN,
    "cost": BASE | {"graph", "plan", "hardware"},
    "simulated_step": BASE | {"graph"},
    "simulation": BASE | {"graph", "plan", "cost", "hardware", "simulated_step"} | SHOWN,
    "solvers": BASE | {"graph", "plan", "cost", "hardware", "simulation"},
    "course": BASE | VALUES | {"simulated_step"},
    "reports": BASE | VALUES | SHOWN | {"cost", "hardware", "course", "estimation", "advice"},  # the last two for types
}
"""Part -> the parts of lowtide that it may import, besides itself. None of them imports torch."""

WITH_TORCH = {"tape": BASE}
"""The same for parts that import torch and are held to a list."""

TOP = {"cli", "configurations", "demo", "integrations", "__main__"}
"""These may import everything, the package's public face included, and nothing else imports them."""

ABOVE_TRACING = {"solvers", "attachment", "verification", "measurement", "advice"}

TORCH = {"torch", "torchvision", "functorch"}
MAY_IMPORT_FRAMEWORKS = {"integrations", "configurations"}
FRAMEWORKS = {"accelerate", "deepspeed", "diffusers", "lightning", "peft", "timm", "transformers", "trl"}


@dataclass(frozen=True)
class Import:
    """A statement in `file` (below src/lowtide) that imports `module`, in dotted form."""

    file: str
    line: int
    module: str

    @property
    def importer(self) -> str:
        return part_of(self.file)

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]

    @property
    def imported(self) -> str | None:
        """The part of lowtide that is imported; "" for the package's face, None for what is not lowtide's."""
        return self.module.partition(".")[2].partition(".")[0] if self.root == "lowtide" else None

    def __str__(self) -> str:
        return f"src/lowtide/{self.file}:{self.line} imports {self.module}"


def part_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


def imports_of(path: Path, package: Path = PACKAGE) -> Iterator[Import]:
    """Yield every import of the file; those in functions and under TYPE_CHECKING are knowledge too."""
    file = path.relative_to(package).as_posix()
    inside = ("lowtide", *file.split("/")[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: len(inside) - node.level + 1] if node.level else ()
            source = ".".join((*above, *([node.module] if node.module else [])))
            if source == "lowtide":
                for alias in node.names:
                    yield Import(file, node.lineno, f"lowtide.{alias.name}" if is_part(alias.name, package) else source)
            else:
                yield Import(file, node.lineno, source)


def is_part(name: str, package: Path) -> bool:
    return (package / name).is_dir() or (package / f"{name}.py").is_file()


FILES = sorted(PACKAGE.rglob("*.py"))
IMPORTS = [found for path in FILES for found in imports_of(path)]


def offenders(*found: Import) -> str:
    return "\n".join(map(str, found))


@pytest.mark.parametrize(("part", "allowed"), sorted((TORCH_FREE | WITH_TORCH).items()))
def test_a_part_imports_no_part_above_it(part: str, allowed: set[str]) -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.importer == part and found.imported is not None and found.imported not in allowed | {part}
    ]
    assert not wrong, offenders(*wrong)


@pytest.mark.parametrize("part", sorted(TORCH_FREE))
def test_a_part_without_torch_imports_no_torch(part: str) -> None:
    wrong = [found for found in IMPORTS if found.importer == part and found.root in TORCH | FRAMEWORKS]
    assert not wrong, offenders(*wrong)


@pytest.mark.parametrize("part", ["graph", "plan", "simulation"])
def test_a_value_imports_what_shows_it_only_when_asked(part: str) -> None:
    tree = ast.parse((PACKAGE / f"{part}.py").read_text(encoding="utf-8"))
    at_once = [n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)]
    assert not {module.partition(".")[2].partition(".")[0] for module in at_once} & SHOWN


def test_tracing_does_not_know_who_uses_it() -> None:
    wrong = [found for found in IMPORTS if found.importer == "tracing" and found.imported in ABOVE_TRACING]
    assert not wrong, offenders(*wrong)


def test_only_the_top_imports_the_top() -> None:
    wrong = [found for found in IMPORTS if found.imported in TOP and found.importer not in TOP]
    assert not wrong, offenders(*wrong)


def test_integrations_do_not_know_the_command_line_nor_the_demo() -> None:
    wrong = [
        found for found in IMPORTS if found.importer == "integrations" and found.imported in TOP - {"integrations"}
    ]
    assert not wrong, offenders(*wrong)


def test_only_the_top_imports_the_public_face() -> None:
    wrong = [found for found in IMPORTS if found.imported == "" and found.importer not in TOP | {"__init__"}]
    assert not wrong, offenders(*wrong)


def test_only_integrations_and_configurations_import_a_framework() -> None:
    wrong = [found for found in IMPORTS if found.root in FRAMEWORKS and found.importer not in MAY_IMPORT_FRAMEWORKS]
    assert not wrong, offenders(*wrong)


def test_importing_lowtide_imports_no_part_of_the_top() -> None:
    wrong = [found for found in IMPORTS if found.importer == "__init__" and found.imported in TOP]
    assert not wrong, offenders(*wrong)


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples"])
def test_no_file_is_longer_than_four_hundred_lines(folder: str) -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert not {file: lines for file, lines in lengths.items() if lines > LONGEST_FILE_LINES}


def test_no_file_is_named_after_nothing() -> None:
    assert not {path.name for path in FILES} & {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}


def test_every_form_of_import_is_seen(tmp_path: Path) -> None:
    (tmp_path / "tape").mkdir()
    (tmp_path / "errors.py").touch()
    file = tmp_path / "tape" / "replay.py"
    file.write_text(
        "import torch.nn as nn\n"
        "from lowtide.units import format_bytes\n"
        "from lowtide import errors, record\n"
        "from . import buffers\n"
        "from .. import errors\n"
        "from ..solvers import frontier\n"
        "def late():\n    import lowtide\n"
    )
    assert [(found.module, found.imported) for found in imports_of(file, tmp_path)] == [
        ("torch.nn", None),
        ("lowtide.units", "units"),
        ("lowtide.errors", "errors"),
        ("lowtide", ""),
        ("lowtide.tape", "tape"),
        ("lowtide.errors", "errors"),
        ("lowtide.solvers", "solvers"),
        ("lowtide", ""),
    ]
