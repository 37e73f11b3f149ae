"""The GPUs (and the CPU) that a recipe may target, with the figures that a plan needs."""

from __future__ import annotations

from dataclasses import dataclass

from sits_trt.errors import RecipeError, did_you_mean


@dataclass(frozen=True)
class Sku:
    """One target. `sm` is None for the CPU.

    Memory and bandwidth are the vendor's data-sheet values; NVLink bandwidth is the sum of both directions.
    """

    name: str
    sm: int | None
    memory_gb: float
    bandwidth_gb_s: float
    nvlink_gb_s: float


SKUS = {
    sku.name: sku
    for sku in (
        Sku("a100-40gb", 80, 40, 1555, 600),
        Sku("a100-80gb", 80, 80, 2039, 600),
        Sku("h100", 90, 80, 3352, 900),
        Sku("h200", 90, 141, 4800, 900),
        Sku("l40s", 89, 48, 864, 0),
        Sku("rtx5090", 120, 32, 1792, 0),
        Sku("cpu", None, 0, 0, 0),
    )
}


def find_sku(name: str) -> Sku:
    """Return the SKU called `name`. Raises RecipeError when there is none."""
    if name not in SKUS:
        raise RecipeError(
            f"unknown SKU '{name}'{did_you_mean(name, list(SKUS))}; known: {', '.join(SKUS)}", "target.sku"
        )
    return SKUS[name]
