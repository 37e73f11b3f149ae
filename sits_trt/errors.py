"""Every error that a user can cause or meet. Each message is one sentence: the thing, and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path


class SitsError(Exception):
    """Base of all expected errors. The command line prints the message and exits with code 2."""


class RecipeError(SitsError):
    """A recipe is wrong. `key` is the dotted path of the offending key, empty for the whole file."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(f"recipe key '{key}': {message}" if key else message)
        self.key = key


class CheckpointError(SitsError):
    """A checkpoint cannot be read as what it claims to be. `tensor` names the tensor where there is one."""

    def __init__(self, message: str, tensor: str = "") -> None:
        super().__init__(f"tensor '{tensor}': {message}" if tensor else message)
        self.tensor = tensor


class QuantizationError(SitsError):
    """A layer, calibration set or skip pattern does not allow the quantization that was asked for."""


class BudgetError(QuantizationError):
    """A quantized model is further from its float model than the recipe allows. `report` is its report.json."""

    def __init__(self, message: str, report: Path) -> None:
        super().__init__(message)
        self.report = report


class ExportError(SitsError):
    """The model cannot be turned into an ONNX graph."""


class EngineBuildError(SitsError):
    """The engine builder failed. `log` is the file that holds its full output."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(f"{message}; the builder's log is {log}" if log else message)
        self.log = log


class PluginError(SitsError):
    """A plugin or kernel bundle is missing or of a version that this program cannot use."""

    def __init__(self, message: str, name: str, version: str = "") -> None:
        super().__init__(f"plugin {name}{f' {version}' if version else ''}: {message}")
        self.name = name
        self.version = version


class ArtifactMismatch(SitsError):
    """An artifact on disk is not what its reader needs. Both sides are named."""

    def __init__(self, what: str, expected: object, found: object, way_out: str) -> None:
        super().__init__(f"{what}: this machine or stage needs {expected}, the artifact has {found}; {way_out}")
        self.expected = expected
        self.found = found


class ServerError(SitsError):
    """The Triton Inference Server cannot be found, started or reached."""


class RequestError(SitsError):
    """One request is refused or failed; all others go on."""


class EngineDead(SitsError):
    """The executor can serve nobody any more."""


def did_you_mean(wrong: str, known: Sequence[str]) -> str:
    """Return ' (did you mean x?)' with up to three near names, or an empty string."""
    near = get_close_matches(wrong, known, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
