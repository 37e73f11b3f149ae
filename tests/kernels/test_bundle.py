"""The kernel bundle: compiled without a GPU, verified when it is read, refused when its ABI does not fit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from sits_plugins.bundle import MANIFEST_NAME, KernelBundle
from sits_plugins.compile import SMS, catalogue, compile_bundle, compile_source, main, sources_fingerprint
from sits_plugins.kernel_spec import CudaKernel, CudaModule, per
from sits_plugins.linear_catalogue import needed

from sits_trt.contract import KERNEL_ABI
from sits_trt.errors import PluginError


@pytest.fixture(scope="module")
def bundle_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bundle") / "kernels"
    compile_bundle(80, directory, wanted={"linear_dense_fp16", "linear_dequantize_fp16_g64_sym"}.__contains__)
    return directory


@pytest.fixture
def copied(bundle_directory, tmp_path):
    return shutil.copytree(bundle_directory, tmp_path / "kernels")


def change_manifest(directory, **values):
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_bundle_says_how_its_kernels_are_launched(bundle_directory):
    bundle = KernelBundle.load(bundle_directory)
    assert bundle.sm == 80
    assert bundle.abi == KERNEL_ABI
    dense = bundle.kernel("linear_dense_fp16")
    names = [name for name, _ in dense.arguments]
    assert names[:2] == ["x", "weight"]
    assert dense.hidden_pointers == 2
    assert [axis.blocks({"tokens": 129, "rows": 257}) for axis in dense.grid] == [2, 3, 1]
    assert (bundle_directory / dense.file).read_bytes()[:4] == b"\x7fELF"
    cuda = bundle.kernel("linear_dequantize_fp16_g64_sym")
    assert cuda.hidden_pointers == 0
    assert cuda.threads == 256
    assert cuda.dependent


def test_digest_follows_content(bundle_directory, copied):
    assert KernelBundle.load(copied).digest() == KernelBundle.load(bundle_directory).digest()
    change_manifest(copied, sm=86)
    assert KernelBundle.load(copied).digest() != KernelBundle.load(bundle_directory).digest()


def test_newer_minor_is_accepted(copied):
    change_manifest(copied, abi=f"{KERNEL_ABI[0]}.{KERNEL_ABI[1] + 3}")
    assert KernelBundle.load(copied).abi == (KERNEL_ABI[0], KERNEL_ABI[1] + 3)


@pytest.mark.parametrize("major", [KERNEL_ABI[0] - 1, KERNEL_ABI[0] + 1])
def test_another_major_is_refused_in_one_sentence_that_names_both(copied, major):
    change_manifest(copied, abi=f"{major}.7")
    with pytest.raises(PluginError, match=rf"kernel ABI {major}\.7.*needs {KERNEL_ABI[0]}\.{KERNEL_ABI[1]}") as caught:
        KernelBundle.load(copied)
    assert "\n" not in str(caught.value)
    assert "build" in str(caught.value)


@pytest.mark.parametrize("abi", ["", "1", "one.two", "1.x", None])
def test_a_bundle_without_a_version_is_refused(copied, abi):
    change_manifest(copied, abi=abi)
    with pytest.raises(PluginError, match="no ABI version"):
        KernelBundle.load(copied)


def test_a_changed_cubin_is_refused(copied):
    path = next(copied.glob("*.cubin"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(PluginError, match=path.name):
        KernelBundle.load(copied)


@pytest.mark.parametrize("damage", ["missing", "not json", "a list", "no kernels"])
def test_a_damaged_manifest_is_refused(copied, damage):
    path = copied / MANIFEST_NAME
    if damage == "missing":
        path.unlink()
    elif damage == "no kernels":
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "kernels"}))
    else:
        path.write_text("{" if damage == "not json" else "[]")
    with pytest.raises(PluginError, match="build it"):
        KernelBundle.load(copied)


def test_an_unknown_kernel_is_named(bundle_directory):
    with pytest.raises(PluginError, match="kernel nothing"):
        KernelBundle.load(bundle_directory).kernel("nothing")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_launching_without_a_gpu_is_one_sentence(bundle_directory):
    from sits_plugins.launch import BundleLauncher

    with pytest.raises(PluginError, match=r"CUDA driver.*NVIDIA GPU") as caught:
        BundleLauncher(KernelBundle.load(bundle_directory))
    assert "\n" not in str(caught.value)


def test_an_unsupported_sm_is_refused(tmp_path):
    with pytest.raises(PluginError, match="SM 75"):
        compile_bundle(75, tmp_path / "kernels")
    assert not (tmp_path / "kernels").exists()


@pytest.mark.parametrize("arguments", [[], ["91", "bundle"], ["ninety", "bundle"], ["90", "bundle", "("]])
def test_the_compilers_command_line_ends_with_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err


def test_a_source_that_does_not_compile_says_why(tmp_path):
    kernel = CudaKernel("broken", (), (per(), per(), per()), 32, template=("Fp16", "no", "numbers"))
    module = CudaModule("broken", "linear_dequantize.cu", (kernel,))
    with pytest.raises(PluginError, match=r"kernel broken: does not compile for SM 80.*error"):
        compile_source(module, 80, tmp_path)


def test_fingerprint_depends_on_the_sm():
    assert sources_fingerprint(80) == sources_fingerprint(80)
    assert sources_fingerprint(80) != sources_fingerprint(90)


def test_names_are_unique():
    for sm in SMS:
        names = [source.name for source in catalogue(sm)]
        assert len(names) == len(set(names))


@pytest.mark.slow
@pytest.mark.parametrize("sm", SMS)
def test_linear_kernels_of_one_format_compile_for_every_sm(sm, tmp_path):
    fits = needed("float16", 64, symmetric=False)
    bundle = compile_bundle(sm, tmp_path, wanted=lambda name: name.startswith("linear_") and fits(name))
    assert KernelBundle.load(tmp_path).digest() == bundle.digest()
    kinds = {name.split("_")[1] for name in bundle.kernels}
    assert kinds >= {"dense", "stream", "gated", "dequantize"}
    assert ({"scale", "hopper"} <= kinds) == (sm == 90)
