"""`sits-trt sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sits_trt.cli.app import JsonOption, SetOption, app, console, print_json
from sits_trt.console import show_sweep, stage_progress
from sits_trt.recipe import recipe_of_build


@app.command()
def sweep(
    builds: Annotated[list[Path], typer.Argument(help="One or more build directories.")],
    out: Annotated[Path, typer.Option(help="Directory of the report.")] = Path("builds/report"),
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure accuracy against latency of builds through their servers, and write the report."""
    from sits_trt.sweep import run_sweep

    section = recipe_of_build(builds[0], overrides or ()).sweep
    with stage_progress(console, "sweep") as progress:
        result = run_sweep(builds, section, out, progress)
    if as_json:
        print_json(result.to_dict())
    show_sweep(console, result, out / "report.html")
