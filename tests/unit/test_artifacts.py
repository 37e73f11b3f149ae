"""Artifacts: nothing half-written, resumable, and verified before they are trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sits_trt.artifacts import (
    MANIFEST_NAME,
    Manifest,
    file_digest,
    fingerprint,
    is_current,
    new_directory,
    only_writer,
    read_manifest,
    tool_versions,
    writing,
)
from sits_trt.errors import ArtifactMismatch, SitsError


def make(directory: Path, key: str = "one", text: str = "data") -> None:
    with writing(directory, Manifest("thing", fingerprint(key))) as (partial, details):
        (partial / "file").write_text(text)
        details["length"] = len(text)


def test_written_artifact_reads_back(tmp_path: Path) -> None:
    make(tmp_path / "a")
    manifest = read_manifest(tmp_path / "a", "thing")
    assert manifest.details == {"length": 4}
    assert manifest.created
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["file", MANIFEST_NAME]


def test_failure_keeps_the_old_artifact(tmp_path: Path) -> None:
    make(tmp_path / "a")

    def fail() -> None:
        with writing(tmp_path / "a", Manifest("thing", fingerprint("two"))) as (partial, _):
            (partial / "file").write_text("half")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fail()
    assert (tmp_path / "a" / "file").read_text() == "data"
    assert is_current(tmp_path / "a", "thing", fingerprint("one"))


@pytest.mark.parametrize(("key", "handed_over"), [("two", True), ("three", False)])
def test_partial_work_is_handed_over_only_to_the_same_fingerprint(tmp_path: Path, key: str, handed_over: bool) -> None:
    def fail() -> None:
        with writing(tmp_path / "a", Manifest("thing", fingerprint("two"))) as (partial, _):
            (partial / "done").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with writing(tmp_path / "a", Manifest("thing", fingerprint(key))) as (partial, _):
        assert (partial / "done").exists() == handed_over


def test_new_artifact_replaces_the_old_one_whole(tmp_path: Path) -> None:
    make(tmp_path / "a")
    with writing(tmp_path / "a", Manifest("thing", fingerprint("two"))) as (partial, _):
        (partial / "other").touch()
    assert not (tmp_path / "a" / "file").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_fingerprint_ignores_order_of_keys_and_sees_every_value() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1, "b": [1, 2]}) != fingerprint({"a": 1, "b": [2, 1]})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})


def test_wrong_kind_and_schema_name_both_sides(tmp_path: Path) -> None:
    make(tmp_path / "a")
    with pytest.raises(ArtifactMismatch, match="needs engine, the artifact has thing"):
        read_manifest(tmp_path / "a", "engine")
    path = tmp_path / "a" / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    with pytest.raises(ArtifactMismatch, match="99"):
        read_manifest(tmp_path / "a", "thing")
    assert not is_current(tmp_path / "a", "thing", fingerprint("one"))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"kind": "thing"}'])
def test_damaged_manifest_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(SitsError, match="build again"):
        read_manifest(tmp_path, "thing")


def test_missing_manifest_says_build_first(tmp_path: Path) -> None:
    with pytest.raises(SitsError, match="sits-trt build"):
        read_manifest(tmp_path, "thing")


def test_file_digest_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert file_digest(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_absent_tool_is_said() -> None:
    assert tool_versions("numpy", "no-such-distribution")["no-such-distribution"] == "absent"


def test_two_builds_in_one_directory_are_refused(tmp_path: Path) -> None:
    refused = pytest.raises(SitsError, match="another 'sits-trt build' is at work")
    with only_writer(tmp_path), refused, only_writer(tmp_path):
        pass
    with only_writer(tmp_path):
        pass


def test_a_manifest_nested_too_deep_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(SitsError, match="cannot be read"):
        read_manifest(tmp_path, "engine")


def test_what_is_no_artifact_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("the user's own")
    (tmp_path / "report").write_text("a file of the user's")
    for name in ("checkpoint", "report"):
        with pytest.raises(SitsError, match="no output of sits-trt"):
            make(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "report"]
    assert (tmp_path / "report").read_text() == "a file of the user's"
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty")


def test_a_copy_beside_an_artifact_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path / "report")
    make(tmp_path / "report.old")
    make(tmp_path / "report", "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "report.old"]


def test_a_new_directory_through_a_link_lands_where_the_link_points(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for target, link in (("real", "link"), ("nowhere", "dangling")):
        (tmp_path / link).symlink_to(target)
        with new_directory(tmp_path / link) as partial:
            (partial / "file").touch()
        assert (tmp_path / link).is_symlink()
        assert (tmp_path / target / "file").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "link", "nowhere", "real"]


def test_a_new_directory_may_be_the_present_one_and_never_what_holds_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with new_directory(Path(".")) as partial:
        (partial / "file").touch()
    assert (tmp_path / "here" / "file").is_file()
    with pytest.raises(SitsError, match="not empty"), new_directory(tmp_path / "here"):
        pass
    with pytest.raises(SitsError, match="cannot be made"), new_directory(Path("/proc/nowhere")):
        pass
