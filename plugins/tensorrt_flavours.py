"""The two TensorRT flavours: the same program against modules of different names."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from sits_trt.errors import EngineBuildError


@dataclass(frozen=True)
class Flavour:
    """One TensorRT. `modules` and `distributions` are tried in order; the first that is installed counts.

    `sms` are the architectures that it builds for without such a GPU at hand; empty when it builds only for
    the GPU that it runs on.
    """

    backend: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    sms: tuple[int, ...]
    install: str
    library_package: str = ""
    """Package that holds the shared libraries, where the parser looks for one by a name that is not there."""
    library_stem: str = ""
    """That name, without the '.so.N' that the file in the package has."""

    def module(self) -> str:
        """Return the name of the installed module, without importing it. Raises EngineBuildError when none is."""
        for name in self.modules:
            if find_spec(name) is not None:
                return name
        raise EngineBuildError(
            f"backend '{self.backend}' needs {self.modules[0]}, which is not installed; {self.install}"
        )

    def version(self) -> str | None:
        """Return the installed version, None where it is not installed. Imports nothing."""
        for name in self.distributions:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return None

    def misnamed_library(self) -> Path | None:
        """Return the file that the ONNX parser looks for under the name `library_stem`.so, None where it need not."""
        spec = find_spec(self.library_package) if self.library_package else None
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if not (Path(folder) / f"{self.library_stem}.so").exists():
                for file in sorted(Path(folder).glob(f"{self.library_stem}.so.*")):
                    return file
        return None


FLAVOURS = {
    flavour.backend: flavour
    for flavour in (
        Flavour(
            backend="tensorrt-rtx",
            modules=("tensorrt_rtx", "tensorrt_rtx_bindings"),
            distributions=("tensorrt-rtx-cu13-bindings", "tensorrt-rtx"),
            sms=(80, 86, 89, 120),
            install="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings",
            library_package="tensorrt_rtx_libs",
            library_stem="libtensorrt_rtx",
        ),
        Flavour(
            backend="tensorrt",
            modules=("tensorrt", "tensorrt_bindings"),
            distributions=("tensorrt", "tensorrt-cu13-bindings", "tensorrt-cu12-bindings"),
            sms=(),
            install="pip install 'sits-trt[tensorrt]'",
        ),
    )
}
