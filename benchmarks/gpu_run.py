"""One run on a machine with a GPU: build, test, and on request sanitize and benchmark; leaves logs and record.json.

    python benchmarks/gpu_run.py OUT [--tests tests/test_x.py ...] [--marker cuda] [--sanitizer] [--bench "command"]

Kernel objects in build/kernels that fit this machine's compilers are used as they are. Every test file runs in a
process of its own, so that a crash or a hang costs that file only. record.json is rewritten after every step, so that
a run that is cut off still says how far it came.
"""

import argparse
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")


def source_hash():
    """Names the code that ran, also where there is no git: csrc, the package and the build files."""
    files = [p for folder in ("csrc", "flash_cuda") for p in (ROOT / folder).rglob("*")]
    files = [p for p in files if p.suffix in (".h", ".cuh", ".cpp", ".cu", ".py")]
    digest = hashlib.sha256()
    for path in sorted([*files, ROOT / "setup.py", ROOT / "build_kernels.py"]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def output_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"


def machine():
    import torch

    smi = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "commit": output_of("git", "rev-parse", "--verify", "-q", "HEAD") or "none",
        "source": source_hash(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "driver": smi.splitlines()[0].split(", ")[-1] if smi else "none",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def run(command, log, timeout, **env):
    """Runs a command with its output added to a log; {"status", "seconds"}, status "timeout" when it was ended."""
    start = time.monotonic()
    with open(log, "a") as file:
        print(f"\n$ {command if isinstance(command, str) else shlex.join(command)}", file=file, flush=True)
        process = subprocess.Popen(
            command, shell=isinstance(command, str), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env}, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it has started as well
            process.wait()
            status = "timeout"
    return {"status": status, "seconds": round(time.monotonic() - start, 1)}


def run_tests(path, marker, log, timeout, prefix=(), **env):
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    selection = ["-m", marker] if marker else []
    command = [*prefix, sys.executable, "-m", "pytest", path, "-q", f"--junitxml={report}", *selection]
    result = run(command, log, timeout, **env)
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    if report.exists():
        suite = ElementTree.parse(report).getroot().find("testsuite")
        counts = {key: int(suite.get(key)) for key in counts}
        report.unlink()
    if result["status"] == 5:  # pytest: nothing in this file carries the marker
        result["status"] = 0
    return {**result, **counts, "passed": counts["tests"] - sum(counts[k] for k in ("failures", "errors", "skipped"))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tests", nargs="*", help="test files; default: all")
    parser.add_argument("--marker", default="", help="pytest -m expression, such as cuda")
    parser.add_argument("--jobs", type=int, default=1, help="test files at a time; times are then not comparable")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test file")
    parser.add_argument("--sanitizer", nargs="*", metavar="FILE",
                        help="compute-sanitizer on the tests marked sanitize and not slow, of all files or of these")  # fmt: skip
    parser.add_argument("--no-build", action="store_true", help="test the extension that is there")
    parser.add_argument("--bench", help="a shell command; it finds the output folder in $OUT")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    record, rows = {**machine(), "steps": {}}, []

    def note(name, result):
        record["steps"][name] = result
        (out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
        counts = " ".join(f"{result[k]} {k}" for k in ("passed", "failures", "errors", "skipped") if result.get(k))
        verdict = "ok" if result["status"] == 0 else f"FAILED ({result['status']})"
        rows.append(f"{name:44} {verdict:16} {result['seconds']:7.1f} s  {counts}")
        print(rows[-1], flush=True)
        return result["status"] == 0

    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    good = args.no_build or note("build", run(build, out / "build.log", 540, FLASH_CUDA_BUILD="cuda"))
    if good:
        tests = args.tests if args.tests is not None else sorted(p.as_posix() for p in ROOT.glob("tests/test_*.py"))
        names = [os.path.relpath(ROOT / t, ROOT) for t in tests]
        work = [(name, (name, args.marker, out / f"{Path(name).stem}.log", args.timeout), {}) for name in names]
        for tool in () if args.sanitizer is None else SANITIZERS:
            # Errors of other people's kernels are not ours to report; ours are all in namespace flash. (initcheck must
            # see the others too, since they fill our inputs.) Without torch's cache every tensor is an allocation of
            # its own, so that a read past its end is seen.
            ours = [] if tool == "initcheck" else ["--kernel-name", "kns=flash"]
            prefix = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", "--print-limit", "20", *ours]
            for name in args.sanitizer or [n for n in names if "mark.sanitize" in (ROOT / n).read_text()]:
                log = out / f"{tool}_{Path(name).stem}.log"
                more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
                work.append((f"{tool} {name}", (name, "sanitize and not slow", log, args.timeout, prefix), more))
        with ThreadPoolExecutor(args.jobs) as pool:
            results = [pool.submit(run_tests, *given, **more) for _, given, more in work]
            for (what, _, _), result in zip(work, results):
                good &= note(what, result.result())
        if args.bench:
            good &= note("bench", run(args.bench, out / "bench.log", 540, OUT=str(out)))
    print("\n" + "\n".join(rows))
    print(f"{', '.join(record['devices']) or 'no GPU'}, torch {record['torch']}, source {record['source'][:12]}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
