"""`sits-trt build`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sits_trt.cli.app import JsonOption, RecipeArgument, SetOption, app, console, print_json
from sits_trt.console import WORST_LAYERS, StageLines, show_layers, stage_progress
from sits_trt.errors import BudgetError
from sits_trt.layer_report import read_report
from sits_trt.recipe import load_recipe


@app.command()
def build(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="Build directory; default: builds/NAME of the recipe.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Build checkpoint, INT4 weights, kernels, graph, engine and model repository; what is unchanged is kept."""
    from sits_trt.pipeline import BuildLine

    loaded = load_recipe(recipe, overrides or ())
    directory = out or Path("builds") / loaded.name
    lines = StageLines(console, loaded, directory)
    results = []
    try:
        for result in BuildLine(loaded, directory, lambda name: stage_progress(console, name)).run():
            lines.finished(result.name, result.rebuilt, result.seconds, result.directory)
            results.append(
                {
                    "stage": result.name,
                    "directory": str(result.directory),
                    "rebuilt": result.rebuilt,
                    "seconds": result.seconds,
                }
            )
    except BudgetError as error:
        show_layers(console, read_report(error.report).layers, WORST_LAYERS)
        raise
    lines.summary()
    if as_json:
        print_json({"build": str(directory), "recipe": loaded.name, "stages": results})
