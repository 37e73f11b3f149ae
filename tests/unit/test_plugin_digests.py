"""A plugin's digest is that of its own code: it changes with it, and with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sits_plugins import tensorrt_registry
from sits_plugins.tensorrt_registry import plugin_digests

from sits_trt.contract import ATTENTION_PLUGIN, LINEAR_PLUGIN, PLUGIN_VERSION


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the plugins' folder, which the registry takes for its own."""
    original = Path(tensorrt_registry.__file__)
    shutil.copytree(original.parent, tmp_path / "plugins", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(tensorrt_registry, "__file__", str(tmp_path / "plugins" / original.name))
    return tmp_path / "plugins"


def append(path: Path) -> None:
    path.write_text(path.read_text() + "\n# changed\n")


def changed(sources: Path, file: str) -> set[str]:
    before = plugin_digests()
    append(sources / file)
    after = plugin_digests()
    return {name for name in before if before[name] != after[name]}


def test_digests_start_with_the_version_and_differ(sources: Path) -> None:
    found = plugin_digests()
    assert set(found) == {ATTENTION_PLUGIN, LINEAR_PLUGIN}
    assert all(digest.startswith(f"{PLUGIN_VERSION}:") for digest in found.values())
    assert len(set(found.values())) == 2


def test_a_digest_follows_its_sources(sources: Path) -> None:
    assert changed(sources, "tensorrt_attention.py") == {ATTENTION_PLUGIN}
    assert changed(sources, "tensorrt_linear.py") == {LINEAR_PLUGIN}
    assert changed(sources, "linear_plan.py") == {LINEAR_PLUGIN}
    assert changed(sources, "tensorrt_plugin.py") == {ATTENTION_PLUGIN, LINEAR_PLUGIN}
    assert changed(sources, "launcher.py") == {ATTENTION_PLUGIN, LINEAR_PLUGIN}
    assert changed(sources, "tensorrt_registry.py") == set()
