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


def living(group: int) -> list[int]:
    """Return the processes of a process group that run; those that wait to be reaped do not."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [pid for pid in pids if is_alive(pid, group)]


def find_stubs(group: int) -> list[Stub]:
    """Return every Python stub of a server's process group, also those whose server has ended before them."""
    stubs = []
    for pid in living(group):
        try:
            # The arguments are .../MODEL/VERSION/model.py, the name of the memory, sizes, ...
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if Path(command[0]).name == STUB:
            stubs.append(Stub(pid, Path(command[1]).parent.parent.name, command[2]))
    return stubs


def remove_shared_memory(stubs: Iterable[Stub]) -> None:
    """Delete what a server that was killed leaves in memory."""
    for stub in stubs:
        if stub.shared_memory.startswith("triton_python_backend_shm_region"):
            (Path("/dev/shm") / stub.shared_memory).unlink(missing_ok=True)  # noqa: S108  where POSIX memory lies


def is_alive(pid: int, group: int | None = None) -> bool:
    """Whether the process runs, in the process group if one is given."""
    try:
        # State letter, parent and group follow the name, which may hold spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and group in (None, int(fields[2]))
