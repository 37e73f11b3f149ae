"""`sits-trt engine ...`: look at engines."""

from __future__ import annotations

import typer
from rich.console import Console

from sits_trt.cli.app import BuildArgument, JsonOption, app, print_json
from sits_trt.console import show_engine

engine_app = typer.Typer(no_args_is_help=True, help="Look at engines.")
app.add_typer(engine_app, name="engine")


@engine_app.command("inspect")
def engine_inspect(build: BuildArgument, as_json: JsonOption = False) -> None:
    """Show an engine's manifest, bindings, profiles and plugins."""
    from sits_trt.engine import inspect_engine

    directory = build / "engine" if (build / "engine").is_dir() else build
    found = inspect_engine(directory)
    if as_json:
        print_json(found)
    else:
        show_engine(Console(highlight=False), found)
