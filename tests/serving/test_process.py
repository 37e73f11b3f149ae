"""The server as a process: it starts or says why not, and nothing of it is left, however it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sits_trt.errors import ServerError, SitsError
from sits_trt.recipe.schema import ServingSection
from sits_trt.serving.client import stream
from sits_trt.serving.serve import serve
from sits_trt.serving.server import PREFIX, TritonServer
from sits_trt.serving.stubs import find_stubs, living
from tests.support.server import running_server, wait_for

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
FREE_PORTS = ServingSection(http_port=0, grpc_port=0, metrics_port=0)
SERVE = """
import sys
from pathlib import Path
from sits_trt.recipe.schema import ServingSection
from sits_trt.serving.serve import serve_until_stopped
ports = ServingSection(http_port=0, grpc_port=0, metrics_port=0)
code = serve_until_stopped(Path(sys.argv[1]), ports, lambda at: print(at.grpc, flush=True))
print("code", code, flush=True)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def light_build(null_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build whose repository holds the two models that load no torch: its server starts in a second."""
    build = tmp_path_factory.mktemp("light") / "build"
    for stage in ("checkpoint", "engine"):
        shutil.copytree(null_build / stage, build / stage)
    for model in ("preprocessing", "postprocessing"):
        shutil.copytree(null_build / "repository" / model, build / "repository" / model)
    return build


def shared_memory(names: list[str]) -> list[str]:
    return [name for name in names if Path("/dev/shm", name).exists()]


@pytest.fixture
def child(null_build: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that serves a moved copy of a build until it is told to stop; its first line is the gRPC address."""
    build = tmp_path / "moved" / "build"
    shutil.copytree(null_build, build)
    rooms = tmp_path / "rooms"
    rooms.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(build)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(rooms)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def server_of(parent: int) -> int:
    """Return the process id of the tritonserver that `parent` started."""
    found = subprocess.run(
        ["pgrep", "-P", str(parent), "-x", "tritonserver"], capture_output=True, text=True, check=True
    )
    return int(found.stdout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_server_in_order(number: signal.Signals, child: subprocess.Popen[str]) -> None:
    """A request in flight ends with what it has and a reason; the exit code is 0; nothing is left."""
    assert child.stdout is not None
    url = child.stdout.readline().strip()
    server = server_of(child.pid)
    names = [stub.shared_memory for stub in find_stubs(server)]
    assert len(names) == len(shared_memory(names)) == 4
    parts = stream(url, "long", 16000, end_id=-1)
    next(parts)
    reasons: list[str] = []
    reader = threading.Thread(target=lambda: reasons.extend(part.finish_reason for part in parts))
    reader.start()
    child.send_signal(number)
    reader.join(20)
    assert reasons[-1] == "cancelled"
    assert child.stdout.read() == "code 0\n"
    assert child.wait(20) == 0
    assert living(server) == []
    assert shared_memory(names) == []


def test_nothing_outlives_a_parent_that_is_killed(child: subprocess.Popen[str], tmp_path: Path) -> None:
    assert child.stdout is not None
    child.stdout.readline()
    server = server_of(child.pid)
    assert len(living(server)) == 6, "the server, its guard and four stubs"
    names = [stub.shared_memory for stub in find_stubs(server)]
    assert [path.name.startswith(PREFIX) for path in (tmp_path / "rooms").iterdir()] == [True]
    child.kill()
    wait_for(lambda: living(server) == [], "the server and its stubs gone", timeout_s=30)
    assert shared_memory(names) == []
    assert list((tmp_path / "rooms").iterdir()) == []


def test_no_stub_outlives_a_parent_that_is_killed_while_they_start(
    child: subprocess.Popen[str], tmp_path: Path
) -> None:  # fmt: skip
    """The server ends without them then, and they would wait for it for ever."""
    wait_for(lambda: _started(child.pid) and find_stubs(server_of(child.pid)) != [], "the first stubs", timeout_s=30)
    server = server_of(child.pid)
    names = [stub.shared_memory for stub in find_stubs(server)]
    child.kill()
    wait_for(lambda: living(server) == [], "the server and its stubs gone", timeout_s=20)
    assert shared_memory(names) == []
    assert list((tmp_path / "rooms").iterdir()) == []


def _started(parent: int) -> bool:
    return (
        subprocess.run(["pgrep", "-P", str(parent), "-x", "tritonserver"], capture_output=True, check=False).stdout
        != b""
    )


def test_no_stub_outlives_a_server_that_is_killed(light_build: Path) -> None:
    with running_server(light_build) as server:
        stubs = find_stubs(server.pid)
        assert sorted(stub.model for stub in stubs) == ["postprocessing", "preprocessing"]
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait(10) == -signal.SIGKILL
        assert living(server.pid) == []
        assert shared_memory([stub.shared_memory for stub in stubs]) == []
        assert not server.ready()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_stop_ends_a_server_that_does_not_answer(number: signal.Signals, light_build: Path) -> None:
    with running_server(light_build) as server:
        os.kill(server.pid, number)
    assert not server.running
    assert living(server.pid) == []


def test_b33_a_dead_python_process_ends_the_server_and_is_named(null_build: Path, tmp_path: Path) -> None:
    """Triton Server itself would look ready, and the request in flight would wait for ever."""
    build = tmp_path / "build"
    shutil.copytree(null_build, build)
    errors: list[Exception] = []

    def ask(server: TritonServer) -> None:
        try:
            list(stream(server.endpoints.grpc, "in flight", 16000, end_id=-1))
        except SitsError as error:
            errors.append(error)

    with running_server(build) as server:
        caller = threading.Thread(target=ask, args=(server,))
        caller.start()
        time.sleep(0.3)
        victim = next(stub for stub in find_stubs(server.pid) if stub.model == "tensorrt_llm")
        os.kill(victim.pid, signal.SIGKILL)
        caller.join(15)
        assert not caller.is_alive(), "the caller still waits"
        assert len(errors) == 1
        wait_for(lambda: not server.running, "the server's end")
        assert not server.ready()
        assert server.failure == "the Python process of model 'tensorrt_llm' has ended"


@pytest.mark.parametrize("name", ["http_port", "grpc_port", "metrics_port"])
def test_a_port_in_use_is_named(name: str, light_build: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0} | {name: port}
        with pytest.raises(ServerError, match=rf"serving\.{name} {port} on 127\.0\.0\.1 cannot be used"):
            TritonServer(light_build / "repository", light_build / "log", "127.0.0.1", **ports)


def test_an_address_of_another_machine_is_refused(light_build: Path) -> None:
    with pytest.raises(ServerError, match=r"serving\.http_port 0 on 192\.0\.2\.1 cannot be used"):
        TritonServer(light_build / "repository", light_build / "log", "192.0.2.1", 0, 0, 0)
    with pytest.raises(ServerError, match=r"serving\.host 'no\.such\.host\.invalid'"):
        TritonServer(light_build / "repository", light_build / "log", "no.such.host.invalid", 0, 0, 0)


def _break_config(build: Path) -> str:
    path = build / "repository" / "preprocessing" / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: 1", "max_batch_size: ${size}"))
    return "model 'preprocessing': failed to read text proto"


def _lose_tokenizer(build: Path) -> str:
    shutil.rmtree(build / "checkpoint")
    return r"model '\w+': SitsError: model '\w+' needs .*/checkpoint, which is not there; build again"


def _die_at_import(build: Path) -> str:
    (build / "repository" / "postprocessing" / "1" / "model.py").write_text("import os; os._exit(3)")
    return "model 'postprocessing': .* not healthy"


@pytest.mark.parametrize("damage", [_break_config, _lose_tokenizer, _die_at_import])
def test_a_server_that_cannot_start_says_why_and_leaves_nothing(damage, light_build: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    shutil.copytree(light_build, build)
    reason = damage(build)
    server = TritonServer(build / "repository", build / "server.log", "127.0.0.1", 0, 0, 0)
    with pytest.raises(ServerError, match=f"ended while starting: {reason}.*its log is {re.escape(str(build))}"):
        server.start(timeout_s=60)
    assert not server.running
    assert living(server.pid) == []


def test_a_server_that_takes_too_long_is_stopped(light_build: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    shutil.copytree(light_build, build)
    body = build / "repository" / "postprocessing" / "1" / "model.py"
    body.write_text(f"import time\ntime.sleep(60)\n{body.read_text()}")
    server = TritonServer(build / "repository", build / "server.log", "127.0.0.1", 0, 0, 0)
    with pytest.raises(
        ServerError, match=r"not ready after 2 s, with 1 of 2 models loaded; raise serving\.start_timeout"
    ):
        server.start(timeout_s=2)
    assert living(server.pid) == []


def test_a_log_that_cannot_be_written_is_named(light_build: Path) -> None:
    server = TritonServer(light_build / "repository", light_build / "no" / "log", "127.0.0.1", 0, 0, 0)
    with pytest.raises(ServerError, match=r"cannot be started .*no/log"):
        server.start(timeout_s=5)


def test_progress_counts_models(light_build: Path) -> None:
    told: list[tuple[int, int, str]] = []
    with TritonServer(light_build / "repository", light_build / "progress.log", "127.0.0.1", 0, 0, 0) as server:
        server.start(60, lambda *state: told.append(state))
    assert told[-1] == (2, 2, "models loaded")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


def test_serve_refuses_a_build_without_repository_or_engine(null_build: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(SitsError, match=r"repository holds no manifest\.json; build it first"),
        serve(tmp_path, FREE_PORTS),
    ):
        pass
    shutil.copytree(null_build / "repository", tmp_path / "repository")
    with pytest.raises(SitsError, match=r"engine, which is not there; build it again"), serve(tmp_path, FREE_PORTS):
        pass
    assert not (tmp_path / "server.log").exists()
