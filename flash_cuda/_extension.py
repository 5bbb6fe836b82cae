"""Loads flash_cuda._C, or says in one sentence why it cannot be loaded."""

import importlib
import importlib.machinery
import re
from pathlib import Path

import torch  # before _C: it brings the libraries that _C links to

_HERE = Path(__file__).resolve().parent
_REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall ."


def load():
    """The module flash_cuda._C."""
    try:
        return importlib.import_module("flash_cuda._C")
    except ImportError as error:
        raise ImportError(why_not(error)) from error


def why_not(error):
    """One sentence: what is wrong with the extension that raised `error`, and the way out."""
    built = sorted(_HERE.glob("_C.*so"))
    if not built:
        return (
            f"flash_cuda: the compiled part, flash_cuda._C, is missing in {_HERE}; in a source folder build it with:"
            " pip install --no-build-isolation -e ."
        )
    usable = [path for path in built if path.name in ("_C" + s for s in importlib.machinery.EXTENSION_SUFFIXES)]
    if not usable:
        suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
        return f"flash_cuda: {built[0].name} was built for another Python (this one loads _C{suffix}); run: {_REBUILD}"
    found = re.search(rb"flash_cuda-built-for-torch=([\w.+-]+)", usable[0].read_bytes())
    torch_then = found.group(1).decode() if found else "another version"
    detail = str(error).splitlines()[0]
    if torch_then == torch.__version__:
        return f"flash_cuda: {usable[0].name} cannot be loaded ({detail}); rebuild it: {_REBUILD}"
    return (
        f"flash_cuda: {usable[0].name} was built for torch {torch_then} and cannot be loaded with torch"
        f" {torch.__version__} ({detail}); rebuild it: {_REBUILD}"
    )
