"""How much memory a device has left for a training step."""

from __future__ import annotations

import os
from pathlib import Path

import torch

RESERVE = 20
"""One part in so many of the device is left alone."""

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int:
    """Bytes that ``device`` has free, less a reserve of 5 % of the device.

    On a CUDA device that is what no process holds and what PyTorch's caching allocator holds without need. On the
    CPU it is what the system calls available, and no more than the control group of the process is left.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0, free + idle - total // RESERVE)
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = _available() or page * os.sysconf("SC_AVPHYS_PAGES")
    limit = _number(_CGROUP / "memory.max")
    if limit is not None and limit < total:
        used = (_number(_CGROUP / "memory.current") or 0) - _reclaimable()
        total, free = limit, min(free, limit - used)
    return max(0, free - total // RESERVE)


def _available() -> int | None:
    for line in _lines(_MEMINFO):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _reclaimable() -> int:
    rows = (line.split() for line in _lines(_CGROUP / "memory.stat"))
    return sum(int(row[1]) for row in rows if row[0] == "inactive_file")


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
