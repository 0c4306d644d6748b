"""Which of the two a text on the command line names."""

from __future__ import annotations

import re
from pathlib import Path

from lowtide.configurations.configured import Configured
from lowtide.configurations.reading import ConfigurationError, read_config
from lowtide.configurations.scripted import Scripted, load_factory
from lowtide.hardware import Accelerator

FACTORY = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)")


def workload_of(
    source: str,
    hardware: Accelerator,
    *,
    lora: int = 0,
    targets: tuple[str, ...] = (),
    frozen: tuple[str, ...] = (),
) -> Configured | Scripted:
    """The workload that ``source`` names: a config.json or its folder, or ``FILE.py:FUNCTION``.

    Raises:
        ConfigurationError: it names nothing, or something that cannot be trained.
    """
    named = FACTORY.fullmatch(source)
    if named is None:
        if source.endswith(".py"):
            raise ConfigurationError(
                f"{source} needs the name of a function: {source}:FUNCTION, which returns (step, model)."
            )
        return Configured(read_config(Path(source)), hardware, lora=lora, targets=targets, frozen=frozen)
    if lora or targets or frozen:
        raise ConfigurationError(
            "A factory decides itself what is trained; adapters and freezing are for configurations."
        )
    return Scripted(load_factory(Path(named["file"]), named["name"]), source, hardware)
