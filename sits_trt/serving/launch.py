"""Replaces itself by the program in its arguments, which then ends with the thread that started it.

Run as a script: `python launch.py PARENT_PID PROGRAM ARGUMENT...`. Linux keeps the request made here across exec;
asking for it in the child of a process that has threads would not be safe.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the process that wanted a server ended before it could start")
    os.execv(program, sys.argv[2:])  # noqa: S606  the server is meant to take this process's place


if __name__ == "__main__":
    main()
