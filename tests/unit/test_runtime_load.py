from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sits_trt.artifacts import Manifest, read_manifest, writing
from sits_trt.checkpoint import open_checkpoint
from sits_trt.contract import EngineDetails, EngineLimits
from sits_trt.errors import SitsError
from sits_trt.models import build_decoder
from sits_trt.runtime.load import choose_runner, load_executor
from sits_trt.runtime.request import Request, SamplingParams, join_events
from sits_trt.runtime.runners.null import null_answer
from sits_trt.spec import CODED_KV_DTYPES, TileSpec
from tests.support.decode import ScatteredRun, whole_logits
from tests.support.tiny import write_checkpoint


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("build")
    spec = open_checkpoint(write_checkpoint(root / "checkpoint")).spec
    details = EngineDetails("eager", spec, TileSpec.of(spec, 16), EngineLimits(4, 64, 128, 32), "../checkpoint")
    with writing(root / "engine", Manifest("engine", "f", details=details.to_dict())):
        pass
    return root / "engine"


@pytest.mark.parametrize(
    ("runner", "device", "has_cuda", "kind", "place", "why"),
    [
        ("auto", "auto", False, "eager", "cpu", "no NVIDIA GPU is here"),
        ("auto", "auto", True, "eager", "cuda", "an NVIDIA GPU is here"),
        ("eager", "cpu", True, "eager", "cpu", "asked for"),
        ("null", "auto", True, "null", "cpu", "asked for"),
    ],
)
def test_the_runner_is_chosen_and_says_why(
    runner: str, device: str, has_cuda: bool, kind: str, place: str, why: str
) -> None:
    chosen = choose_runner("eager", runner, device, has_cuda)
    assert chosen[:2] == (kind, place)
    assert why in chosen[2]


def test_a_build_for_the_kernels_runs_on_them_where_there_is_a_gpu() -> None:
    assert choose_runner("cuda", "auto", "auto", True) == ("cuda", "cuda", "an NVIDIA GPU is here")
    assert choose_runner("cuda", "auto", "cuda", True)[:2] == ("cuda", "cuda")
    for runner, device, has_cuda in (("auto", "auto", False), ("auto", "cpu", True), ("eager", "auto", True)):
        assert choose_runner("cuda", runner, device, has_cuda)[0] == "eager"
    assert choose_runner("tensorrt-rtx", "cuda", "auto", True)[:2] == ("cuda", "cuda")


def test_an_engine_that_cannot_run_here_is_named() -> None:
    assert "what the tensorrt-rtx engine does" in choose_runner("tensorrt-rtx", "auto", "auto", False)[2]
    for runner, device, message in (
        ("quick", "auto", "no runner 'quick'"),
        ("auto", "tpu", "no device 'tpu'"),
        ("auto", "cuda", "no NVIDIA GPU"),
    ):
        with pytest.raises(SitsError, match=message):
            choose_runner("eager", runner, device, False)


def test_the_null_runner_stands_in_for_the_engine(engine_dir: Path) -> None:
    with load_executor(engine_dir, runner="null") as executor:
        assert executor.vocab_size == 97
        assert executor.stats().num_tiles == 4 * 8
        ids = (5, 6, 7)
        event = join_events(executor.stream(Request("", ids, SamplingParams(6, ignore_eos=True))))
    assert list(event.token_ids) == null_answer(ids, 6, 97)
    assert len(event.text) == sum(token != 0 for token in event.token_ids)


def test_the_eager_runner_serves_the_checkpoint(engine_dir: Path) -> None:
    with load_executor(engine_dir, device="cpu", max_batch_size=2, max_tiles=9) as executor:
        assert executor.description.startswith("eager runner on cpu")
        assert (executor.stats().num_tiles, executor.limits.max_batch_size) == (9, 2)
        # On a CPU a pool that is not quantized is float32.
        assert (
            executor.stats().pool_bytes
            == 9 * 2 * TileSpec.of(open_checkpoint(engine_dir / "../checkpoint").spec, 16).tile_bytes
        )
        event = join_events(executor.stream(Request("", (5, 6, 7), SamplingParams(6, ignore_eos=True))))
    assert len(event.token_ids) == 6


@pytest.mark.parametrize("kv_dtype", CODED_KV_DTYPES)
def test_the_eager_runner_stores_codes_where_the_engine_does(engine_dir: Path, tmp_path: Path, kv_dtype: str) -> None:
    details = EngineDetails.from_dict(read_manifest(engine_dir, "engine").details, engine_dir)
    coded = replace(
        details,
        tile=TileSpec.of(details.model, 16, kv_dtype),
        checkpoint=str((engine_dir / details.checkpoint).resolve()),
    )
    with writing(tmp_path / "engine", Manifest("engine", "f", details=coded.to_dict())):
        pass
    ids = tuple(range(5, 45))
    with load_executor(tmp_path / "engine", device="cpu", max_tiles=9) as executor:
        assert executor.stats().pool_bytes == 9 * coded.tile.tile_bytes
        event = join_events(executor.stream(Request("", ids, SamplingParams(12, ignore_eos=True, logprobs=True))))
    checkpoint = open_checkpoint(engine_dir / details.checkpoint)
    decoder = build_decoder(checkpoint.spec, checkpoint, dtype=torch.float32)
    run = ScatteredRun(decoder, 1, kv_dtype=kv_dtype)
    (logits,) = run.step([[*ids, *event.token_ids]])
    expected = logits[len(ids) - 1 : -1].log_softmax(-1)
    exact = whole_logits(decoder, [*ids, *event.token_ids])[len(ids) - 1 : -1].log_softmax(-1)
    tokens = torch.tensor(event.token_ids)[:, None]
    error = (torch.tensor(event.logprobs) - expected.gather(1, tokens)[:, 0]).abs().max()
    assert error < 0.1 * (expected - exact).gather(1, tokens).abs().max()


def test_a_batch_that_the_engine_was_not_built_for_is_refused(engine_dir: Path) -> None:
    for wrong in (0, 5):
        with pytest.raises(SitsError, match=f"max_batch_size is {wrong}.*built for 1 to 4"):
            load_executor(engine_dir, max_batch_size=wrong, runner="null")


def test_a_directory_without_an_engine_is_named(engine_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SitsError, match="build it first"):
        load_executor(tmp_path)
    details = EngineDetails.from_dict(
        EngineDetails(
            "eager",
            open_checkpoint(engine_dir / "../checkpoint").spec,
            TileSpec(2, 2, 16),
            EngineLimits(1, 1, 9, 9),
            "",
        ).to_dict(),
        tmp_path,
    )
    with writing(tmp_path / "engine", Manifest("engine", "f", details=replace(details, checkpoint="../no").to_dict())):
        pass
    with pytest.raises(SitsError, match=r"tokenizer\.json"):
        load_executor(tmp_path / "engine")
