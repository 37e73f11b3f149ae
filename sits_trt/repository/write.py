"""The Triton model repository of one engine: what each file says, and writing it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sits_trt import wire
from sits_trt.artifacts import read_manifest
from sits_trt.contract import EngineDetails
from sits_trt.progress import Progress, silent
from sits_trt.recipe.schema import KvCacheSection, ServingSection
from sits_trt.repository.check import check_repository
from sits_trt.repository.config import ModelConfig, RepositoryPaths, model_configs
from sits_trt.repository.pbtxt import CONFIG_NAME, to_text

VERSION = "1"

_BODY = '''"""Model '{name}': the code is sits_trt.serving.bodies.{name}."""

import os
import site

# 'sits-trt serve' names the site directories here, for a server whose own interpreter is not that of sits-trt.
for directory in filter(None, os.environ.get("SITS_TRT_SITE", "").split(os.pathsep)):
    site.addsitedir(directory)

from sits_trt.serving.bodies.{name} import TritonPythonModel as TritonPythonModel  # noqa: E402
'''
_NO_BODY = "An ensemble has no files of its own. This one keeps the version directory in git and in zip archives.\n"


def render_repository(
    paths: RepositoryPaths, serving: ServingSection, kv_cache: KvCacheSection
) -> dict[str, str]:  # fmt: skip
    """Return the text of every file of the repository by its relative path."""
    files = {}
    for config in model_configs(paths, serving, kv_cache):
        files[f"{config.name}/{CONFIG_NAME}"] = to_text(config)
        name, text = _version_file(config)
        files[f"{config.name}/{VERSION}/{name}"] = text
    return files


def _version_file(config: ModelConfig) -> tuple[str, str]:
    return ("README.md", _NO_BODY) if config.steps else ("model.py", _BODY.format(name=config.name))


def write_repository(
    out_dir: Path,
    engine_dir: Path,
    serving: ServingSection,
    kv_cache: KvCacheSection,
    progress: Progress = silent,
) -> Mapping[str, Any]:
    """Write the repository that serves `engine_dir` into `out_dir` and return what the manifest should say of it.

    The engine and its tokenizer are named by their path relative to `out_dir`, so that a build directory can be
    moved as a whole; nothing is copied. Raises SitsError when `engine_dir` holds no engine.
    """
    details = EngineDetails.from_dict(read_manifest(engine_dir, "engine").details, engine_dir)
    # Not resolved: a build directory reached through a symbolic link keeps its inner layout.
    tokenizer = os.path.normpath(engine_dir / details.checkpoint)
    paths = RepositoryPaths(_relative(engine_dir, out_dir), _relative(Path(tokenizer), out_dir))
    files = render_repository(paths, serving, kv_cache)
    for number, (name, text) in enumerate(files.items(), 1):
        path = out_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        progress(number, len(files), name)
    check_repository(out_dir).require()
    models = [wire.PREPROCESSING, wire.EXECUTOR, wire.POSTPROCESSING, wire.ENSEMBLE, wire.BLS]
    return {"models": models, "engine": paths.engine, "tokenizer": paths.tokenizer}


def _relative(target: Path, start: Path) -> str:
    return Path(os.path.relpath(target, start)).as_posix()
