"""The Python processes of a Triton Server: which there are and whether they live."""

from __future__ import annotations

from pathlib import Path

from sits_trt.serving.find_server import STUB


def find_stubs(server_pid: int) -> dict[int, str]:
    """Return the process id and model name of every Python stub that the server has started."""
    stubs = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if _status(int(folder.name))[1] == server_pid and Path(command[0].decode()).name == STUB:
                # The first argument is .../MODEL/VERSION/model.py.
                stubs[int(folder.name)] = Path(command[1].decode()).parent.parent.name
        except (OSError, ProcessLookupError):
            continue
    return stubs


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be reaped does not."""
    try:
        return _status(pid)[0] not in "ZX"
    except (OSError, ProcessLookupError):
        return False


def _status(pid: int) -> tuple[str, int]:
    """Return state letter and parent of a process. The name before them may hold spaces and brackets."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[1])
