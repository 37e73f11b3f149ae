"""A kernel bundle on disk: a directory with cubins and `bundle.json`, which says how each kernel is launched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sits_plugins.kernel_spec import Axis

from sits_trt.artifacts import file_digest, fingerprint
from sits_trt.contract import KERNEL_ABI
from sits_trt.errors import PluginError

MANIFEST_NAME = "bundle.json"


@dataclass(frozen=True)
class Kernel:
    """How one kernel is launched.

    `arguments` are (name, type) in order, types of `kernel_spec.ARGUMENT_BYTES`; the launcher appends
    `hidden_pointers` null pointers. `grid` is the rule that gives the number of blocks from the arguments.
    `dependent` kernels may start before their predecessor in the stream has ended (programmatic dependent launch):
    they wait by themselves before they touch what it wrote. `constants` are the values that the kernel was
    specialised for, for whoever chooses among kernels.
    """

    name: str
    file: str
    entry: str
    arguments: tuple[tuple[str, str], ...]
    grid: tuple[Axis, Axis, Axis]
    threads: int
    shared_bytes: int = 0
    hidden_pointers: int = 0
    dependent: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Kernel:
        axes = [Axis(tuple((name, int(size)) for name, size in axis["sizes"]), axis["times"]) for axis in data["grid"]]
        return cls(
            name=data["name"],
            file=data["file"],
            entry=data["entry"],
            arguments=tuple((name, kind) for name, kind in data["arguments"]),
            grid=(axes[0], axes[1], axes[2]),
            threads=data["threads"],
            shared_bytes=data["shared_bytes"],
            hidden_pointers=data["hidden_pointers"],
            dependent=data["dependent"],
            constants=data["constants"],
        )


@dataclass(frozen=True)
class KernelBundle:
    """The kernels of one SM. `digests` maps each cubin's file name to its SHA-256."""

    directory: Path
    sm: int
    abi: tuple[int, int]
    kernels: Mapping[str, Kernel]
    digests: Mapping[str, str]
    tools: Mapping[str, str]

    @classmethod
    def load(cls, directory: Path | str) -> KernelBundle:
        """Read a bundle and verify its cubins. Raises PluginError, one sentence, for anything that is amiss."""
        directory = Path(directory)
        data = _read_manifest(directory)
        abi = _checked_abi(data, directory)
        try:
            kernels = [Kernel.from_dict(entry) for entry in data["kernels"]]
            bundle = cls(
                directory, int(data["sm"]), abi, {k.name: k for k in kernels}, data["digests"], data["tools"]
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PluginError(f"{directory} is damaged ({error!r}); build it again", "kernel bundle") from None
        for name, digest in bundle.digests.items():
            path = directory / name
            if not path.is_file() or file_digest(path) != digest:
                raise PluginError(f"{path} is missing or not what the manifest says; build it again", "kernel bundle")
        return bundle

    def kernel(self, name: str) -> Kernel:
        """Return a kernel by name. Raises PluginError when the bundle lacks it."""
        if name not in self.kernels:
            raise PluginError(f"{self.directory} holds no such kernel; build the bundle again", f"kernel {name}")
        return self.kernels[name]

    def digest(self) -> str:
        """Return the identity of the bundle: its ABI, SM, kernels and the bytes of its cubins."""
        kernels = [asdict(self.kernels[name]) for name in sorted(self.kernels)]
        return fingerprint({"abi": self.abi, "sm": self.sm, "kernels": kernels, "digests": dict(self.digests)})

    def write_manifest(self) -> None:
        """Write the manifest beside the cubins."""
        data = {
            "abi": f"{self.abi[0]}.{self.abi[1]}",
            "sm": self.sm,
            "tools": dict(self.tools),
            "digests": dict(self.digests),
            "kernels": [asdict(self.kernels[name]) for name in sorted(self.kernels)],
        }
        text = json.dumps(data, indent=1) + "\n"
        (self.directory / MANIFEST_NAME).write_text(text, encoding="utf-8")


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PluginError(f"{directory} holds no {MANIFEST_NAME}; build it first", "kernel bundle") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PluginError(f"{path} cannot be read ({error}); build it again", "kernel bundle") from None
    if not isinstance(data, dict):
        raise PluginError(f"{path} is no manifest of a kernel bundle; build it again", "kernel bundle")
    return data


def _checked_abi(data: Mapping[str, Any], directory: Path) -> tuple[int, int]:
    """Return the bundle's ABI. Another major is refused, an older minor too: this program would call what it lacks."""
    major, dot, minor = str(data.get("abi", "")).partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise PluginError(f"{directory} states no ABI version; build it again", "kernel bundle")
    found = (int(major), int(minor))
    if found[0] != KERNEL_ABI[0] or found[1] < KERNEL_ABI[1]:
        raise PluginError(
            f"{directory} has kernel ABI {found[0]}.{found[1]}, this program needs {KERNEL_ABI[0]}.{KERNEL_ABI[1]} "
            f"or a newer {KERNEL_ABI[0]}.x; build the bundle again with this version of sits-trt",
            "kernel bundle",
            f"{found[0]}.{found[1]}",
        )
    return found
