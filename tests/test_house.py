"""Rules of the house: contents of the distributions, contents of files, and imports of the lint path."""

import ast
import importlib.util
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import tokenize
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("specs", "dsl", "lowering", "runtime", "cost")

# Spelled in parts, so that this file does not break its own rule.
MACHINE_PATH = re.compile(r"(?<![\w.~/*-])/(?:" + "|".join(("work", "root", "home", "Users")) + r")/\w")

HEAVY = ("torch", "pydantic", "numpy", "networkx", "transformers")


def tracked_files() -> list[Path]:
    """Paths, relative to the root, of the files under version control; those deleted in the working tree left out."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def shipped_files() -> set[str]:
    """What the five folders hold and an installed package needs, by its name inside the wheel."""
    return {
        f"legoai/{path.as_posix()}"
        for path in tracked_files()
        if path.parts[0] in FLOORS and path.name.endswith((".py", ".lark", ".toml", ".json.gz"))
    }


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy so that no old build folder adds to them."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("the package 'build' is not installed")
    folder = tmp_path_factory.mktemp("build")
    outputs = shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=outputs)
    command = [sys.executable, "-m", "build", "--wheel", "--sdist", "--no-isolation", "--outdir", str(folder), "source"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def test_wheel_holds_every_subpackage_the_grammar_and_the_catalogue(distributions: Path):
    [wheel] = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert sorted(shipped_files() - names) == []
    assert {"legoai/py.typed", "legoai/__main__.py", "legoai/specs/catalogue/fabrics.toml"} <= names
    assert any(name.startswith("legoai/dsl/grammar/") and name.endswith(".lark") for name in names)


def test_wheel_has_only_the_package(distributions: Path):
    [wheel] = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"legoai"}


def test_sdist_holds_the_sources_as_files(distributions: Path):
    [sdist] = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.split("/", 1)[-1] for member in archive.getmembers() if member.isfile()}
    assert sorted(name for name in shipped_files() if f"src/{name}" not in names) == []


def test_every_folder_of_modules_is_a_package():
    folders = {path.parent for path in tracked_files() if path.suffix == ".py" and path.parts[0] in FLOORS}
    assert sorted(str(folder) for folder in folders if not (ROOT / folder / "__init__.py").exists()) == []


def test_links_point_to_the_five_folders():
    for floor in FLOORS:
        link = ROOT / "src" / "legoai" / floor
        assert link.is_symlink(), f"{link} is not a symbolic link: clone with core.symlinks=true"
        assert link.resolve() == ROOT / floor


def test_no_file_contains_a_machine_path():
    found = []
    for path in tracked_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # packed data
        found += [
            f"{path}:{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if MACHINE_PATH.search(line)
        ]
    assert found == []


def test_machine_path_pattern_matches_only_paths():
    for part in ("work", "root", "home"):
        assert MACHINE_PATH.search(f"see /{part}/someone/file")
        assert not MACHINE_PATH.search(f"https://example.org/{part}/page")
        assert not MACHINE_PATH.search(f"runs/{part}/tiny.py")


QUESTIONS = ("How", "What", "When", "Where", "Whether", "Which", "Who", "Why")


def first_docstring(path: Path) -> str:
    """The docstring of a module, of which no more is read than the tokens before its end."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.STRING:
                return inspect.cleandoc(str(ast.literal_eval(token.string)))
            if token.type not in (tokenize.ENCODING, tokenize.COMMENT, tokenize.NL):
                break
    return ""


def test_every_module_has_a_docstring_that_is_no_question():
    """Docstrings name what a module holds: readers search for the thing, not for a question about it."""
    folders = (*FLOORS, "tests", "benchmarks")
    modules = [path for path in tracked_files() if path.suffix == ".py" and path.parts[0] in folders]
    assert modules
    said = {path: first_docstring(ROOT / path) for path in modules}
    assert [str(path) for path, text in said.items() if not text and path.parts[0] in FLOORS] == []
    asked = [path for path, text in said.items() if text.partition("\n\n")[0].endswith("?")]
    asked += [path for path, text in said.items() if text.split(maxsplit=1)[0] in QUESTIONS]
    assert list(map(str, asked)) == []


NOT_FOR_LINT = ("legoai.specs.models.", "legoai.specs.device_file")
"""Modules that linting imports only for a user's device file, or never: reference models, and checks by pydantic."""


def lint_path_modules() -> list[str]:
    """All of the language, and the specs that linting may import."""
    names = []
    for floor in ("dsl", "specs"):
        names += [found.name for found in pkgutil.walk_packages([str(ROOT / floor)], prefix=f"legoai.{floor}.")]
    return [name for name in names if not name.startswith(NOT_FOR_LINT)]


def test_lint_imports_no_heavy_modules():
    modules = lint_path_modules()
    assert any(name.startswith("legoai.dsl.") for name in modules)
    code = (
        f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_demo_lowers_in_a_new_checkout(tmp_path: Path):
    """Its commands but the last, which trains, in a folder that has the plans and nothing else."""
    done = subprocess.run(["make", "-n", "-C", str(ROOT), "demo"], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("mkdir", ".venv/bin/legoai l"))]
    assert [line.split()[1] for line in lines if "legoai" in line] == ["lint", "lower"]
    (tmp_path / "plans").symlink_to(ROOT / "plans")
    for line in lines:
        command = line.replace(".venv/bin/legoai", f"{sys.executable} -m legoai")
        subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "runs/tiny/tiny.py").is_file()
