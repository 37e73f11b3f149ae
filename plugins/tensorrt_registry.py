"""Puts the plugins' creators into a TensorRT registry, and says what the plugins are by digest."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from sits_plugins.launcher import launcher_from_environment
from sits_plugins.tensorrt_attention import ATTENTION
from sits_plugins.tensorrt_linear import LINEAR
from sits_plugins.tensorrt_plugin import LauncherSource, plugin_classes

from sits_trt import contract

_SOURCES = {
    contract.ATTENTION_PLUGIN: ("tensorrt_attention.py",),
    contract.LINEAR_PLUGIN: ("tensorrt_linear.py", "linear_plan.py", "linear_shapes.py"),
}
"""What decides a plugin's operands and the workspace that an engine has for it."""

_SHARED_SOURCES = ("launcher.py", "tensorrt_fields.py", "tensorrt_plugin.py")


def register_plugins(trt: Any, find_launcher: LauncherSource = launcher_from_environment) -> list[Any]:
    """Register both creators with `trt`. Keep the returned creators alive while engines are built or loaded."""
    registry = trt.get_plugin_registry()
    creators = []
    for definition in (ATTENTION, LINEAR):
        _, creator_class = plugin_classes(trt, definition, find_launcher)
        creators.append(creator_class())
        registry.register_creator(creators[-1], contract.ONNX_DOMAIN)
    return creators


def plugin_digests() -> dict[str, str]:
    """Return each plugin's 'version:digest', the digest over its sources.

    An engine carries its plugins' names and fields but not their code, so code of another digest must not run it.
    """
    here = Path(__file__).parent
    found = {}
    for name, sources in _SOURCES.items():
        digest = hashlib.sha256()
        for file in (*sources, *_SHARED_SOURCES):
            digest.update((here / file).read_bytes())
        found[name] = f"{contract.PLUGIN_VERSION}:{digest.hexdigest()[:32]}"
    return found
