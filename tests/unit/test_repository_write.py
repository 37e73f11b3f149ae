"""The repository on disk: complete, movable, and the same as the one shown in model_repo/."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sits_trt.artifacts import Manifest, writing
from sits_trt.contract import EngineDetails, EngineLimits
from sits_trt.errors import SitsError
from sits_trt.recipe.schema import KvCacheSection, ServingSection
from sits_trt.repository import check_repository, write_repository
from sits_trt.spec import TileSpec
from tests.support.model_repo import SHOWN, rendered
from tests.support.tiny import tiny_spec


def write(build: Path) -> Path:
    """Write an engine's manifest and its repository into `build`; return the repository."""
    spec = tiny_spec()
    details = EngineDetails("eager", spec, TileSpec.of(spec), EngineLimits(4, 64, 128, 8), "../quantized")
    with writing(build / "engine", Manifest("engine", "e")) as (_, found):
        found.update(details.to_dict())
    with writing(build / "repository", Manifest("repository", "r")) as (partial, found):
        found.update(write_repository(partial, build / "engine", ServingSection(), KvCacheSection()))
    return build / "repository"


def git(*arguments: str, cwd: Path) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    subprocess.run(["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True)


def through_git(repository: Path, room: Path) -> Path:
    git("init", "-q", cwd=repository)
    git("add", ".", cwd=repository)
    git("commit", "-qm", "all", cwd=repository)
    git("clone", "-q", str(repository), str(room / "clone"), cwd=room)
    return room / "clone"


def through_zip(repository: Path, room: Path) -> Path:
    archive = shutil.make_archive(str(room / "repository"), "zip", repository)
    shutil.unpack_archive(archive, room / "unzipped")
    return room / "unzipped"


def test_the_shown_repository_is_what_the_default_recipe_gives() -> None:
    """To write it anew: python -m tests.support.model_repo."""
    shown = {p.relative_to(SHOWN).as_posix(): p.read_text() for p in SHOWN.rglob("*") if p.is_file()}
    shown.pop("README.md")
    assert shown == rendered()


def test_paths_are_relative_and_models_are_listed(tmp_path: Path) -> None:
    repository = write(tmp_path / "build")
    report = check_repository(repository)
    assert sorted(report.models) == ["ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls"]
    assert (report.faults, report.notes) == ((), ())
    config = (repository / "tensorrt_llm" / "config.pbtxt").read_text()
    assert 'key: "gpt_model_path" value { string_value: "../engine" }' in config
    assert (
        'key: "tokenizer_dir" value { string_value: "../quantized" }'
        in (repository / "preprocessing" / "config.pbtxt").read_text()
    )
    assert str(tmp_path) not in "".join(p.read_text() for p in repository.rglob("*.*") if p.is_file())


def test_without_an_engine_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(SitsError, match=r"holds no manifest\.json"):
        write_repository(tmp_path / "repository", tmp_path / "engine", ServingSection(), KvCacheSection())
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize("carry", [through_git, through_zip])
def test_b28_every_version_survives_git_and_zip(carry: Callable[[Path, Path], Path], tmp_path: Path) -> None:
    repository = write(tmp_path / "build")
    before = check_repository(repository)
    after = check_repository(carry(repository, tmp_path))
    assert (after.models, after.faults) == (before.models, ())


def test_b28_stray_folders_are_noted_and_do_no_harm(tmp_path: Path) -> None:
    repository = write(tmp_path / "build")
    for stray in (".ipynb_checkpoints", "ensemble/.ipynb_checkpoints", "preprocessing/01x", "preprocessing/0"):
        (repository / stray).mkdir()
    report = check_repository(repository)
    assert not report.faults
    assert [note.split(" is not ")[0] for note in report.notes] == [
        str(repository / ".ipynb_checkpoints"),
        str(repository / "ensemble" / ".ipynb_checkpoints"),
        str(repository / "preprocessing" / "0"),
        str(repository / "preprocessing" / "01x"),
    ]


def _lose_version(repository: Path) -> None:
    shutil.rmtree(repository / "ensemble" / "1")


def _lose_body(repository: Path) -> None:
    (repository / "preprocessing" / "1" / "model.py").unlink()


def _lose_model(repository: Path) -> None:
    shutil.rmtree(repository / "postprocessing")


def _rename_model(repository: Path) -> None:
    (repository / "tensorrt_llm_bls").rename(repository / "bls")


def _add_folder(repository: Path) -> None:
    (repository / "weights").mkdir()


def _leave_placeholder(repository: Path) -> None:
    path = repository / "tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: 1", "max_batch_size: ${triton_max_batch_size}"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_lose_version, "ensemble has no version folder such as '1'"),
        (_lose_body, "1 has no model.py"),
        (_lose_model, "the ensemble 'ensemble' needs the model 'postprocessing'"),
        (_rename_model, "names the model 'tensorrt_llm_bls', its folder is 'bls'"),
        (_add_folder, "weights has no config.pbtxt"),
        (_leave_placeholder, "has an unfilled placeholder 'triton_max_batch_size'"),
    ],
)
def test_b28_faults_are_named(damage: Callable[[Path], None], sentence: str, tmp_path: Path) -> None:
    repository = write(tmp_path / "build")
    damage(repository)
    report = check_repository(repository)
    assert any(sentence in fault for fault in report.faults), report.faults
    with pytest.raises(SitsError, match="repository"):
        report.require()


def test_a_missing_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(SitsError, match="there is no model repository at"):
        check_repository(tmp_path / "nowhere")
    with pytest.raises(SitsError, match="holds no model"):
        check_repository(tmp_path).require()


def test_bodies_name_modules_that_exist(tmp_path: Path) -> None:
    """The bodies run in the server's process only; here each must at least find its module."""
    bodies = sorted(write(tmp_path / "build").glob("*/1/model.py"))
    assert len(bodies) == 4
    for body in bodies:
        line = next(line for line in body.read_text().splitlines() if line.startswith("from sits_trt."))
        module = line.split()[1]
        code = f"from importlib.util import find_spec; assert find_spec('{module}')"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, module
