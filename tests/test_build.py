"""The build: which toolkit it finds, what it says when something is missing, and what it compiles again."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SENTENCE = "flash_cuda: "

KERNEL = """#include "../core/a.h"
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
int JOIN(fwd, FLASH_ISA)() { return VALUE; }
"""
# Only what a binding needs to be imported and to report the build's macros; torch's headers would cost seconds.
BINDING = """#include <Python.h>
int fwd_generic();
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C() {
  PyObject* m = PyModule_Create(&module);
  PyModule_AddIntConstant(m, "value", fwd_generic());
  PyModule_AddStringConstant(m, "torch", FLASH_TORCH_VERSION_BUILT);
  PyModule_AddStringConstant(m, "archs", FLASH_CUDA_ARCHS_BUILT);
  return m;
}
"""


def load(folder):
    spec = importlib.util.spec_from_file_location("build_kernels_under_test", folder / "build_kernels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def script(path, text):
    write(path, "#!/bin/sh\n" + text).chmod(0o755)
    return path


@pytest.fixture
def project(tmp_path):
    """A tiny project with this repository's build files."""
    root = tmp_path / "project"
    for name in ("build_kernels.py", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE"):
        root.mkdir(exist_ok=True)
        shutil.copy(REPO / name, root)
    write(root / "README.md", "tiny")
    write(root / "flash_cuda/__init__.py", '__version__ = "0.1.0"\n')
    write(root / "csrc/core/a.h", '#pragma once\n  # include "b.h"\n')
    write(root / "csrc/core/b.h", "#pragma once\n#define VALUE 1\n")
    write(root / "csrc/core/unused.h", "#pragma once\n")
    write(root / "csrc/cpu/fwd.cpp", KERNEL)
    write(root / "csrc/cpu/dispatch.cpp", "#include <vector>\n")
    write(root / "csrc/torch/module.cpp", BINDING)
    return root


@pytest.fixture
def kernels(monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH", "FLASH_CUDA_BUILD", "FLASH_CUDA_ARCHS", "CXX", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    return load(REPO)


def toolkit(folder, release="13.0"):
    script(
        folder / "bin/nvcc",
        f'case "$1" in --version) echo "Cuda compilation tools, release {release}, V{release}.1";;\n'
        f'--dryrun) echo "#\\$ TOP={folder}/bin/.." >&2;; esac\n',
    )
    write(folder / "include/cuda_runtime.h", "")
    return folder


def failure(call, *args):
    with pytest.raises(SystemExit) as caught:
        call(*args)
    message = str(caught.value)
    assert message.startswith(SENTENCE) and "\n" not in message
    return message


# ---- the toolkit


def test_toolkit_is_found_through_a_wrapper_script(kernels, tmp_path, monkeypatch):
    root = toolkit(tmp_path / "far/cuda", "12.9")
    wrapper = script(tmp_path / "local/bin/nvcc", f'exec {root}/bin/nvcc "$@"\n')
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    assert kernels.find_toolkit() == ((str(root), "12.9"), "")


def test_toolkit_without_headers_is_passed_over(kernels, tmp_path, monkeypatch):
    bare, whole = toolkit(tmp_path / "bare"), toolkit(tmp_path / "whole")
    (bare / "include/cuda_runtime.h").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(bare))
    monkeypatch.setattr(kernels, "USUAL_TOOLKIT", str(whole))
    assert kernels.find_toolkit()[0].root == str(whole)
    monkeypatch.setattr(kernels, "USUAL_TOOLKIT", str(tmp_path / "nothing"))
    found, why = kernels.find_toolkit()
    assert found is None and str(bare) in why and str(tmp_path / "nothing") in why


@pytest.mark.parametrize(
    "release, torch_cuda, why",
    [
        ("13.0", None, "torch 2.99 is built without CUDA"),
        ("12.8", "13.0", "is 12.8 but torch 2.99 is built for CUDA 13.0"),
        ("11.8", "11.8", "is 11.8, older than 12.4"),
        (None, "13.0", "no CUDA toolkit with bin/nvcc and include/cuda_runtime.h was found in"),
    ],
)
def test_auto_builds_for_the_cpu_and_cuda_fails_for_the_same_reason(
    kernels, tmp_path, monkeypatch, release, torch_cuda, why
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernels, "USUAL_TOOLKIT", str(toolkit(tmp_path / "t", release) if release else tmp_path / "t"))
    chosen, reason = kernels.choose("2.99", torch_cuda)
    assert chosen is None and why in reason
    monkeypatch.setenv("FLASH_CUDA_BUILD", "cuda")
    assert why in failure(kernels.choose, "2.99", torch_cuda)


def test_auto_builds_for_cuda_when_all_is_there_and_cpu_says_so(kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "t", "13.1")))
    assert kernels.choose("2.99", "13.0")[0] == (str(tmp_path / "t"), "13.1")  # minor versions may differ
    monkeypatch.setenv("FLASH_CUDA_BUILD", "cpu")
    assert kernels.choose("2.99", "13.0") == (None, "FLASH_CUDA_BUILD=cpu")


# ---- values that are not right


@pytest.mark.parametrize(
    "name, value, call, expected",
    [
        ("FLASH_CUDA_BUILD", "gpu", lambda k: k.choose("2.99", "13.0"), "must be auto, cpu or cuda, got 'gpu'"),
        ("FLASH_CUDA_ARCHS", "75", lambda k: k.cuda_archs(), "from 80 on, such as '80;90a', got '75'"),
        ("FLASH_CUDA_ARCHS", "90;sm_80", lambda k: k.cuda_archs(), "got '90;sm_80'"),
        ("FLASH_CUDA_ARCHS", ";", lambda k: k.cuda_archs(), "got ';'"),
        ("CXX", "no-such-compiler", lambda k: k.cxx(), "'no-such-compiler' was not found"),
        ("CXX", "true", lambda k: k.cxx(), "true is neither gcc nor clang"),
        ("MAX_JOBS", "0", lambda k: k.jobs(), "MAX_JOBS must be a positive number, got '0'"),
    ],
)
def test_bad_settings_get_one_sentence(kernels, monkeypatch, name, value, call, expected):
    monkeypatch.setenv(name, value)
    assert expected in failure(call, kernels)


def test_missing_ninja_gets_one_sentence(kernels, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "pip install ninja" in failure(kernels.find_ninja)
    script(tmp_path / "ninja", "")
    assert kernels.find_ninja() == str(tmp_path / "ninja")


def test_jobs_fit_cores_memory_and_max_jobs(kernels, monkeypatch):
    monkeypatch.setattr(kernels.os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setattr(kernels, "free_memory", lambda: 64 << 30)
    assert kernels.jobs() == 8
    monkeypatch.setattr(kernels, "free_memory", lambda: 7 << 30)
    assert kernels.jobs() == 3
    monkeypatch.setenv("MAX_JOBS", "2")
    assert kernels.jobs() == 2
    monkeypatch.setattr(kernels, "free_memory", lambda: 1)
    assert kernels.jobs() == 1


def test_a_compiler_without_a_shared_libstdcxx_gets_the_one_that_torch_uses(kernels, monkeypatch, tmp_path):
    compiler = script(tmp_path / "cxx", 'case "$*" in *print-file-name*) echo $FOUND;; *) exec c++ "$@";; esac\n')
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FOUND", "/usr/lib/libstdc++.so")
    assert kernels.shared_runtime() == []
    monkeypatch.setenv("FOUND", "libstdc++.so")  # the bare name: not found
    assert kernels.shared_runtime() == ["-l:libstdc++.so.6"]


def test_archs_by_file(kernels, monkeypatch):
    monkeypatch.setenv("FLASH_CUDA_ARCHS", "80, 90a 90")
    archs = kernels.cuda_archs()
    assert archs == ["80", "90a", "90"]
    assert kernels.gencode("csrc/fa3/fwd.cu", archs) == ["-gencode", "arch=compute_90a,code=sm_90a"]
    assert kernels.gencode("csrc/fa3/fwd.cu", ["80", "90"]) == []
    assert kernels.gencode("csrc/fa2/fwd.cu", archs)[1::2] == [
        "arch=compute_80,code=sm_80",
        "arch=compute_90,code=sm_90",
        "arch=compute_90,code=compute_90",
    ]


# ---- what an object's name depends on


def names(folder):
    module = load(folder)
    return {unit.label: module.object_path(unit) for unit in module.units(None)}


def test_names_depend_on_neither_place_nor_time(kernels, project, tmp_path):
    before = names(project)
    shutil.copytree(project, tmp_path / "else where")
    for path in (tmp_path / "else where").rglob("*.*"):
        os.utime(path, (1, 1))
    assert names(tmp_path / "else where") == before


@pytest.mark.parametrize("changed", ["csrc/cpu/fwd.cpp", "csrc/core/a.h", "csrc/core/b.h"])
def test_names_depend_on_source_and_every_header(kernels, project, changed):
    before = names(project)
    with open(project / changed, "a") as file:
        file.write("// changed\n")
    after = names(project)
    assert {label for label in before if before[label] != after[label]} == {x for x in before if "fwd.cpp" in x}


def test_names_do_not_depend_on_headers_that_are_not_included(kernels, project):
    before = names(project)
    (project / "csrc/core/unused.h").write_text("#define X\n")
    assert names(project) == before


def test_names_depend_on_flags_and_compiler(kernels):
    unit = kernels.Unit("csrc/flash.h", "x", ["c++"], "gcc 12.2.0", ["-O3"])
    variants = [
        unit,
        unit._replace(flags=["-O2"]),
        unit._replace(identity="gcc 13.1.0"),
        unit._replace(identity="clang 12.2.0"),
    ]
    assert len({kernels.object_path(v) for v in variants}) == len(variants)
    assert kernels.object_path(unit._replace(compiler=["/opt/bin/c++"])) == kernels.object_path(unit)


@pytest.mark.parametrize("line", ['#include "gone.h"', '#include "../../outside.h"', "#include WHICH"])
def test_an_include_that_cannot_be_hashed_is_an_error(kernels, project, line):
    write(project.parent / "outside.h", "")
    write(project / "csrc/cpu/fwd.cpp", line + "\n")
    assert line.split()[1] in failure(names, project)


# ---- building


def run(folder, *command, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FLASH_CUDA", "MAX_JOBS", "CXX"))}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env={**clean, **env}, text=True, stdout=-1, stderr=-2, timeout=300
    )


def test_nothing_is_compiled_twice(project, tmp_path):
    log = tmp_path / "log"
    compiler = script(tmp_path / "cxx", f'case "$*" in *" -c "*) echo "$*" >> {log};; esac\nexec c++ "$@"\n')

    def build(folder):
        write(log, "")
        result = run(folder, "build_kernels.py", "cpu", CXX=str(compiler))
        assert result.returncode == 0, result.stdout
        return len(log.read_text().splitlines())

    count = len(names(project))
    assert build(project) == count
    assert build(project) == 0
    shutil.copytree(project, tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*.*"):
        os.utime(path, None)
    assert build(tmp_path / "copy") == 0
    write(project / "csrc/core/b.h", "#pragma once\n#define VALUE 2\n")
    assert build(project) == count - 1  # all but dispatch.cpp
    assert build(tmp_path / "copy") == 0


def test_an_error_ends_the_build_and_leaves_no_object(project):
    write(project / "csrc/core/b.h", "#pragma once\n#define VALUE a mistake\n")
    result = run(project, "build_kernels.py", "cpu")
    assert result.returncode != 0
    assert "mistake" in result.stdout and result.stdout.splitlines()[-1].startswith(SENTENCE)
    assert not list((project / "build/kernels").glob("cpu_fwd*.o"))
    write(project / "csrc/core/b.h", "#pragma once\n#define VALUE 1\n")
    assert run(project, "build_kernels.py", "cpu").returncode == 0


def test_without_torch_one_sentence_but_an_sdist_is_made(project, tmp_path):
    write(tmp_path / "hidden/torch.py", "raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    for command in (["bdist_wheel"], ["build_ext", "--inplace"], ["dist_info"]):
        result = run(project, "setup.py", *command, PYTHONPATH=str(tmp_path / "hidden"))
        assert result.returncode != 0
        assert result.stdout.count("\n") == 1 and "pip install --no-build-isolation ." in result.stdout
    result = run(project, "setup.py", "sdist", "--formats=tar", PYTHONPATH=str(tmp_path / "hidden"))
    assert result.returncode == 0, result.stdout
    with tarfile.open(next((project / "dist").glob("*.tar"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"build_kernels.py", "csrc/core/b.h", "csrc/cpu/fwd.cpp", "csrc/torch/module.cpp", "LICENSE"} <= names


@pytest.mark.slow
def test_the_extension_reports_its_build_and_follows_the_kernels(project):
    import torch

    def build():
        result = run(project, "setup.py", "build_ext", "--inplace", FLASH_CUDA_BUILD="cpu")
        assert result.returncode == 0, result.stdout
        code = "from flash_cuda import _C; print(_C.value, _C.torch, repr(_C.archs))"
        return result.stdout, run(project, "-c", code).stdout.split()

    output, reported = build()
    assert reported == ["1", torch.__version__, "''"]
    assert output.count("flash_cuda: building for CPU only (FLASH_CUDA_BUILD=cpu)\n") == 1
    output, _ = build()
    assert "0 of" in output and "no work to do" in output
    write(project / "csrc/core/b.h", "#pragma once\n#define VALUE 7\n")
    assert build()[1][0] == "7"


def test_the_package_carries_its_stub_and_names_what_it_needs(tmp_path):
    for name in ("build_kernels.py", "setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(REPO / name, tmp_path)
    shutil.copytree(REPO / "flash_cuda", tmp_path / "flash_cuda", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    result = run(tmp_path, "setup.py", "egg_info", "build_py", "--build-lib", "out")
    assert result.returncode == 0, result.stdout
    assert {"_C.pyi", "py.typed", "__init__.py"} <= {p.name for p in (tmp_path / "out/flash_cuda").iterdir()}
    metadata = (tmp_path / "flash_cuda.egg-info/PKG-INFO").read_text()
    assert "Requires-Python: >=3.10" in metadata and "Requires-Dist: torch>=2.9" in metadata
