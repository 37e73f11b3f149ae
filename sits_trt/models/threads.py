"""How many threads torch computes with on a CPU that others use too."""

from __future__ import annotations

import os

import torch


def leave_a_core() -> None:
    """Let torch compute on all cores but one, unless OMP_NUM_THREADS says how many.

    Servers, their clients and other builds run here too, and each parallel loop ends only when its last thread has
    had its turn: with a core short, a step takes many times as long as on one thread.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) - 1)))
