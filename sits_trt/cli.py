"""The command line. Each command is thin: it parses, calls a room, and shows what came out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sits_trt import __version__
from sits_trt.console import StageLines, show_doctor, show_engine, show_error, show_sweep, stage_progress
from sits_trt.errors import SitsError
from sits_trt.recipe import SKUS, Recipe, load_recipe, recipe_of_build

app = typer.Typer(
    help="One recipe file to an INT4 large language model behind the Triton Inference Server.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
recipe_app = typer.Typer(no_args_is_help=True, help="Look at recipes.")
engine_app = typer.Typer(no_args_is_help=True, help="Look at engines.")
app.add_typer(recipe_app, name="recipe")
app.add_typer(engine_app, name="engine")
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


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


@app.command()
def version() -> None:
    """Print the version of sits-trt."""
    print(__version__)


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
    lines.summary()
    if as_json:
        _print_json({"build": str(directory), "recipe": loaded.name, "stages": results})


@recipe_app.command("show")
def recipe_show(recipe: RecipeArgument, overrides: SetOption = None) -> None:
    """Print a recipe with its blocks, overrides and defaults resolved, as JSON (which is YAML, too)."""
    print(load_recipe(recipe, overrides or ()).model_dump_json(indent=2))


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    _print_json(Recipe.model_json_schema())


@recipe_app.command("skus")
def recipe_skus() -> None:
    """Print the targets that a recipe may name."""
    _print_json({name: {key: value for key, value in vars(sku).items() if key != "name"} for name, sku in SKUS.items()})


@engine_app.command("inspect")
def engine_inspect(build: BuildArgument, as_json: JsonOption = False) -> None:
    """Show an engine's manifest, bindings, profiles and plugins."""
    from sits_trt.engine import inspect_engine

    directory = build / "engine" if (build / "engine").is_dir() else build
    found = inspect_engine(directory)
    if as_json:
        _print_json(found)
    else:
        show_engine(Console(highlight=False), found)


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
        _print_json(vars(parts[-1]) | {"text": "".join(part.text for part in parts)})
    else:
        print()


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
        _print_json(result.to_dict())
    show_sweep(console, result, out / "report.html")


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine has, and what it can build and run."""
    from sits_trt.doctor import examine

    report = examine(Path("builds"))
    if as_json:
        _print_json(report.to_dict())
    else:
        show_doctor(Console(highlight=False), report.to_dict())
