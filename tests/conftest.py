"""What a run prints first, GPU tests that skip with a reason, and a known state for every test."""

import sys
from pathlib import Path

import pytest
import torch

import flash_cuda
from flash_cuda import _C, dispatch

# Test files share kit.py and cases.py; pytest's importlib mode puts no folder of tests on the path by itself.
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("kit", "cuda_kit")


def _gpu():
    """(compute capability or None, what was found)."""
    if not torch.version.cuda:
        return None, f"torch {torch.__version__} is a CPU build"
    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} finds no CUDA GPU"
    if not _C.cuda_built():
        return None, "this build of flash_cuda is for the CPU only"
    capability = torch.cuda.get_device_capability()
    return capability, f"{torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}"


def pytest_report_header():
    return (f"flash_cuda {flash_cuda.__version__}, torch {torch.__version__}, CPU kernels: {_C.cpu_isa()} of "
            f"{', '.join(_C.cpu_isas())}, {torch.get_num_threads()} threads; GPU: {_gpu()[1]}")


def pytest_collection_modifyitems(items):
    capability, found = _gpu()
    for item in items:
        if item.get_closest_marker("cuda") and capability is None:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU: {found}"))
        if item.get_closest_marker("sm90") and capability != (9, 0):
            item.add_marker(pytest.mark.skip(reason=f"needs a Hopper GPU: {found}"))


@pytest.fixture(autouse=True)
def known_state():
    """Every test starts from one seed, and leaves the instruction set, fast memory and threads as they were."""
    isa, fast_memory, threads = _C.cpu_isa(), _C.cpu_fast_memory(), torch.get_num_threads()
    torch.manual_seed(0)
    dispatch.choose.cache_clear()  # a test may pretend another machine
    yield
    _C.set_cpu_isa(isa)
    _C.set_cpu_fast_memory(fast_memory)
    torch.set_num_threads(threads)
