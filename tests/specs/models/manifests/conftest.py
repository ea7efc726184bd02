"""Factories and configs in a folder of their own, with a cache of their own."""

import textwrap
from pathlib import Path

import pytest

from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.manifests.manifest import ManifestError
from legoai.specs.models.source import ModelSource
from support.models.manifests import inspected_in_this_process

FACTORY = """
    import sys
    import torch
    from torch import nn
    from factories.widths import WIDTH

    print("noise on standard output")
    print("noise on standard error", file=sys.stderr)

    def build(depth=2):
        assert torch.empty(0).is_meta
        return nn.Sequential(nn.Embedding(10, WIDTH), *[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])

    class Holder:
        build = staticmethod(build)

    def raises():
        raise ValueError("no such width")

    def leaves():
        sys.exit("leaving")

    def vanishes():
        import os
        os._exit(3)

    def scripted():
        return nn.Sequential(nn.Embedding(10, WIDTH), torch.jit.script(nn.ReLU()))

    def lazy():
        return nn.Sequential(nn.Embedding(10, WIDTH), nn.LazyLinear(WIDTH))

    class Keywords(nn.Embedding):
        def forward(self, *, tokens):
            return super().forward(tokens)

    def keywords():
        return Keywords(10, WIDTH)

    def number():
        return 3

    def sleeps(pid_file):
        import os, pathlib, time
        pathlib.Path(pid_file).write_text(str(os.getpid()))
        time.sleep(60)

    def leaves_thread():
        import threading, time
        threading.Thread(target=time.sleep, args=(600,)).start()
        return build()
"""


class Workplace:
    """A directory with a factory package, and a cache of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cache = directory / "cache"
        self.announced: list[str] = []
        self.write("factories/__init__.py", "")
        self.write("factories/widths.py", "WIDTH = 8")
        self.write("factories/models.py", FACTORY)

    def write(self, name: str, text: str) -> None:
        file = self.directory / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))

    def load(self, kind: str, target: str, timeout: float = 60.0, *, steps: bool = False, **arguments):
        return load_manifest(
            ModelSource(kind=kind, target=target, arguments=arguments),
            base_directory=self.directory,
            steps=steps,
            announce=self.announced.append,
            cache_directory=self.cache,
            timeout=timeout,
        )

    def error(self, kind: str, target: str, **arguments) -> ManifestError:
        with pytest.raises(ManifestError) as caught:
            self.load(kind, target, **arguments)
        return caught.value


@pytest.fixture
def workplace(tmp_path):
    return Workplace(tmp_path)


@pytest.fixture
def in_this_process():
    """What the inspector answers does not depend on its process; a few tests show that answers come through one."""
    with inspected_in_this_process():
        yield
