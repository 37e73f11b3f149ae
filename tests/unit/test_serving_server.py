"""What surrounds the server process: its ports, its helpers, its log, its metrics and where it is found."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sits_trt.errors import ServerError
from sits_trt.runtime.stats import ExecutorStats, Histogram
from sits_trt.serving import find_server as finder
from sits_trt.serving.bodies.metrics import Metrics, samples
from sits_trt.serving.find_server import Installation, find_server
from sits_trt.serving.ports import Endpoints, HeldPorts
from sits_trt.serving.server import failure_reason
from sits_trt.serving.stubs import find_stubs, is_alive


def test_free_ports_are_chosen_and_held_until_a_server_has_them() -> None:
    with HeldPorts("127.0.0.1", 0, 0, 0) as held:
        at = held.endpoints
        ports = {at.http_port, at.grpc_port, at.metrics_port}
        assert len(ports) == 3
        assert (at.http, at.grpc) == (f"127.0.0.1:{at.http_port}", f"127.0.0.1:{at.grpc_port}")
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", at.http_port))
        server.listen()
        server.close()


def test_a_server_on_all_addresses_is_reached_on_loopback() -> None:
    assert Endpoints("0.0.0.0", 1, 2, 3).metrics == "127.0.0.1:3"


def test_a_failed_hold_gives_the_other_ports_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        with pytest.raises(ServerError, match=f"metrics_port {port}"):
            HeldPorts("127.0.0.1", free, 0, port)
        socket.create_server(("127.0.0.1", free)).close()


LOG = """\
E1130 21:03:27.3 2 model_lifecycle.cc:642] "failed to load 'm' version 1: Internal: SitsError: no\\n\\nAt:\\n /x.py(8)"
E1130 21:03:27.4 2 model_repository_manager.cc:703] "Invalid argument: ensemble 'e' depends on 'm'"
error: creating server: Internal - failed to load all models
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (LOG, "model 'm': SitsError: no"),
        ("E1130 1 2 x.cc:1460] \"Poll failed for model directory 'm': failed to read\"\n", "model 'm': failed to read"),
        ('E1130 1 2 a.cc:1] "one"\nE1130 1 2 b.cc:2] "two"\n', "two"),
        ("I1130 all is well\n", ""),
        ("", ""),
    ],
)
def test_the_log_says_why_a_server_ended(log: str, reason: str) -> None:
    assert failure_reason(log) == reason


def test_stubs_are_found_by_their_group(tmp_path: Path) -> None:
    program = tmp_path / "triton_python_backend_stub"
    program.symlink_to(sys.executable)
    script = tmp_path / "m 1" / "1" / "model.py"
    script.parent.mkdir(parents=True)
    script.write_text("import time; print('up', flush=True); time.sleep(60)")
    command = [str(program), str(script), "triton_python_backend_shm_region_x", "1048576"]
    process = subprocess.Popen(command, process_group=0, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        (stub,) = find_stubs(process.pid)
        assert (stub.pid, stub.model) == (process.pid, "m 1")
        assert stub.shared_memory == "triton_python_backend_shm_region_x"
        assert find_stubs(os.getpgid(0)) == []
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(process.pid), "an unreaped process counts as ended"
    finally:
        process.kill()
        process.wait()
    assert not is_alive(process.pid)


def test_an_installed_server_comes_first_and_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/mine")
    found = find_server()
    assert found == Installation(binary)
    assert found.prepare(tmp_path / "room") == []
    environment = found.environment(tmp_path / "room")
    assert environment["LD_LIBRARY_PATH"] == "/opt/mine"
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_the_bundled_server_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder.shutil, "which", lambda name: None)
    found = find_server()
    assert found.bundle is not None
    assert "pytriton" not in sys.modules
    (argument,) = found.prepare(tmp_path)
    backends = Path(argument.removeprefix("--backend-directory="))
    assert backends.is_relative_to(tmp_path)
    assert {"libtriton_python.so", "triton_python_backend_stub"} <= {p.name for p in (backends / "python").iterdir()}
    libraries = found.environment(tmp_path)["LD_LIBRARY_PATH"].split(os.pathsep)
    assert libraries[1].endswith("nvidia_pytriton.libs")


def test_no_server_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder.shutil, "which", lambda name: None)
    monkeypatch.setattr(finder, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match="'pip install --no-deps nvidia-pytriton'"):
        find_server()


def test_a_python_without_shared_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder.shutil, "which", lambda name: None)
    monkeypatch.setattr(finder.sysconfig, "get_config_var", lambda name: "/nowhere")
    monkeypatch.setattr(finder, "find_library", lambda name: None)
    with pytest.raises(ServerError, match=r"needs libpython3\.\d+\.so\.1\.0, and this Python .* comes without it"):
        find_server()


def test_a_python_without_stub_is_named(tmp_path: Path) -> None:
    (tmp_path / "python_backend_stubs" / "3.8").mkdir(parents=True)
    with pytest.raises(ServerError, match=r"serves Python 3\.8, not 3\.\d+; use one of these"):
        Installation(tmp_path / "tritonserver", tmp_path).prepare(tmp_path)


class Family:
    """A Triton metric family that keeps the values of its series."""

    made: dict[str, Family]

    def __init__(self, name: str, description: str, is_counter: bool) -> None:
        assert description
        self.is_counter = is_counter
        self.values: dict[tuple[tuple[str, str], ...], float] = {}
        self.calls = 0

    def Metric(self, labels: dict[str, str]) -> Any:
        family, key = self, tuple(sorted(labels.items()))
        assert key not in family.values, "a series is made once"
        family.values[key] = 0.0

        class Series:
            def increment(self, value: float) -> None:
                assert family.is_counter
                assert value > 0
                family.values[key] += value
                family.calls += 1

            def set(self, value: float) -> None:
                assert not family.is_counter
                family.values[key] = value
                family.calls += 1

        return Series()


def stats(**changes: Any) -> ExecutorStats:
    fields = dict.fromkeys(ExecutorStats.__dataclass_fields__, 0) | {"num_tiles": 10, "free_tiles": 10, "error": ""}
    histograms = {name: Histogram((1.0, 10.0)).snapshot() for name in fields if name.endswith("_ms")}
    return ExecutorStats(**{**fields, **histograms, **changes})


def test_metrics_follow_the_statistics_and_call_only_for_changes() -> None:
    families: dict[str, Family] = {}

    def make(name: str, description: str, is_counter: bool) -> Family:
        assert name not in families
        families[name] = Family(name, description, is_counter)
        return families[name]

    published = Metrics(make, {"model": "m"}, since=stats(generated_tokens=5, stopped=1))
    times = Histogram((1.0, 10.0))
    for value in (0.5, 2.0, 3.0, 99.0):
        times.observe(value)
    now = stats(generated_tokens=9, stopped=3, failed=5, timed_out=2, free_tiles=4, ttft_ms=times.snapshot(), error="x")
    published.publish(now)
    label = ("model", "m")
    assert families["sits_generated_tokens_total"].values == {(label,): 4.0}
    outcomes = {dict(key)["outcome"]: value for key, value in families["sits_requests_total"].values.items()}
    assert outcomes == {"completed": 2.0, "cancelled": 0.0, "failed": 3.0, "timed_out": 2.0, "rejected": 0.0}
    assert families["sits_tiles_used"].values == {(label,): 6.0}
    assert families["sits_executor_up"].values == {(label,): 0.0}
    buckets = {dict(key)["le"]: value for key, value in families["sits_ttft_ms_bucket"].values.items()}
    assert buckets == {"1": 1.0, "10": 3.0, "+Inf": 4.0}
    assert families["sits_ttft_ms_sum"].values == {(label,): 104.5}
    assert families["sits_ttft_ms_count"].values == {(label,): 4.0}
    calls = {name: family.calls for name, family in families.items()}
    published.publish(now)
    assert {name: family.calls for name, family in families.items()} == calls


def test_every_statistic_is_published() -> None:
    """A field that is added to the statistics must show up at the endpoint."""
    base = {(s.family, s.label): s.value for s in samples(stats())}
    times = Histogram((1.0, 10.0))
    times.observe(3.0)
    for name in ExecutorStats.__dataclass_fields__:
        value: Any = times.snapshot() if name.endswith("_ms") else "dead" if name == "error" else 3
        changed = {(s.family, s.label): s.value for s in samples(stats(**{name: value}))}
        assert changed != base, name
