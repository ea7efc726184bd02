"""A cached manifest is that of a factory's files and environment as they are."""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from legoai.specs.files import MOST_TEXT
from legoai.specs.models.manifests import dependency_recorder
from legoai.specs.models.manifests.dependencies import fingerprint, unchanged
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.source import ModelSource
from support.models.manifests import inspected_in_this_process


@pytest.fixture(autouse=True)
def in_this_process():
    with inspected_in_this_process():
        yield


class Factory:
    """A module beside a plan, whose `build` returns a linear layer, and how often it was inspected."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "plans"
        self.directory.mkdir()
        self.cache = directory / "cache"
        self.inspections = 0

    def write(self, text: str, name: str = "factory_of_dependencies.py") -> Path:
        file = self.directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def announce(self, _: str) -> None:
        self.inspections += 1

    def width(self) -> int:
        manifest = load_manifest(
            ModelSource(kind="python", target="factory_of_dependencies:build"),
            base_directory=self.directory,
            announce=self.announce,
            cache_directory=self.cache,
        )
        return manifest.parameter_count // 2

    def cached(self) -> str:
        [entry] = self.cache.iterdir()
        return entry.read_text()


@pytest.fixture
def factory(tmp_path):
    return Factory(tmp_path)


BUILD = """
    import json, os
    from pathlib import Path
    from torch import nn

    def layer(width):
        return nn.Linear(width, 2, bias=False)
"""


def test_an_edit_in_another_package_is_noticed(factory, tmp_path, monkeypatch):
    library = tmp_path / "lib"
    monkeypatch.setattr(sys, "path", [*sys.path, str(library)])
    factory.write("", "../lib/layers_of_another_package/__init__.py")
    factory.write("WIDTH = 8", "../lib/layers_of_another_package/widths.py")
    factory.write(
        BUILD
        + """
    from layers_of_another_package.widths import WIDTH

    def build():
        return layer(WIDTH)
    """
    )
    try:
        assert [factory.width(), factory.width(), factory.inspections] == [8, 8, 1]
        for name in [name for name in sys.modules if name.startswith("layers_of_another_package")]:
            del sys.modules[name]
        factory.write("WIDTH = 16", "../lib/layers_of_another_package/widths.py")
        assert [factory.width(), factory.width(), factory.inspections] == [16, 16, 2]
    finally:
        for name in [name for name in sys.modules if name.startswith("layers_of_another_package")]:
            del sys.modules[name]
    assert "site-packages" not in factory.cached()
    assert "legoai/specs" not in factory.cached(), "its format is in the key"


@pytest.mark.parametrize(
    "read",
    [
        '(Path(__file__).parent / "config.json").read_text()',
        'open(os.path.dirname(__file__) + "/config.json").read()',
        'os.read(os.open(os.path.dirname(__file__) + "/config.json", os.O_RDONLY), 99)',
    ],
)
def test_an_edit_of_a_file_that_the_factory_reads_is_noticed(factory, read):
    factory.write('{"width": 8}', "config.json")
    factory.write(f"{BUILD}\n    def build():\n        return layer(json.loads({read})['width'])\n")
    assert [factory.width(), factory.width(), factory.inspections] == [8, 8, 1]
    factory.write('{"width": 16}', "config.json")
    assert [factory.width(), factory.width(), factory.inspections] == [16, 16, 2]


def test_a_file_that_the_factory_misses_is_noticed(factory):
    factory.write(
        BUILD
        + """
    def build():
        try:
            return layer(int((Path(__file__).parent / "width").read_text()))
        except FileNotFoundError:
            return layer(8)
    """
    )
    assert [factory.width(), factory.width(), factory.inspections] == [8, 8, 1]
    factory.write("16", "width")
    assert [factory.width(), factory.inspections] == [16, 2]


def test_files_that_the_factory_writes_or_removes_are_none_that_it_depends_on(factory):
    factory.write(
        BUILD
        + """
    import tempfile, time

    def build():
        with tempfile.TemporaryDirectory() as scratch:
            log = Path(scratch, "log")
            log.write_text(str(time.time()))
            log.read_text()
        (Path(__file__).parent / "log").write_text(str(time.time()))
        (Path(__file__).parent / "log").read_text()
        return layer(8)
    """
    )
    assert [factory.width(), factory.width(), factory.inspections] == [8, 8, 1]


@pytest.mark.parametrize(
    "read",
    [
        'os.environ["WIDTH_OF_A_TEST"]',
        'os.getenv("WIDTH_OF_A_TEST")',
        'dict(os.environ)["WIDTH_OF_A_TEST"]',
        'next(value for name, value in os.environ.items() if name == "WIDTH_OF_A_TEST")',
    ],
)
def test_another_value_of_an_environment_variable_is_noticed(factory, monkeypatch, read):
    factory.write(f"{BUILD}\n    def build():\n        return layer(int({read}))\n")
    monkeypatch.setenv("WIDTH_OF_A_TEST", "12345")
    assert [factory.width(), factory.width(), factory.inspections] == [12345, 12345, 1]
    assert '12345"' not in factory.cached(), "a value may be a secret"
    monkeypatch.setenv("TERM", "another")  # as in another terminal
    assert [factory.width(), factory.inspections] == [12345, 1]
    monkeypatch.setenv("WIDTH_OF_A_TEST", "16")
    assert [factory.width(), factory.width(), factory.inspections] == [16, 16, 2]
    assert type(os.environ) is os._Environ


def test_a_new_environment_variable_is_noticed_where_the_factory_looks_for_any(factory, monkeypatch):
    factory.write(
        BUILD
        + """
    def build():
        return layer(len([name for name in os.environ if name.startswith("OPTION_OF_A_TEST")]) + 1)
    """
    )
    assert [factory.width(), factory.width(), factory.inspections] == [1, 1, 1]
    monkeypatch.setenv("OPTION_OF_A_TEST_1", "")
    assert [factory.width(), factory.inspections] == [2, 2]


def test_a_variable_that_the_factory_sets_is_none_that_it_depends_on(factory, monkeypatch):
    monkeypatch.delenv("WIDTH_OF_A_TEST", raising=False)
    factory.write(
        BUILD
        + """
    def build():
        os.environ["WIDTH_OF_A_TEST"] = "8"
        width = int(os.environ["WIDTH_OF_A_TEST"])
        del os.environ["WIDTH_OF_A_TEST"]
        return layer(width)
    """
    )
    assert [factory.width(), factory.width(), factory.inspections] == [8, 8, 1]
    monkeypatch.setenv("WIDTH_OF_A_TEST", "16")
    assert [factory.width(), factory.inspections] == [8, 1]


def test_a_factory_may_replace_the_environment(factory, monkeypatch):
    before = os.environ
    monkeypatch.setattr(os, "environ", before)
    factory.write(
        BUILD
        + """
    def build():
        os.environ = dict(os.environ)
        os.environ["WIDTH_OF_A_TEST"] = "8"
        return layer(int(os.environ["WIDTH_OF_A_TEST"]))
    """
    )
    assert factory.width() == 8
    assert type(before) is os._Environ


def test_a_large_file_is_known_by_its_size_and_time(tmp_path):
    weights = tmp_path / "weights"
    with weights.open("wb") as file:
        file.truncate(MOST_TEXT + 1)
    known = [(str(weights), fingerprint(weights) or "")]
    assert len(known[0][1]) < 64, "no digest"
    assert unchanged(known)
    os.utime(weights, ns=(0, 0))
    assert not unchanged(known)
    assert fingerprint(tmp_path) is None


def test_another_release_of_an_installed_package_is_noticed(factory, tmp_path, monkeypatch):
    library = tmp_path / "site-packages"
    monkeypatch.setattr(sys, "path", [*sys.path, str(library)])
    monkeypatch.setattr(dependency_recorder, "_package_folders", lambda: (f"{library}{os.sep}",))
    first = factory.write("WIDTH = 8", f"{library}/an_installed_package/__init__.py")
    factory.write(BUILD + "    from an_installed_package import WIDTH\n    build = lambda: layer(WIDTH)\n")
    assert [factory.width(), factory.width()] == [8, 8]
    assert factory.inspections == 1
    monkeypatch.delitem(sys.modules, "an_installed_package")
    first.write_text("WIDTH = 4\n# a later release")
    assert factory.width() == 4
