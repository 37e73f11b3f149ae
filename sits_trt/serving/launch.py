"""Replaces itself by the program in its arguments, which then ends with the thread that started it.

Run as a script: `python launch.py PARENT_PID ROOM PROGRAM ARGUMENT...`. Linux keeps the request made here across exec;
asking for it in the child of a process that has threads would not be safe.

A guard stays beside the program, in its process group: a server that is told to end while its Python stubs start
leaves them waiting for ever, and the process that would kill them, and tidy up, may be gone.
"""

import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
END_S = 8
"""How long the program has to end by itself once its starter is gone: above the server's own --exit-timeout-secs."""

LEAVE_S = 1
"""How long the helpers of a program that has ended have to follow it."""

POLL_S = 0.5


def main() -> None:
    parent, room, program = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the process that wanted a server ended before it could start")
    if os.fork() == 0:
        guard(os.getpgid(0), parent, room)
    os.execv(program, sys.argv[3:])  # noqa: S606  the server is meant to take this process's place


def guard(program: int, starter: int, room: str) -> None:
    """Kill this process group, itself included, once its leader `program` or the leader's `starter` has ended.

    What they leave behind goes with them: their folder `room`, and the memory that they share.
    """
    # This interpreter was started without the site directories in which the package lies.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from sits_trt.serving.stubs import find_stubs, remove_shared_memory

    stubs = []
    while os.getppid() == program:
        if _parent_of(program) != starter:
            stubs = find_stubs(program)
            deadline = time.monotonic() + END_S
            while os.getppid() == program and time.monotonic() < deadline:
                time.sleep(POLL_S)
            break
        time.sleep(POLL_S)
    time.sleep(LEAVE_S)
    remove_shared_memory([*stubs, *find_stubs(program)])
    shutil.rmtree(room, ignore_errors=True)
    os.killpg(program, signal.SIGKILL)


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


if __name__ == "__main__":
    main()
