"""What the command line shows: progress bars with time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sits_trt.errors import SitsError
from sits_trt.layer_report import LayerError
from sits_trt.progress import Progress as ProgressCallback
from sits_trt.recipe.schema import Recipe
from sits_trt.serving.ports import Endpoints

if TYPE_CHECKING:
    from sits_trt.evaluation import Evaluation
    from sits_trt.sweep import SweepResult

PLAIN_INTERVAL_S = 10.0
"""Where there is no terminal, a stage reports at most this often."""
WORST_LAYERS = 8
"""Quantized layers that are shown where nobody says how many."""

_REFUSALS = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.EIO),
        *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
    }
)
"""What the operating system says of a path or a disk that the user can mend, whichever stage meets it."""


def show_error(console: Console, error: SitsError | OSError) -> None:
    """Print an expected error as one sentence. Any other OSError is a bug and raised again."""
    sentence = " ".join(str(error).split())
    if isinstance(error, OSError):
        if error.errno not in _REFUSALS:
            raise error
        place = f"'{error.filename}'" if error.filename else "a file"
        sentence = f"{place} cannot be read or written ({error.strerror}); mend that or use another path"
    console.print(f"error: {sentence}", style="red", markup=False, soft_wrap=True)


@contextmanager
def stage_progress(console: Console, name: str) -> Iterator[ProgressCallback]:
    """Show one stage's progress for as long as the block runs; yields the callback that moves it."""
    if not console.is_terminal:
        yield _plain(console, name)
        return
    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[what]}"),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(name, total=None, what="")

        def update(done: int, total: int, what: str) -> None:
            bars.update(task, completed=done, total=total, what=what)

        yield update


def _plain(console: Console, name: str) -> ProgressCallback:
    began = time.monotonic()
    last = began

    def update(done: int, total: int, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < PLAIN_INTERVAL_S or not done:
            return
        last = now
        left_s = (now - began) / done * (total - done)
        console.print(f"  {name}: {done}/{total} {what}, about {left_s:.0f} s left", markup=False, highlight=False)

    return update


class StageLines:
    """One line for each stage of a build as it ends, and a closing one."""

    def __init__(self, console: Console, recipe: Recipe, directory: Path) -> None:
        self.console, self.directory = console, directory
        self.seconds = 0.0
        self.rebuilt = 0
        console.print(
            f"{recipe.name}: {recipe.model.source} for {recipe.target.sku}, {recipe.quantization.scheme}, "
            f"KV cache {recipe.kv_cache.dtype}, engine {recipe.engine.backend}",
            markup=False,
        )

    def finished(self, name: str, rebuilt: bool, seconds: float, directory: Path) -> None:
        self.seconds += seconds
        self.rebuilt += rebuilt
        what = f"{seconds:7.1f} s" if rebuilt else "unchanged"
        self.console.print(f"  {name:<11} {what:>9}  {directory}", markup=False, soft_wrap=True)

    def summary(self) -> None:
        what = f"{self.rebuilt} stages built" if self.rebuilt else "nothing to do"
        self.console.print(f"{what} in {self.seconds:.1f} s; next: sits-trt serve {self.directory}", markup=False)


def show_doctor(console: Console, report: Mapping[str, Any]) -> None:
    """Print the machine, then what it can build and run for each SKU."""
    facts = Table(show_header=False, box=None, pad_edge=False)
    for gpu in report["gpus"]:
        facts.add_row("GPU", f"{gpu['name']}, SM {gpu['sm'] / 10}, {gpu['memory_mb']} MB, driver {gpu['driver']}")
    if not report["gpus"]:
        facts.add_row("GPU", "none")
    names = {
        "cuda_driver": "CUDA of the driver",
        "nvcc": "nvcc",
        "torch": "torch",
        "tensorrt": "TensorRT",
        "tensorrt_rtx": "TensorRT for RTX",
        "openai_triton": "OpenAI Triton",
        "triton_server": "Triton Server",
        "tritonclient": "tritonclient",
    }
    for key, name in names.items():
        facts.add_row(name, report[key] or "none")
    facts.add_row("CPU cores", str(report["cpus"]))
    facts.add_row("free memory", f"{report['memory_free_gb']:.1f} GB")
    facts.add_row("free disk", f"{report['disk_free_gb']:.1f} GB")
    console.print(facts)
    table = Table("SKU", "builds here", "runs here", box=None, pad_edge=False)
    for sku, can in report["skus"].items():
        table.add_row(sku, *(f"{'yes' if able else 'no'}: {how}" for able, how in (can["build"], can["run"])))
    console.print()
    console.print(table)


def show_endpoints(console: Console, build: Path, endpoints: Endpoints, file: Path | None) -> None:
    """Print where a server answers, and write it to `file` where one is given."""
    console.print(f"ready: {build}", markup=False, soft_wrap=True)
    urls = {name: getattr(endpoints, name) for name in ("http", "grpc", "metrics")}
    for name, url in urls.items():
        console.print(f"  {name:<8} {url}", markup=False)
    console.print(
        f'ask it: sits-trt generate --build {build} --url {endpoints.grpc} "Hello"', markup=False, soft_wrap=True
    )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(file.name + ".partial")
        partial.write_text(json.dumps(urls) + "\n", encoding="utf-8")
        os.replace(partial, file)


def show_engine(console: Console, engine: Mapping[str, Any]) -> None:
    """Print an engine as `engine.inspect_engine` describes it."""
    facts = Table(show_header=False, box=None, pad_edge=False)
    model, tile, limits = engine["model"], engine["tile"], engine["limits"]
    sm = f"SM {engine['sm'] / 10}" if engine["sm"] else "any machine"
    facts.add_row("engine", f"{engine['directory']}, backend {engine['backend']}, {sm}")
    facts.add_row("model", f"{model['family']}, {model['num_layers']} layers, hidden {model['hidden_size']}")
    facts.add_row("limits", ", ".join(f"{key} {value}" for key, value in limits.items()))
    facts.add_row("tile", f"{tile['tile_tokens']} tokens, {tile['kv_dtype']}, {tile['tile_bytes'] / 1e6:.2f} MB")
    facts.add_row("tools", ", ".join(f"{name} {version}" for name, version in engine["tools"].items()))
    facts.add_row("libraries here", engine["loads_here"] or ("fit; it needs its GPU" if engine["sm"] else "fit"))
    console.print(facts)
    table = Table("binding", "type", "shape", "", box=None, pad_edge=False)
    for binding in engine["bindings"]:
        shape = "x".join(str(size) for size in binding["shape"])
        table.add_row(binding["name"], binding["dtype"], shape, binding["doc"])
    console.print(table)
    for profile in engine["profiles"]:
        console.print(f"profile {profile['name']}:", markup=False)
        for name, (least, best, most) in profile["shapes"].items():
            console.print(f"  {name:<14} {least} .. {best} .. {most}", markup=False)
    for name, plugin in engine["plugins"].items():
        console.print(f"plugin {name}: {plugin['layers']} layers, {plugin['version_and_digest']}", markup=False)


def show_evaluation(console: Console, found: Evaluation, layers: int) -> None:
    """Print a build's accuracy beside its float model's, and its worst layers, at most `layers`."""
    info, section, accuracy = found.info, found.section, found.accuracy
    console.print(f"{info.name}: {info.weights}, {found.bits_per_weight:.2f} bits a weight", markup=False)
    text = f"text {section.text}: {accuracy.tokens} tokens in blocks of {section.block_tokens}"
    console.print(text, markup=False, soft_wrap=True)
    table = Table(
        "", "as in the source" if info.source_quantized else "unquantized", "this build", box=None, pad_edge=False
    )
    if accuracy.reference_perplexity is None:
        table = Table("", "this build", box=None, pad_edge=False)
        table.add_row("perplexity", f"{accuracy.perplexity:.3f}")
    else:
        increase = f"{accuracy.perplexity:.3f} ({accuracy.perplexity_increase:+.2%})"
        table.add_row("perplexity", f"{accuracy.reference_perplexity:.3f}", increase)
        table.add_row("KL divergence, nats a token", "", f"{accuracy.kl_divergence:.4f}")
        table.add_row("top-1 agreement", "", f"{accuracy.top1_agreement:.2%}")
        table.add_row("top-5 agreement", "", f"{accuracy.top5_agreement:.2%}")
        table.add_row(
            f"equal greedy answers of {accuracy.answer_tokens} tokens",
            "",
            f"{accuracy.exact_prompts} of {accuracy.prompts}",
        )
        table.add_row("equal tokens at their start, mean", "", f"{accuracy.exact_tokens:.1f}")
    console.print(table)
    console.print(f"measured in {accuracy.seconds:.1f} s")
    show_layers(console, found.layers, layers)


def show_layers(console: Console, layers: Sequence[LayerError], most: int) -> None:
    """Print the `most` worst of the quantized layers, given worst first; nothing where there are none."""
    shown = layers[:most]
    if not shown:
        return
    of_all = f"the worst {len(shown)} of {len(layers)} quantized layers" if len(shown) < len(layers) else "all layers"
    console.print(f"{of_all}, by relative squared output error on the calibration text:", markup=False, soft_wrap=True)
    table = Table("layer", "error", "drift of the stream after it", box=None, pad_edge=False)
    for layer in shown:
        table.add_row(layer.name, f"{layer.output_error:.2e}", f"{layer.drift:.2e}")
    console.print(table)


def show_sweep(console: Console, result: SweepResult, page: Path) -> None:
    """Print what a sweep found and where its report lies. Raises SitsError when a build could not be measured."""
    from sits_trt.sweep.compare import verdicts
    from sits_trt.sweep.tables import troubles

    for verdict in verdicts(result):
        console.print(verdict.sentence, markup=False, soft_wrap=True)
    console.print(f"report: {page}", markup=False, soft_wrap=True)
    if failed := troubles(result):
        raise SitsError(f"{'; '.join(failed)}; all others are in the report")
