"""`sits-trt eval`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from sits_trt.cli.app import BuildArgument, JsonOption, app, console, print_json
from sits_trt.console import WORST_LAYERS, show_evaluation, stage_progress
from sits_trt.recipe import recipe_of_build

_RECIPE = "default: sweep.accuracy of the recipe"


@app.command("eval")
def evaluate(
    build: BuildArgument,
    text: Annotated[
        str | None, typer.Option(help=f"'pydoc', a text file, or a .jsonl file with a 'text' key a line; {_RECIPE}.")
    ] = None,
    blocks: Annotated[int | None, typer.Option(help=f"Blocks of the text, from the end of a file; {_RECIPE}.")] = None,
    block_tokens: Annotated[int | None, typer.Option(help=f"Tokens in a block; {_RECIPE}.")] = None,
    prompts: Annotated[int | None, typer.Option(help=f"Prompts whose greedy answers are compared; {_RECIPE}.")] = None,
    exact_match_tokens: Annotated[int | None, typer.Option(help=f"Length of those answers; {_RECIPE}.")] = None,
    layers: Annotated[int, typer.Option(min=0, help="How many of the worst layers are shown.")] = WORST_LAYERS,
    as_json: JsonOption = False,
) -> None:
    """Measure what a build loses against its fp16 model: perplexity, KL, agreement, equal answers, worst layers."""
    from sits_trt.evaluation import evaluate_build

    given = {
        "text": text,
        "blocks": blocks,
        "block_tokens": block_tokens,
        "prompts": prompts,
        "exact_match_tokens": exact_match_tokens,
    }
    overrides = [
        f"sweep.accuracy.{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in given.items()
        if value is not None
    ]
    section = recipe_of_build(build, overrides).sweep.accuracy
    with stage_progress(console, "eval") as progress:
        found = evaluate_build(build, section, progress)
    if as_json:
        print_json(found.to_dict())
    else:
        show_evaluation(Console(highlight=False), found, layers)
