"""Measurements that back the published figures; `python -m benchmarks.NAME` prints each of them.

Importing this package comes before importing torch in such a run, and so it is here that the number of
threads is set: CPU seconds of several threads that wait for each other say little.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else every profile writes two lines of its own to standard error
