"""`sits-trt convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sits_trt.artifacts import BuildDirectory, read_manifest
from sits_trt.cli.app import JsonOption, app, console, print_json
from sits_trt.console import stage_progress
from sits_trt.recipe import recipe_of_build


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="A build, a checkpoint directory in any format that is read, or a GGUF file.")
    ],
    to: Annotated[str, typer.Option("--to", help="hf (plain), autoawq, modelopt, compressed-tensors or sits.")],
    out: Annotated[Path, typer.Option(help="The new directory.")],
    dtype: Annotated[
        str | None, typer.Option(help="Type of what is not quantized, such as float16; default: as in the source.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint in another format, with the codes, scales and zero points that it has."""
    from sits_trt.checkpoint import convert as convert_checkpoint

    with stage_progress(console, "convert") as progress:
        made = convert_checkpoint(_weights(source), to, out, dtype, progress)
    if as_json:
        print_json(made)
    else:
        megabytes = made["weights_bytes"] / 1e6
        console.print(f"{out}: {made['format']}, {made['quantized_layers']} quantized layers, {megabytes:.1f} MB")


def _weights(source: str) -> Path | str:
    """Return the checkpoint that a build serves; any other source as it is."""
    layout = BuildDirectory(Path(source))
    if not layout.recipe_file.is_file():
        return source
    plain = recipe_of_build(layout.root).quantization.scheme == "none"
    directory, kind = (layout.checkpoint, "checkpoint") if plain else (layout.quantized, "quantized")
    read_manifest(directory, kind)
    return directory
