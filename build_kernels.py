"""Compiles the kernels (csrc/cpu/*.cpp, csrc/**/*.cu) to objects in build/kernels, without torch.

An object's file name carries a hash of all that its content depends on: the source, the project headers that it
includes, the flags and the compiler. So it stays good for another torch or another Python, and in a copy of this folder
on another machine.
`python build_kernels.py auto|cpu|cuda` compiles them alone; setup.py links them into flash_cuda._C.
"""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
ISA_FLAGS = {
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mprefer-vector-width=512",
    "avx2": "-mavx2 -mfma -mf16c",
    "generic": "",
}
CXX_FLAGS = (
    "-O3 -std=c++17 -fPIC -fvisibility=hidden -Wall -Wextra -Icsrc"
    " -fno-math-errno -fno-trapping-math -ffp-contract=fast"
)
# ptxas says nothing by itself when a kernel spills registers or keeps arrays in local memory; both ruin its speed.
NVCC_FLAGS = (
    "-O3 -std=c++17 -lineinfo -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-unknown-pragmas -Icsrc"
    " -Xptxas --warn-on-spills,--warn-on-local-memory-usage"
)
DEFAULT_ARCHS = "80;90a"
USUAL_TOOLKIT = "/usr/local/cuda"
OLDEST_TOOLKIT = (12, 4)
MEMORY_PER_JOB = 2 << 30  # bytes


def fail(reason):
    raise SystemExit(f"flash_cuda: {reason}")


class Toolkit(NamedTuple):
    root: str
    release: str  # such as "13.0"


class Unit(NamedTuple):
    source: str  # relative to the root, as everything in a command but the compiler
    label: str
    compiler: list
    identity: str
    flags: list


def find_toolkit():
    """(Toolkit, "") for the first CUDA toolkit with a compiler and headers, else (None, why).

    nvcc on PATH is often a wrapper script far from the toolkit, so it is asked where its toolkit is.
    """
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        dry = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True)
        top = re.search(r"^#\$ TOP=(.*)$", dry.stderr, re.M)
        places.append(os.path.realpath(top.group(1).strip()) if top else None)
    places = list(dict.fromkeys(p for p in [*places, USUAL_TOOLKIT] if p))
    for place in places:
        nvcc = os.path.join(place, "bin", "nvcc")
        if os.path.exists(nvcc) and os.path.exists(os.path.join(place, "include", "cuda_runtime.h")):
            version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
            release = re.search(r"release (\d+\.\d+)", version)
            if release:
                return Toolkit(place, release.group(1)), ""
    return None, f"no CUDA toolkit with bin/nvcc and include/cuda_runtime.h was found in {', '.join(places)}"


def choose(torch_version, torch_cuda):
    """What FLASH_CUDA_BUILD asks for and this machine can do: (Toolkit or None, one line that says why).

    torch_cuda is torch.version.cuda; "" stands for "any" when only kernels are compiled.
    """
    want = os.environ.get("FLASH_CUDA_BUILD", "auto")
    if want not in ("auto", "cpu", "cuda"):
        fail(f"FLASH_CUDA_BUILD must be auto, cpu or cuda, got {want!r}")
    if want == "cpu":
        return None, "FLASH_CUDA_BUILD=cpu"
    toolkit, reason = find_toolkit()
    if torch_cuda is None:
        reason = f"torch {torch_version} is built without CUDA"
    elif toolkit and tuple(map(int, toolkit.release.split("."))) < OLDEST_TOOLKIT:
        reason = f"nvcc in {toolkit.root} is {toolkit.release}, older than {'.'.join(map(str, OLDEST_TOOLKIT))}"
    elif toolkit and torch_cuda and toolkit.release.split(".")[0] != torch_cuda.split(".")[0]:
        reason = f"nvcc in {toolkit.root} is {toolkit.release} but torch {torch_version} is built for CUDA {torch_cuda}"
    if not reason:
        return toolkit, f"nvcc {toolkit.release} in {toolkit.root}"
    if want == "cuda":
        fail(f"FLASH_CUDA_BUILD=cuda cannot be done: {reason}")
    return None, reason


def cuda_archs():
    """FLASH_CUDA_ARCHS as a list such as ["80", "90a"]."""
    text = os.environ.get("FLASH_CUDA_ARCHS") or DEFAULT_ARCHS
    archs = [a for a in re.split(r"[;,\s]+", text) if a]
    if not archs or not all(re.fullmatch(r"[1-9]\d{1,2}a?", a) and int(a.rstrip("a")) >= 80 for a in archs):
        fail(f"FLASH_CUDA_ARCHS must list compute capabilities from 80 on, such as {DEFAULT_ARCHS!r}, got {text!r}")
    return list(dict.fromkeys(archs))


def gencode(source, archs):
    """nvcc's -gencode flags for one file. fa3 is written for sm_90a alone; the rest runs everywhere from sm_80 on."""
    if source.startswith("csrc/fa3/"):
        return ["-gencode", "arch=compute_90a,code=sm_90a"] if "90a" in archs else []
    numbers = sorted({int(a.rstrip("a")) for a in archs})
    flags = [f for n in numbers for f in ("-gencode", f"arch=compute_{n},code=sm_{n}")]
    newest = f"compute_{numbers[-1]}"
    return [*flags, "-gencode", f"arch={newest},code={newest}"]  # PTX, for GPUs newer than any in the list


def cxx():
    """(command, identity such as "gcc 12.2.0") of the C++ compiler."""
    command = shlex.split(os.environ.get("CXX") or "c++")
    try:
        out = subprocess.run([*command, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True)
    except FileNotFoundError:
        fail(f"no C++ compiler: {command[0]!r} was not found; install g++ or clang, or name one in CXX")
    macros = dict(re.findall(r"^#define (__\w+__) (.*)$", out.stdout, re.M))
    if "__GNUC__" in macros:  # clang defines it as well
        name = "clang" if "__clang__" in macros else "gcc"
        return command, f"{name} {macros['__VERSION__'].strip(chr(34))}"
    fail(f"{shlex.join(command)} is neither gcc nor clang; name one of them in CXX")


def shared_runtime():
    """Linker flags that make _C use the C++ runtime which torch has loaded.

    A compiler that has libstdc++ only as an archive would put a second copy into _C; C++ streams crash where two meet.
    """
    asked = [*cxx()[0], "-print-file-name=libstdc++.so"]
    found = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return [] if os.path.isabs(found) else ["-l:libstdc++.so.6"]


def units(toolkit):
    """Every object to be compiled."""
    command, identity = cxx()
    isas = list(ISA_FLAGS) if platform.machine() in ("x86_64", "AMD64") else ["generic"]
    out = []
    for path in sorted((ROOT / "csrc/cpu").glob("*.cpp")):
        source = path.relative_to(ROOT).as_posix()
        if path.name == "dispatch.cpp":  # picks an ISA at run time, so it must itself run everywhere
            flags = CXX_FLAGS.split() + [f"-DFLASH_HAS_{i.upper()}" for i in isas if i != "generic"]
            out.append(Unit(source, source, command, identity, flags))
            continue
        for isa in isas:
            flags = [*CXX_FLAGS.split(), *ISA_FLAGS[isa].split(), f"-DFLASH_ISA={isa}"]
            out.append(Unit(source, f"{source} for {isa}", command, identity, flags))
    if toolkit:
        nvcc = [os.path.join(toolkit.root, "bin", "nvcc")]
        # For new kernels: one that waits for ever ends with an error instead.
        bounded = ["-DFLASH_BOUNDED_WAITS"] if os.environ.get("FLASH_CUDA_BOUNDED_WAITS") == "1" else []
        for path in sorted((ROOT / "csrc").rglob("*.cu")):
            source = path.relative_to(ROOT).as_posix()
            if archs := gencode(source, cuda_archs()):
                out.append(Unit(source, source, nvcc, f"nvcc {toolkit.release}", NVCC_FLAGS.split() + bounded + archs))
    return out


def project_files(source):
    """source and every project header that it includes, directly or not, relative to the root."""
    found, todo = [], [source]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.append(name)
        for line in re.findall(r"^[ \t]*#[ \t]*include[ \t]*(\S+)", (ROOT / name).read_text(), re.M):
            if line.startswith("<"):
                continue
            # A header that the hash cannot see would leave stale objects behind, so it is an error.
            places = [] if line[0] != '"' else [(ROOT / name).parent / line.strip('"'), ROOT / "csrc" / line.strip('"')]
            header = next((p.resolve() for p in places if p.is_file()), None)
            if header is None or ROOT not in header.parents:
                fail(f'{name} includes {line}, which is no file of this project; write <...> for a system header')
            todo.append(header.relative_to(ROOT).as_posix())
    return sorted(found)


def object_path(unit):
    """Where the object belongs, relative to the root."""
    digest = hashlib.sha256("\0".join([unit.identity, platform.machine(), *unit.flags]).encode())
    for name in project_files(unit.source):
        digest.update(f"\0{name}\0".encode() + (ROOT / name).read_bytes())
    stem = re.sub(r"\W", "_", unit.label.removeprefix("csrc/"))
    return f"build/kernels/{stem}.{digest.hexdigest()[:20]}.o"


def free_memory():
    """Bytes that may be taken here: what the machine has left, or the container's limit if that is less."""
    free = []
    try:
        free.append(int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text()).group(1)) << 10)
        free.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError, AttributeError):
        pass  # no such file, or "max": that limit does not exist
    return min(free, default=1 << 62)


def jobs():
    wanted = os.environ.get("MAX_JOBS") or str(1 << 30)
    if not wanted.isdigit() or int(wanted) < 1:
        fail(f"MAX_JOBS must be a positive number, got {wanted!r}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, free_memory() // MEMORY_PER_JOB, int(wanted)))


def find_ninja():
    # Next to the interpreter too: a virtual environment is often used without being activated.
    path = os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(sys.executable)])
    return shutil.which("ninja", path=path) or fail("ninja is not installed; run: pip install ninja")


def compile_kernels(toolkit):
    """Compiles what is missing and returns the objects' paths, relative to the root."""
    wanted = {object_path(u): u for u in units(toolkit)}
    missing = {o: u for o, u in wanted.items() if not (ROOT / o).exists()}
    print(f"flash_cuda: {len(missing)} of {len(wanted)} kernel objects to compile, {jobs()} jobs", flush=True)
    if missing:
        # Existence is the whole question, so ninja gets no inputs; a cut-off compile leaves only a .tmp behind.
        command = "$run -c $in_file -o $out.tmp && mv $out.tmp $out"
        lines = [f"builddir = build/kernels\nrule compile\n  command = {command}\n  description = $label\n"]
        for out, unit in missing.items():
            run = shlex.join([*unit.compiler, *unit.flags]).replace("$", "$$")
            lines.append(f"build {out}: compile\n  run = {run}\n  in_file = {unit.source}\n  label = {unit.label}\n")
        folder = ROOT / "build" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text("\n".join(lines))
        (folder / ".ninja_log").unlink(missing_ok=True)  # a log of other commands would ask for more than is missing
        ninja = [find_ninja(), "-f", "build/kernels/build.ninja", "-j", str(jobs())]
        if subprocess.run(ninja, cwd=ROOT, env={**os.environ, "NINJA_STATUS": "flash_cuda: [%f/%t] "}).returncode:
            fail("a kernel did not compile; the compiler's message is above")
    return list(wanted)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ["FLASH_CUDA_BUILD"] = sys.argv[1]
    chosen, why = choose("", "")
    print(f"flash_cuda: kernels for {'CPU and CUDA' if chosen else 'CPU only'} ({why})", flush=True)
    compile_kernels(chosen)
