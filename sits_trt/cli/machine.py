"""`sits-trt version` and `sits-trt doctor`: what is installed, and what this machine can do."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from sits_trt import __version__
from sits_trt.cli.app import JsonOption, app, print_json
from sits_trt.console import show_doctor


@app.command()
def version() -> None:
    """Print the version of sits-trt."""
    print(__version__)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine has, and what it can build and run."""
    from sits_trt.doctor import examine

    report = examine(Path("builds"))
    if as_json:
        print_json(report.to_dict())
    else:
        show_doctor(Console(highlight=False), report.to_dict())
