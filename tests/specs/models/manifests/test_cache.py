"""Unknown models are inspected in a subprocess, announced first, remembered, and never trusted."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from legoai.specs.models.manifests import cache as manifest_cache
from legoai.specs.models.manifests.cache import default_cache_directory, find_module_file, read_config
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.manifests.manifest import ManifestError
from legoai.specs.models.source import ModelSource
from support.manifests import inspected_in_this_process

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

    def load(self, kind: str, target: str, timeout: float = 60.0, **arguments):
        return load_manifest(
            ModelSource(kind=kind, target=target, arguments=arguments),
            base_directory=self.directory,
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
    entry.write_text(entry.read_text()[:-40])
    assert workplace.load("python", "factories.models:build", depth=3).parameter_count == 10 * 16 + 3 * 272
    assert len(workplace.announced) == 3, "a corrupt entry is ignored"
    assert json.loads(entry.read_text())["manifest"], "and rewritten"
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
    ("signal_sent", "said"), [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, ""), (signal.SIGKILL, "")]
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
    place = {"base_directory": str(workplace.directory), "sys_path": [], "reply": str(workplace.directory / "reply")}
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


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path):
    limit = '[0.0, {"__float__": "Infinity"}, -Infinity, {"__float__": "-Infinity"}, {"__float__": "other"}]'
    (tmp_path / "config.json").write_text(f'{{"model_type": "mamba2", "time_step_limit": {limit}}}')
    infinity = float("inf")
    fields = read_config(tmp_path / "config.json")
    assert fields["time_step_limit"] == [0.0, infinity, -infinity, -infinity, {"__float__": "other"}]


@pytest.mark.slow
def test_hugging_face_config_is_built_and_traced(workplace):
    pytest.importorskip("transformers")
    workplace.write("config.json", json.dumps(LLAMA))
    manifest = workplace.load("huggingface", "config.json", num_hidden_layers=2)
    assert manifest.flow_error is None
    assert manifest.model_class.endswith(".LlamaForCausalLM")
    assert (manifest.vocab_size, manifest.max_seq_len) == (100, 256)
    assert manifest.tied_parameters == (("model.embed_tokens.weight", "lm_head.weight"),)
    [blocks] = manifest.block_lists
    assert (blocks.path, len(blocks)) == ("model.layers", 2)
    attention = manifest.modules["model.layers.1.self_attn"]
    assert (attention.kind, attention.attributes) == (
        "attention",
        {"n_heads": 8, "n_kv_heads": 2, "head_dim": 8},
    )
    assert "hidden_states" in attention.keyword_inputs
    calls = [step.name for step in manifest.modules["model.layers.1"].flow if step.op in ("call", "add")]
    assert calls == ["input_layernorm", "self_attn", "add", "post_attention_layernorm", "mlp", "add"]


@pytest.mark.parametrize(
    ("text", "arguments", "kind", "words"),
    [
        (None, {}, "config_missing", "cannot read"),
        ("{", {}, "config_invalid", "is not JSON"),
        ("{}", {}, "config_invalid", "no model_type"),
        ('{"model_type": "zork"}', {}, "unknown_architecture", "'zork'"),
        (json.dumps({**LLAMA, "architectures": ["Zork"]}), {}, "unknown_architecture", "'Zork'"),
        (json.dumps(LLAMA), {"layers": 2}, "config_invalid", "no field named 'layers'"),
        (
            json.dumps(LLAMA),
            {"num_hidden_layers": 1001},
            "config_invalid",
            "num_hidden_layers = 1001 is more than 1000",
        ),
        ('{"model_type": "gpt2", "n_layer": 100000000}', {}, "config_invalid", "n_layer = 100000000 is more than 1000"),
        ('{"model_type": "swin", "depths": [2, 2000]}', {}, "config_invalid", "depths = 2000 is more than 1000"),
        (
            '{"model_type": "clip", "text_config": {"num_hidden_layers": 2000}}',
            {},
            "config_invalid",
            "num_hidden_layers = 2000 is more than 1000",
        ),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_config_file_error_is_one_sentence(workplace, text, arguments, kind, words):
    if kind == "unknown_architecture" or arguments:
        pytest.importorskip("transformers")
    if text is not None:
        workplace.write("config.json", text)
    error = workplace.error("huggingface", "config.json", **arguments)
    assert error.kind == kind
    assert words in error.message


@pytest.mark.parametrize(
    ("arguments", "words", "cure"),
    [
        (
            {"hidden_size": 62},
            "62) is not a multiple of the number of attention heads",
            "huggingface(…, FIELD = VALUE)",
        ),
        ({"num_hiden_layers": 2}, "no field named 'num_hiden_layers'", "did you mean `num_hidden_layers`?"),
        ({"zork": 2}, "no field named 'zork'", "the fields are those of `LlamaConfig`"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_refused_config_has_a_cure(workplace, arguments, words, cure):
    pytest.importorskip("transformers")
    workplace.write("config.json", json.dumps(LLAMA))
    error = workplace.error("huggingface", "config.json", **arguments)
    assert words in error.message and "\n" not in error.message
    assert cure in error.detail and words not in error.detail


@pytest.mark.slow
def test_missing_transformers_error_names_the_install_command(workplace):
    workplace.write("transformers.py", "raise ImportError('not here')")
    workplace.write("config.json", json.dumps(LLAMA))
    error = workplace.error("huggingface", "config.json")
    assert error.kind == "transformers_missing"
    assert "pip install" in error.message
