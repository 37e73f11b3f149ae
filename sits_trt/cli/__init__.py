"""The command line. Each command is thin: it parses, calls a room, and shows what came out.

One module for each group of commands; `sits-trt --help` lists them in the order in which they are imported here.
What a command calls is imported inside it, so that help and errors of spelling need no torch.
"""

from sits_trt.cli import build, recipe, engine, serve, evaluate, sweep, convert, machine  # noqa: I001 -- as in the help
from sits_trt.cli.app import app, main

__all__ = ["app", "build", "convert", "engine", "evaluate", "machine", "main", "recipe", "serve", "sweep"]
