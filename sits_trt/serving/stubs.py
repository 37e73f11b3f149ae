"""The Python processes of a Triton Server: which there are and whether they live."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sits_trt.serving.find_server import STUB


@dataclass(frozen=True)
class Stub:
    """One Python process of a server: the model it runs, and the name of the memory it shares with the server."""

    pid: int
    model: str
    shared_memory: str


def find_stubs(group: int) -> list[Stub]:
    """Return every Python stub of a server's process group, also those whose server has ended before them."""
    stubs = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The arguments are .../MODEL/VERSION/model.py, the name of the memory, sizes, ...
            command = (folder / "cmdline").read_bytes().decode().split("\0")
            if Path(command[0]).name == STUB and _status(int(folder.name))[1] == group:
                stubs.append(Stub(int(folder.name), Path(command[1]).parent.parent.name, command[2]))
        except (OSError, UnicodeDecodeError):
            continue
    return stubs


def remove_shared_memory(stubs: Iterable[Stub]) -> None:
    """Delete what a server that was killed leaves in memory."""
    for stub in stubs:
        if stub.shared_memory.startswith("triton_python_backend_shm_region"):
            (Path("/dev/shm") / stub.shared_memory).unlink(missing_ok=True)  # noqa: S108  where POSIX memory lies


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be reaped does not."""
    try:
        return _status(pid)[0] not in "ZX"
    except OSError:
        return False


def _status(pid: int) -> tuple[str, int]:
    """Return state letter and process group of a process. The name before them may hold spaces and brackets."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[2])
