"""What `import flash_cuda` says when its compiled part is missing or does not fit."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

import flash_cuda


def message_of_import(folder, name=None, content=b""):
    """The last line that Python prints when it imports the package from `folder`, with one file as its extension."""
    package = folder / "flash_cuda"
    package.mkdir()
    for source in Path(flash_cuda.__file__).parent.glob("*.py"):
        shutil.copy(source, package)
    if name is not None:
        (package / name).write_bytes(content)
    run = subprocess.run(
        [sys.executable, "-c", "import flash_cuda"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    return run.stderr.strip().splitlines()[-1]


def test_source_folder_without_a_build(tmp_path):
    message = message_of_import(tmp_path)
    assert message.startswith("ImportError: flash_cuda: the compiled part, flash_cuda._C, is missing in ")
    assert message.endswith("build it with: pip install --no-build-isolation -e .")


def test_built_for_another_python(tmp_path):
    message = message_of_import(tmp_path, "_C.cpython-399-x86_64-linux-gnu.so")
    assert "_C.cpython-399-x86_64-linux-gnu.so was built for another Python" in message
    assert f"_C{EXTENSION_SUFFIXES[0]}" in message and "run: pip install --no-build-isolation" in message


@pytest.mark.parametrize("version", ["1.2.3+cu999", torch.__version__])
def test_cannot_be_loaded(tmp_path, version):
    # No library at all, but it holds the text that every build carries.
    content = b"\0junk\0flash_cuda-built-for-torch=" + version.encode() + b"\0junk"
    message = message_of_import(tmp_path, "_C" + EXTENSION_SUFFIXES[0], content)
    if version == torch.__version__:
        assert "cannot be loaded (" in message
    else:
        assert f"was built for torch {version} and cannot be loaded with torch {torch.__version__} (" in message
    assert message.endswith("rebuild it: pip install --no-build-isolation --no-deps --force-reinstall .")


def test_a_real_build_carries_its_torch_version():
    version = flash_cuda._C.build_info()["torch"]
    assert version == torch.__version__
    assert b"flash_cuda-built-for-torch=" + version.encode() in Path(flash_cuda._C.__file__).read_bytes()
