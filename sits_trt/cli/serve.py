"""`sits-trt serve` and `sits-trt generate`: a build answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sits_trt.cli.app import BuildArgument, JsonOption, SetOption, app, console, print_json
from sits_trt.console import stage_progress
from sits_trt.recipe import recipe_of_build


@app.command()
def serve(
    build: BuildArgument,
    overrides: SetOption = None,
    free_ports: Annotated[bool, typer.Option("--free-ports", help="Take free ports, not the recipe's.")] = False,
    endpoints_file: Annotated[Path | None, typer.Option(help="Write the endpoints there as JSON once ready.")] = None,
) -> None:
    """Serve a build with the Triton Inference Server until Ctrl-C."""
    from sits_trt.console import show_endpoints
    from sits_trt.serving.serve import serve_until_stopped

    ports = [f"serving.{name}_port=0" for name in ("http", "grpc", "metrics")] if free_ports else []
    section = recipe_of_build(build, [*(overrides or ()), *ports]).serving
    with stage_progress(console, "starting") as progress:
        code = serve_until_stopped(
            build, section, lambda endpoints: show_endpoints(console, build, endpoints, endpoints_file), progress
        )
    sys.exit(code)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What the user says; with --raw the text to go on from.")],
    build: Annotated[
        Path | None, typer.Option(help="Build whose engine, or with --url whose tokenizer, is used.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="gRPC HOST:PORT of a running server; without it, no server is used.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt, by a running server or by the engine in this process; the text streams as it comes."""
    from sits_trt.answer import Question, answer

    question = Question(prompt, raw, system, max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
    parts = []
    for part in answer(question, build, url):
        parts.append(part)
        if not as_json:
            print(part.text, end="", flush=True)
    if as_json:
        print_json(vars(parts[-1]) | {"text": "".join(part.text for part in parts)})
    else:
        print()
