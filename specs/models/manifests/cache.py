"""Cache of manifests, filled by inspecting models in a subprocess.

An entry of the cache is one JSON file, named by the SHA-256 of its key: the source as the plan writes it, the text of
the defining file (the factory's module, or the config file), the releases of torch and, for a config file, of
transformers, and the format's version. Beside the manifest it holds what else the factory's import and call read, so
that an edit two imports away is noticed: see `dependencies`. A damaged or stale entry is recreated.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from legoai.specs.cache import read_cached, user_cache, write_cached
from legoai.specs.files import MOST_DATA, read_file
from legoai.specs.models.config_checks import MOST_LAYERS
from legoai.specs.models.manifests.dependencies import environment_digest, unchanged
from legoai.specs.models.manifests.manifest import FORMAT, Manifest, ManifestError
from legoai.specs.models.source import ModelSource

_INSPECTOR = "legoai.specs.models.inspect"


def cached_or_inspected(
    source: ModelSource,
    *,
    base_directory: Path,
    steps: bool,
    announce: Callable[[str], None] | None,
    cache_directory: Path | None,
    timeout: float,
) -> Manifest:
    """Return the manifest from the cache, or inspect the model; see `load_manifest`."""
    base_directory = base_directory.resolve()
    file = _entry(source, base_directory, cache_directory)
    cached = _read_entry(file, steps=steps)
    if cached is not None:
        return cached
    if announce is not None:
        announce(_announcement(source))
    reply = _ask(source, base_directory, timeout, steps=steps)
    if "error" in reply:
        raise ManifestError(**reply["error"])
    names = reply["environment"]
    entry = {**reply, "environment": [names, environment_digest(names, _environment())], "steps": steps}
    manifest = Manifest(reply["manifest"]) if file is None else _manifest(entry, file)
    _write_entry(file, entry)
    return manifest


def is_cached(source: ModelSource, *, base_directory: Path) -> bool:
    """Whether the manifest of a model that is not built in is available without running anything.

    Raises:
        ManifestError: as `_key` does.
    """
    return _read_entry(_entry(source, base_directory.resolve(), None), steps=False) is not None


def _entry(source: ModelSource, base_directory: Path, cache_directory: Path | None) -> Path | None:
    """Return the file of a model's entry; None where nothing can be cached."""
    directory = cache_directory or default_cache_directory()
    name = f"{_key(source, base_directory)}.json"
    return None if directory is None else directory / name


def default_cache_directory() -> Path | None:
    """Return `manifests` in the user's cache; None where there is none."""
    cache = user_cache()
    return None if cache is None else cache / "manifests"


def _announcement(source: ModelSource) -> str:
    consequence = {
        "python": "this runs the model factory",
        "huggingface": "this imports transformers",
    }
    return f"inspecting {source} in a subprocess: {consequence[source.kind]}"


def _key(source: ModelSource, base_directory: Path) -> str:
    """Return the digest of everything that determines the model, as far as it can be found without running anything.

    Raises:
        ManifestError: a factory is not written `pkg.mod:build`, or a config is missing, invalid or too large.
    """
    digest = hashlib.sha256()
    place = str(base_directory) if source.kind == "python" else ""
    digest.update(json.dumps([FORMAT, source.kind, str(source), place]).encode())
    for file in (*_source_files(source, base_directory), *_release_files(source)):
        digest.update(f"\n{file.name}\n".encode())
        digest.update(_content(file))
    return digest.hexdigest()


def _content(file: Path) -> bytes:
    try:
        return read_file(file, MOST_DATA)
    except OSError as error:
        raise ManifestError("inspection_failed", f"cannot read {file}: {error.strerror or error}") from error


def _release_files(source: ModelSource) -> list[Path]:
    """Return the files that name the releases of the libraries which define the model."""
    modules = ("torch.version", *(["transformers"] if source.kind == "huggingface" else []))
    found = [find_module_file(module, sys.path) for module in modules]
    return [file for file in found if file is not None]


def _source_files(source: ModelSource, base_directory: Path) -> list[Path]:
    if source.kind == "huggingface":
        fields = read_config(base_directory / source.target, name=source.target)
        _require_few_layers({**fields, **source.arguments}, source.target)
        return [base_directory / source.target]
    module, separator, attribute = source.target.partition(":")
    if not separator or not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        raise ManifestError(
            "factory_not_found", f'a factory is written "package.module:function", not {source.target!r}'
        )
    file = find_module_file(module, [str(base_directory), *sys.path])
    return [] if file is None else [file]


def find_module_file(module: str, search_path: list[str]) -> Path | None:
    """Find the source file of a module without importing it or its parents.

    Returns None for a module that only an import hook could find; its files are known once it was inspected.
    """
    relative = Path(*module.split("."))
    for directory in search_path:
        for file in (
            Path(directory or ".", relative, "__init__.py"),
            Path(directory or ".", relative).with_suffix(".py"),
        ):
            if file.is_file():
                return file
    return None


def read_config(config_file: str | Path, *, name: str | None = None) -> dict[str, Any]:
    """Read a Hugging Face `config.json`; `name` is its name in errors, by default its path.

    Numbers that JSON lacks are written `{"__float__": "Infinity"}` by `transformers`, and `Infinity` by Python.

    Raises:
        ManifestError: it is missing, too large, no JSON object, or has no `model_type`.
    """
    name = name or str(config_file)
    try:
        fields = json.loads(read_file(Path(config_file), MOST_DATA), object_hook=_special_float)
    except OSError as error:
        raise ManifestError("config_missing", f"cannot read {name}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ManifestError("config_invalid", f"{name} is not JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ManifestError("config_invalid", f"{name} is not a model config: it has no model_type")
    return fields


_LAYERS: Final = re.compile(r"(?:.*_)?(?:layers?|depths?|blocks)")
"""Names of fields with numbers of layers: `num_hidden_layers`, `n_layer`, `encoder_layers`, `depths`."""


def _require_few_layers(fields: Mapping[str, Any], name: str) -> None:
    """Check the numbers of layers in a config and its parts, each of which `transformers` would build.

    Raises:
        ManifestError: there are more than of any built-in model.
    """
    parts: list[Mapping[str, Any]] = [fields]
    for part in parts:
        for field, value in part.items():
            if isinstance(value, dict):
                parts.append(value)
            for count in value if isinstance(value, list) else [value]:
                if isinstance(count, int | float) and count > MOST_LAYERS and _LAYERS.fullmatch(field):
                    problem = f"{field} = {count} is more than {MOST_LAYERS}, the most that is looked at"
                    raise ManifestError("config_invalid", f"{name}: {problem}")


def _special_float(item: dict[str, Any]) -> Any:
    """Return the number that `transformers` has written as an object, or else the object."""
    value = item.get("__float__")
    return float(value) if len(item) == 1 and value in ("Infinity", "-Infinity", "NaN") else item


def _read_entry(file: Path | None, *, steps: bool) -> Manifest | None:
    """Return the manifest of a cache entry that is complete, tells enough, and whose dependencies are unchanged."""
    held = None if file is None else read_cached(file)
    if file is None or held is None:
        return None
    try:
        entry = json.loads(held)
        names, values = entry["environment"]
        if steps and not entry["steps"]:
            return None
        if environment_digest(names, _environment()) != values or not unchanged(entry["dependencies"]):
            return None
        return _manifest(entry, file)
    except (ValueError, KeyError, TypeError):
        return None


def _manifest(entry: Mapping[str, Any], file: Path) -> Manifest:
    """Return the manifest of an entry, with the state of what it was made from."""
    manifest = Manifest(entry["manifest"])
    parts = json.dumps([file.stem, entry["environment"], entry["dependencies"]])
    manifest.state = hashlib.sha256(parts.encode()).hexdigest()
    return manifest


def _write_entry(file: Path | None, entry: dict[str, Any]) -> None:
    """Write a cache entry atomically; do nothing where the cache cannot be written."""
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_cached(file, json.dumps(entry, separators=(",", ":")).encode())


def _environment() -> dict[str, str]:
    """The environment of an inspection."""
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def _ask(source: ModelSource, base_directory: Path, timeout: float, *, steps: bool) -> dict[str, Any]:
    """Run the inspector; requests and replies are files, so that a factory may print anything."""
    with tempfile.TemporaryDirectory(prefix="legoai-inspect-") as scratch, _open_while_asking() as parent:
        reply = Path(scratch, "reply.json")
        request = {
            "kind": source.kind,
            "target": source.target,
            "preset": source.preset,
            "arguments": dict(source.arguments),
            "base_directory": str(base_directory),
            "steps": steps,
            "sys_path": sys.path,
            "reply": str(reply),
            "timeout": timeout,
            "parent": parent,
        }
        Path(scratch, "request.json").write_text(json.dumps(request))
        with Path(scratch, "request.json").open("rb") as stdin, Path(scratch, "log").open("w+b") as log:
            status = _run(stdin, log, parent, source=source, directory=base_directory, timeout=timeout)
            log.seek(0)
            said = log.read().decode(errors="replace").strip().rpartition("\n")[2][-400:]
        try:
            answer = json.loads(reply.read_bytes())
            assert isinstance(answer, dict)
            return answer
        except (OSError, ValueError):
            raise ManifestError(
                "inspection_failed", f"the inspection of {source} ended with status {status} and no answer", said
            ) from None


@contextlib.contextmanager
def _open_while_asking() -> Iterator[int]:
    """A pipe to read from that ends with the block, or with this process, whatever ends that."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _run(stdin: IO[bytes], log: IO[bytes], parent: int, *, source: ModelSource, directory: Path, timeout: float) -> int:
    """Run the inspector in a session of its own, and end that session if the inspector does not end by itself."""
    if _Inspectors.stopped:
        raise ManifestError("inspection_failed", f"{source} is not inspected: this process is about to end")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", _INSPECTOR],
        stdin=stdin,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=directory,
        env=_environment(),
        pass_fds=(parent,),
        start_new_session=True,
    )
    _Inspectors.running.add(process)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise ManifestError("timeout", f"the inspection of {source} took more than {timeout:g} s") from None
    finally:
        _Inspectors.running.discard(process)
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Inspectors:
    """The inspections that run, and whether none may begin any more."""

    running: Final[set[subprocess.Popen[bytes]]] = set()
    stopped = False


def stop_inspections() -> None:
    """End the inspections that other threads of this process wait for, and prevent new ones: all of them fail."""
    _Inspectors.stopped = True
    for process in tuple(_Inspectors.running):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
