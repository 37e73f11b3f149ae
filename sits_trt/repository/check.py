"""Looks over a model repository as Triton Server will, before the server does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sits_trt.errors import SitsError
from sits_trt.repository.pbtxt import CONFIG_NAME, parse


@dataclass(frozen=True)
class RepositoryReport:
    """`models` are the names that Triton will load; `faults` keep it from serving; `notes` do no harm."""

    models: tuple[str, ...]
    faults: tuple[str, ...]
    notes: tuple[str, ...]

    def require(self) -> None:
        """Raise SitsError with the first fault, if there is one."""
        if self.faults:
            more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
            raise SitsError(f"{self.faults[0]}{more}")


def check_repository(directory: Path) -> RepositoryReport:
    """Check that every model has a sound configuration, a version, and what its ensemble steps name.

    Hidden folders, folders without a configuration, and version folders whose name is not a plain number are
    noted: Triton skips the last, and what is hidden was left by another program.
    """
    if not directory.is_dir():
        raise SitsError(f"there is no model repository at {directory}; build it with 'sits-trt build'")
    configs: dict[str, Any] = {}
    faults: list[str] = []
    notes: list[str] = []
    for folder in sorted(p for p in directory.iterdir() if p.is_dir()):
        if folder.name.startswith("."):
            notes.append(f"{folder} is not a model and is ignored")
        elif not (folder / CONFIG_NAME).is_file():
            faults.append(f"{folder} has no {CONFIG_NAME}, and Triton Server stops at it; remove it or build again")
        else:
            _check_model(folder, configs, faults, notes)
    for name, config in configs.items():
        for step in config.ensemble_scheduling.step:
            if step.model_name not in configs:
                faults.append(f"the ensemble '{name}' needs the model '{step.model_name}', which {directory} lacks")
    if not configs:
        faults.append(f"{directory} holds no model; build it with 'sits-trt build'")
    return RepositoryReport(tuple(configs), tuple(faults), tuple(notes))


def _check_model(folder: Path, configs: dict[str, Any], faults: list[str], notes: list[str]) -> None:
    text = (folder / CONFIG_NAME).read_text(encoding="utf-8", errors="replace")
    if "${" in text:
        key = text.split("${", 1)[1].split("}", 1)[0]
        faults.append(f"{folder / CONFIG_NAME} has an unfilled placeholder '{key}'; build the repository again")
        return
    try:
        config = parse(folder / CONFIG_NAME)
    except SitsError as error:
        faults.append(str(error))
        return
    if config.name != folder.name:
        faults.append(f"{folder / CONFIG_NAME} names the model '{config.name}', its folder is '{folder.name}'")
    versions = []
    for entry in sorted(p for p in folder.iterdir() if p.is_dir()):
        if entry.name.isascii() and entry.name.isdigit() and not entry.name.startswith("0"):
            versions.append(entry)
        else:
            notes.append(f"{entry} is not a version folder and is ignored")
    if not versions:
        faults.append(f"{folder} has no version folder such as '1'; build the repository again")
    elif config.backend == "python" and not (versions[-1] / "model.py").is_file():
        faults.append(f"{versions[-1]} has no model.py; build the repository again")
    configs[folder.name] = config
