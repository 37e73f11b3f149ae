"""Errors as the command line shows them."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from sits_trt.console import show_endpoints, show_error
from sits_trt.errors import RecipeError, SitsError
from sits_trt.serving.ports import Endpoints


def shown(error: SitsError | OSError) -> str:
    console = Console(file=io.StringIO(), width=40)
    show_error(console, error)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_expected_errors_are_one_line() -> None:
    assert shown(RecipeError("is\nwrong [x]", "a.b")) == "error: recipe key 'a.b': is wrong [x]\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST])
def test_what_the_user_can_mend_is_one_line(number: int) -> None:
    line = shown(OSError(number, "No", "/some/where"))
    assert line == "error: '/some/where' cannot be read or written (No); mend that or use another path\n"


def test_a_missing_file_that_nobody_expected_is_a_bug() -> None:
    with pytest.raises(FileNotFoundError):
        shown(FileNotFoundError(errno.ENOENT, "No", "/some/where"))


def test_endpoints_are_written_into_a_directory_that_is_made(tmp_path: Path) -> None:
    file = tmp_path / "new" / "endpoints.json"
    show_endpoints(Console(file=io.StringIO()), tmp_path, Endpoints("127.0.0.1", 1, 2, 3), file)
    assert json.loads(file.read_text())["grpc"] == "127.0.0.1:2"
