"""Builds flash_cuda._C: the kernel objects (build_kernels.py) and bindings for the torch of this environment."""

import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # pip runs this file without its folder on the path
import build_kernels as kernels  # noqa: E402

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ModuleNotFoundError as error:
    # An sdist needs no torch. Anything else stops here, before pip has fetched what the package depends on.
    if not {"sdist", "egg_info"} & set(sys.argv):
        kernels.fail(
            f"torch cannot be imported while building ({error}); install it, then: pip install --no-build-isolation ."
        )
    torch, BuildExtension = None, build_ext


class Build(BuildExtension):
    """Compiles the kernels, completes the extension with them, and leaves the bindings to torch's own build."""

    def build_extensions(self):
        toolkit, why = kernels.choose(torch.__version__, torch.version.cuda)
        archs = kernels.cuda_archs() if toolkit else []
        print(f"flash_cuda: building for CPU {f'and CUDA {archs}' if toolkit else 'only'} ({why})", flush=True)
        os.environ["PATH"] += os.pathsep + os.path.dirname(kernels.find_ninja())  # torch looks for it there alone
        (ext,) = self.extensions
        ext.extra_objects = kernels.compile_kernels(toolkit)
        ext.extra_link_args += kernels.shared_runtime()
        ext.define_macros += [
            ("FLASH_TORCH_VERSION_BUILT", f'"{torch.__version__}"'),
            ("FLASH_CUDA_ARCHS_BUILT", f'"{";".join(archs)}"'),
            ("FLASH_CUDA_WHY", '"{}"'.format(why.replace('"', "'"))),
        ]
        if toolkit:
            ext.define_macros.append(("FLASH_WITH_CUDA", None))
            ext.include_dirs.append(os.path.join(toolkit.root, "include"))
            ext.library_dirs += [os.path.join(toolkit.root, d) for d in ("lib64", "lib")]
            # The runtime library that torch has already loaded: one state, one current device.
            ext.libraries += ["c10_cuda", "cudart"]
        os.environ["MAX_JOBS"] = str(kernels.jobs())
        super().build_extensions()


def bindings():
    return CppExtension(
        "flash_cuda._C",
        sorted(str(p.relative_to(kernels.ROOT)) for p in (kernels.ROOT / "csrc/torch").glob("*.cpp")),
        # at::parallel_for is an inline template: without -fopenmp it would run on one thread, silently.
        extra_compile_args={"cxx": ["-O2", "-g0", "-fopenmp", "-fvisibility=hidden"]},
        extra_link_args=["-fopenmp"],
    )


setup(ext_modules=[bindings()] if torch else [], cmdclass={"build_ext": Build})
