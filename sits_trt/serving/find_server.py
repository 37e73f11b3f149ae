"""Where the Triton Inference Server is on this machine, and what it needs around it to run our Python bodies."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from ctypes.util import find_library
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sits_trt.errors import ServerError
from sits_trt.serving.room import ROOM_VARIABLE

STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Installation:
    """One Triton Server. `bundle` is the folder inside nvidia-pytriton, None for a server that is installed itself."""

    binary: Path
    bundle: Path | None = None

    def prepare(self, room: Path) -> list[str]:
        """Put what the server needs into the empty directory `room` and return the arguments that name it.

        The bundled server's Python backend finds its stub, a program built for one Python version, only beside
        its own library: both are copied together. Raises ServerError when there is none for this Python.
        """
        if self.bundle is None:
            return []
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = self.bundle / "python_backend_stubs" / version / STUB
        if not stub.is_file():
            known = ", ".join(sorted(p.name for p in stub.parent.parent.iterdir()))
            raise ServerError(f"this nvidia-pytriton serves Python {known}, not {version}; use one of these")
        backends = room / "backends"
        shutil.copytree(self.bundle / "backends", backends, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(stub, backends / "python" / STUB)
        return [f"--backend-directory={backends}"]

    def environment(self, room: Path) -> dict[str, str]:
        """Return this process's environment with what the server and its Python stubs need.

        `room` is a folder of the server's own, which is deleted after its end.

        The stub's interpreter takes its identity from the first python3 on PATH: with the folder of ours in front
        it finds our virtual environment, .pth files of editable installs included. SITS_TRT_SITE names our site
        directories for a server whose interpreter does not.
        """
        environment = dict(os.environ)
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        sites = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
        environment[ROOM_VARIABLE] = str(room)
        environment["SITS_TRT_SITE"] = os.pathsep.join(sites)
        if self.bundle is not None:
            # Ours first: the bundle carries a libpython of its own, which would shadow the stub's.
            libraries = [_python_library_directory(), str(self.bundle.parent.parent / "nvidia_pytriton.libs")]
            libraries += filter(None, [os.environ.get("LD_LIBRARY_PATH", "")])
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
        return environment


def find_server() -> Installation:
    """Return `tritonserver` from PATH where there is one, else the one inside the nvidia-pytriton package.

    Raises ServerError when there is neither, or no shared Python library for the bundled one.
    """
    installed = shutil.which("tritonserver")
    if installed:
        return Installation(Path(installed))
    # Found, not imported: importing pytriton starts threads and loads far more than the binary's path.
    spec = find_spec("pytriton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        bundle = Path(folder) / "tritonserver"
        if (bundle / "bin" / "tritonserver").is_file():
            _python_library_directory()
            return Installation(bundle / "bin" / "tritonserver", bundle)
    raise ServerError(
        "Triton Inference Server is not here: there is no 'tritonserver' on PATH and no package nvidia-pytriton; "
        "use NVIDIA's Triton container or 'pip install --no-deps nvidia-pytriton'"
    )


def _python_library_directory() -> str:
    """Return the folder of this interpreter's shared library, which the bundled server's stub loads."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    directory = sysconfig.get_config_var("LIBDIR") or ""
    multiarch = os.path.join(directory, sysconfig.get_config_var("MULTIARCH") or "")
    for folder in (directory, multiarch):
        if os.path.exists(os.path.join(folder, name)):
            return folder
    if find_library(name.removeprefix("lib").split(".so")[0]) == name:
        return directory
    raise ServerError(
        f"the Triton Server of nvidia-pytriton needs {name}, and this Python ({sys.base_prefix}) comes without it; "
        f"install it (Debian: libpython{sys.version_info.major}.{sys.version_info.minor}) or use a Python built with "
        f"--enable-shared"
    )
