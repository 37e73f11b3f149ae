"""What all commands share: the application, their common arguments, and how an error ends them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sits_trt.console import show_error
from sits_trt.errors import SitsError

app = typer.Typer(
    help="One recipe file to an INT4 large language model behind the Triton Inference Server.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
console = Console(stderr=True, highlight=False)

RecipeArgument = Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one, such as a100.")]
BuildArgument = Annotated[Path, typer.Argument(help="The directory that 'sits-trt build' wrote.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key of the recipe; repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


def main() -> None:
    """Entry point: an expected error is one sentence and exit code 2; any other is a bug and keeps its traceback."""
    try:
        app()
    except (SitsError, OSError) as error:
        show_error(console, error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))
