"""Unknown models are inspected in a subprocess, announced first, remembered, and never trusted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from legoai.specs.cache import read_cached, without_digest
from legoai.specs.models.manifests import cache as manifest_cache
from legoai.specs.models.manifests.cache import default_cache_directory, find_module_file
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.source import ModelSource


@pytest.mark.usefixtures("in_this_process")
def test_factory_manifest_is_cached_until_its_sources_change(workplace):
    manifest = workplace.load("python", "factories.models:build", depth=3)
    assert manifest.parameter_count == 10 * 8 + 3 * (8 * 8 + 8)
    assert manifest.vocab_size == 10
    announcement = 'inspecting python("factories.models:build", depth = 3) in a subprocess: this runs the model factory'
    assert workplace.announced == [announcement]
    assert workplace.cache.stat().st_mode & 0o777 == 0o700

    assert workplace.load("python", "factories.models:build", depth=3) == manifest
    assert len(workplace.announced) == 1, "the second time it comes from the cache"

    workplace.write("factories/widths.py", "WIDTH = 16")  # imported by the factory's module
    assert workplace.load("python", "factories.models:build", depth=3).parameter_count == 10 * 16 + 3 * 272
    assert len(workplace.announced) == 2

    [entry] = workplace.cache.iterdir()
    whole = entry.read_bytes()
    older = without_digest(whole)
    assert older is not None and b"[16]" in whole
    for count, damaged in enumerate((whole[:-40], whole.replace(b"[16]", b"[17]", 1), older), start=3):
        entry.write_bytes(damaged)
        assert workplace.load("python", "factories.models:build", depth=3).parameter_count == 10 * 16 + 3 * 272
        assert len(workplace.announced) == count, "a changed entry is ignored, and one without a digest"
        assert read_cached(entry) == older, "and rewritten"
    assert list(workplace.cache.iterdir()) == [entry]


@pytest.mark.parametrize(("kind", "target"), [("python", "factories.models:build"), ("huggingface", "config.json")])
def test_manifest_is_of_one_release_of_the_libraries(workplace, monkeypatch, kind, target):
    workplace.write("config.json", '{"model_type": "llama"}')
    source = ModelSource(kind=kind, target=target)
    installed = workplace.directory / "installed"
    monkeypatch.setattr(sys, "path", [str(installed), *sys.path])
    keys = set()
    for release in ("1", "2"):
        for package, file in (("torch", "version"), ("transformers", "__init__")):
            (installed / package).mkdir(parents=True, exist_ok=True)
            (installed / package / f"{file}.py").write_text(f"__version__ = '{release}'")
            keys.add(manifest_cache._key(source, workplace.directory))
    assert len(keys) == {"python": 2, "huggingface": 4}[kind]


@pytest.mark.usefixtures("in_this_process")
def test_a_factory_may_be_an_attribute_of_a_class(workplace):
    assert workplace.load("python", "factories.models:Holder.build").parameter_count == 224


@pytest.mark.parametrize(
    ("target", "arguments", "kind", "words"),
    [
        ("factories.models:leaves", {}, "factory_raised", "SystemExit: leaving"),
        ("factories.models:build", {"width": 3}, "factory_raised", "unexpected keyword argument 'width'"),
        ("factories.models:number", {}, "not_a_module", "returned int"),
        ("factories.models:scripted", {}, "not_a_module", "has scripted or traced `1`"),
        ("factories.models:lazy", {}, "not_a_module", "leaves the shapes of `1` open, a `LazyLinear`"),
        ("factories.models:keywords", {}, "not_a_module", "the forward of Keywords takes none"),
        ("factories.models:missing", {}, "factory_not_found", "has no 'missing'"),
        ("factories.nowhere:build", {}, "factory_not_found", "no module 'factories.nowhere'"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_factory_error_is_one_sentence(workplace, target, arguments, kind, words):
    assert_error(workplace, target, arguments, kind, words)


@pytest.mark.parametrize(
    ("target", "arguments", "cure"),
    [
        ("factories.models:missing", {}, "it defines `build`, "),
        ("factories.models:buidl", {}, "did you mean `factories.models:build`?"),
        ("factories.nowhere:build", {}, "modules are looked for beside the plan"),
        ("factories.models:number", {}, "let `number` end with `return` and the model"),
        ("factories.models:Maker", {}, "name a function that returns the model"),
        ("factories.models:needs", {"width": 2}, "the factory takes (width, depth = …); those with `…`"),
        ("factories.models:build", {"width": 3}, "the factory takes ("),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_factory_error_has_a_cure(workplace, target, arguments, cure):
    with (workplace.directory / "factories" / "models.py").open("a", encoding="utf-8") as module:
        module.write("\n\nclass Maker:\n    pass\n\n\ndef needs(width=1, *, depth):\n    return None\n")
    assert cure in workplace.error("python", target, **arguments).detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        ("factories.models:raises", "factory_raised", "ValueError: no such width"),
        ("factories.models:vanishes", "inspection_failed", "status 3"),
    ],
)
def test_factory_error_is_passed_from_its_process(workplace, target, kind, words):
    assert_error(workplace, target, {}, kind, words)


def assert_error(workplace, target, arguments, kind, words):
    error = workplace.error("python", target, **arguments)
    assert error.kind == kind
    assert words in error.message
    assert "\n" not in error.message
    assert not list(workplace.directory.glob("cache/*"))


@pytest.mark.usefixtures("in_this_process")
def test_missing_import_is_reported_as_a_factory_error(workplace):
    workplace.write("factories/broken.py", "import no_such_package")
    error = workplace.error("python", "factories.broken:build")
    assert error.kind == "factory_raised"
    assert "no_such_package" in error.message
    assert error.detail == "raised in `<module>`, at broken.py:1"


@pytest.mark.usefixtures("in_this_process")
def test_attribute_that_a_module_lacks_while_it_is_imported_is_a_factory_error(workplace):
    workplace.write("factories/early.py", "import os\nos.no_such_function()\n")
    error = workplace.error("python", "factories.early:build")
    assert error.kind == "factory_raised" and "no_such_function" in error.message
    assert error.detail == "raised in `<module>`, at early.py:2"


@pytest.mark.parametrize("target", ["factories.models", "factories/models.py:build", ":build", "a:b:c", "a b:c"])
def test_a_malformed_target_starts_no_process(workplace, target):
    assert workplace.error("python", target).kind == "factory_not_found"
    assert workplace.announced == []


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("target", ["statistics:build", "statistics.models:build"])
def test_a_module_that_the_standard_library_hides_is_named(workplace, target):
    library = "`statistics` is a module of Python's own library"
    assert workplace.error("python", target).detail == library
    workplace.write("statistics.py", "def build(): ...")
    assert (
        workplace.error("python", target).detail
        == f"{library}, which comes before the one beside the plan: rename yours"
    )


def wait_for_pid(file: Path) -> int:
    for _ in range(600):
        if file.exists() and file.read_text():
            return int(file.read_text())
        time.sleep(0.05)
    raise AssertionError("the factory was not reached")


def has_ended(pid: int) -> bool:
    """Whether a process that is not waited for ends: as a zombie where nobody else waits for it."""
    for _ in range(200):
        state = Path("/proc", str(pid), "stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_factory_exceeding_the_timeout_is_killed(workplace):
    pid_file = workplace.directory / "pid"
    for timeout in (8.0, 60.0):  # beside other tests, the imports before the factory may take longer than the first
        started = time.monotonic()
        error = workplace.error("python", "factories.models:sleeps", timeout=timeout, pid_file=str(pid_file))
        assert error.kind == "timeout"
        assert time.monotonic() - started < timeout + 20
        if pid_file.exists() and pid_file.read_text():
            break
    assert not is_running(wait_for_pid(pid_file))


@pytest.mark.parametrize(
    ("signal_sent", "said"),
    [
        pytest.param(signal.SIGINT, "interrupted\n", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "", marks=pytest.mark.slow),
        (signal.SIGKILL, ""),
    ],
)
def test_inspection_ends_with_the_process_that_asks(workplace, signal_sent, said):
    pid_file = workplace.directory / "pid"
    code = f"""
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.source import ModelSource
source = ModelSource(kind="python", target="factories.models:sleeps", arguments={{"pid_file": {str(pid_file)!r}}})
try:
    load_manifest(source, base_directory={str(workplace.directory)!r}, cache_directory={str(workplace.cache)!r})
except KeyboardInterrupt:
    print("interrupted")
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        inspected = wait_for_pid(pid_file)
        process.send_signal(signal_sent)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert out == said
    assert has_ended(inspected)


@pytest.mark.slow
def test_a_thread_that_the_factory_leaves_is_not_waited_for(workplace):
    assert workplace.load("python", "factories.models:leaves_thread", timeout=120.0).parameter_count == 224


@pytest.mark.slow
def test_inspection_limits_its_own_time(workplace):
    pid_file = workplace.directory / "pid"
    reading, writing = os.pipe()  # the asking process lives, and does not look at the clock
    arguments = {"pid_file": str(pid_file)}
    source = {"kind": "python", "target": "factories.models:sleeps", "preset": None, "arguments": arguments}
    place = {
        "base_directory": str(workplace.directory),
        "steps": False,
        "sys_path": [],
        "reply": str(workplace.directory / "reply"),
    }
    command = [sys.executable, "-P", "-m", "legoai.specs.models.inspect"]
    request = json.dumps({**source, **place, "timeout": 2, "parent": reading})
    try:
        done = subprocess.run(
            command, check=False, input=request, text=True, pass_fds=(reading,), capture_output=True, timeout=60
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert done.returncode == -signal.SIGALRM


@pytest.mark.usefixtures("in_this_process")
def test_steps_are_looked_at_where_that_is_asked_for(workplace):
    workplace.write(
        "factories/counting.py",
        """
        from torch import nn

        class Counting(nn.Embedding):
            calls = 0

            def forward(self, tokens):
                self.calls += 1
                return super().forward(tokens)

        def build():
            return Counting(8, 8)
        """,
    )
    asked = [
        workplace.load("python", "factories.counting:build", steps=steps).step_changes
        for steps in (False, True, True, False)
    ]
    assert asked[0] is None
    assert set(asked[1:]) == {"each forward sets `calls` anew, which a graph does not"}
    assert len(workplace.announced) == 2


def test_built_in_model_needs_no_process_and_no_cache(workplace):
    def load(**arguments):
        return load_manifest(
            ModelSource(kind="builtin", target="llama3", preset="tiny", arguments=arguments),
            base_directory=workplace.directory,
            announce=workplace.announced.append,
            cache_directory=workplace.cache,
        )

    assert load(n_layers=4).parameter_count == 853_120
    [blocks] = load(n_layers=2).block_lists
    assert len(blocks) == 2
    assert workplace.announced == []
    assert not workplace.cache.exists()


def test_cache_is_in_the_user_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / "legoai" / "manifests"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / ".cache" / "legoai" / "manifests"


@pytest.mark.usefixtures("in_this_process")
def test_missing_cache_is_ignored(workplace, monkeypatch):
    monkeypatch.setattr("legoai.specs.models.manifests.cache.user_cache", lambda: None)
    workplace.cache = None
    for _ in range(2):
        assert workplace.load("python", "factories.models:build").parameter_count == 224
    assert len(workplace.announced) == 2


@pytest.mark.usefixtures("in_this_process")
def test_unwritable_cache_is_ignored(workplace):
    workplace.cache.write_text("a file, not a directory")
    assert workplace.load("python", "factories.models:build").parameter_count == 224


def test_a_module_is_found_without_importing_its_package(workplace):
    workplace.write("factories/__init__.py", "raise RuntimeError('imported')")
    path = [str(workplace.directory)]
    assert find_module_file("factories.models", path) == workplace.directory / "factories/models.py"
    assert find_module_file("factories", path) == workplace.directory / "factories/__init__.py"
    assert find_module_file("nowhere", path) is None
