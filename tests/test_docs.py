"""README says what is so: its code runs, its commands, files, names, variables and step labels exist, its table is that
of the result file."""

import importlib.util
import inspect
import re
import shlex
from pathlib import Path

import pytest

import flash_cuda
from flash_cuda import cli

ROOT = Path(flash_cuda.__file__).parents[1]
README = (ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else ""
pytestmark = pytest.mark.skipif(not README, reason="README.md is not installed with the package")

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
FORWARD_SCHEDULES = ("csrc/cpu/fa1_fwd.cpp", "csrc/cpu/fa2_fwd.cpp", "csrc/fa2/fwd_kernel.cuh")
LABELS = ("[1]", "[2]", "[3]", "[4]", "[4a]", "[4b]", "[4c]", "[4d]", "[5]", "[6]", "[7]")


def section(title):
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("code", [code for language, code in BLOCKS if language == "python"])
def test_python_runs(code):
    exec(compile(code, "README.md", "exec"), {})


def test_there_are_two_commands():
    assert [language for language, _ in BLOCKS] == ["bash", "bash", "python"]
    install, test = (shlex.split(code) for _, code in BLOCKS[:2])
    assert install[-4:] == ["python", "-m", "flash_cuda", "demo"] and test[:3] == ["python", "-m", "pytest"]
    # What the build needs is not fetched by --no-build-isolation, so the command must.
    named = install[install.index("install") + 1 : install.index("&&")]
    backend = re.search(r"requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text()).group(1)
    assert {re.match(r"[\w-]+", name).group() for name in re.findall(r'"(.*?)"', backend)} <= set(named)
    assert {"torch", "numpy", "rich", "matplotlib", "pytest"} <= set(named)


def test_commands_exist(monkeypatch):
    monkeypatch.setattr(cli, "_device", str)  # README's GPU need not be here
    parser = cli.parser()
    commands = re.findall(r"python -m flash_cuda (\w+)((?: --?[\w-]+(?: [\w./]+)*)*)", README)
    assert len(commands) >= 3
    for command, options in commands:
        assert parser.parse_args([command, *shlex.split(options)]).command == command
    listed = re.search(r"On the command line: `python -m flash_cuda demo`, (.*?);", README).group(1)
    names = {"demo", *re.findall(r"`(\w+)`", listed)}
    assert names == set(parser._subparsers._group_actions[0].choices)


def test_files_exist():
    links = re.findall(r"\]\(([^)]*)\)", README)
    paths = [path for path in links if not path.startswith("http")]
    paths += re.findall(r"`((?:csrc|flash_cuda|benchmarks|tests)/[\w./]+)`", README)
    assert "csrc/cpu/fa2_fwd.cpp" in paths
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_the_api_table_is_the_api():
    table = section("Use")
    for name, given in re.findall(r"^\| `(\w+)\((.*?)\)`", table, re.M):
        target = getattr(flash_cuda, name)
        named = [word for word in given.split(", ") if word not in ("", "*", "...")]
        parameters = list(inspect.signature(target).parameters)
        assert named == parameters[: len(named)], name
        if name == "attention":
            assert named == parameters
    exported = {name for name in flash_cuda.__all__ if not name[0].isupper()} - {"__version__"}
    missing = {name for name in exported if f"`{name}" not in table}
    assert not missing


def test_there_are_thirteen_rules():
    numbers = re.findall(r"^(\d+)\. ", section("The rules"), re.M)
    assert numbers == [str(n) for n in range(1, 14)]


def test_environment_variables_are_read():
    sources = "".join(path.read_text() for path in (ROOT / "setup.py", ROOT / "build_kernels.py"))
    names = re.findall(r"^\| `([A-Z_]+)`", section("Build"), re.M)
    assert len(names) >= 3
    assert not [name for name in names if f'"{name}"' not in sources]


@pytest.mark.parametrize("path", FORWARD_SCHEDULES)
def test_every_step_is_labelled_once_and_in_readme(path):
    comments = "\n".join(re.findall(r"//.*", (ROOT / path).read_text()))
    assert {label: comments.count(label) for label in LABELS} == dict.fromkeys(LABELS, 1)
    assert path in section("Follow one query tile")
    found = re.findall(r"`(\[\d[a-d]?\])`", section("Follow one query tile"))
    assert tuple(found) == LABELS


def test_the_words_of_a_label_are_those_of_readme():
    """A reader who greps a label finds the step that README names."""
    steps = dict(re.findall(r"^\| `(\[\d[a-d]?\])` \| (.*?) \|$", section("Follow one query tile"), re.M))
    plain = lambda text: re.sub(r"[^a-z0-9]", "", text.lower())  # noqa: E731
    for path in FORWARD_SCHEDULES:
        source = (ROOT / path).read_text()
        for label in LABELS:
            (line,) = [line for line in re.findall(r"//(.*)", source) if label in line]
            assert plain(line.split(label)[1]).startswith(plain(steps[label])), f"{path} {label}"


def test_versions_are_told_truthfully():
    table = section("Three answers to one problem")
    for version in flash_cuda.dispatch.VERSIONS.values():
        (row,) = re.findall(rf"^\| `{version.name}` \|.*$", table, re.M)
        runs = row.rsplit("|", 2)[1]
        assert ("CPU" in runs) is version.cpu
        assert ("GPU" in runs) is version.cuda
        assert ("nowhere yet" in runs) is not (version.cpu or version.cuda)


def test_the_benchmark_table_is_that_of_the_results():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "readme_table.py")
    readme_table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme_table)
    assert readme_table.RESULTS
    assert readme_table.splice(README, "\n".join(map(readme_table.render, readme_table.RESULTS))) == README
    assert all(path.with_suffix(".png").exists() for path in readme_table.RESULTS)
    if readme_table.GPU_RESULTS.exists():
        assert readme_table.splice_gpu(README, readme_table.render_gpu(readme_table.gpu_rows())) == README
        assert readme_table.GPU_PICTURE.exists()
