"""Processor time of `legoai lint` in a cold process.

The time is that of a whole process, from its start to its exit: the interpreter, the imports, and linting a clean plan
of 100 lines for a built-in model, once with a preset and once with its own dimensions. Compiled Python files and the
cached parser tables are kept between processes, as in normal use. A first process, which may write these, is excluded.

The figure is the median processor time of 20 processes, user and system, because it depends less on other load of the
machine than the elapsed time; linting waits for nothing, so on an idle machine both are the same. Four waiting
processes for each core double it nevertheless, by the caches and cores that they share, and so they do the import of
lark: the second limit is relative to that. The median elapsed time is printed too, without a limit, and so is the time
of an interpreter that does nothing.

Lark imports the packages regex and interegular where they are installed. `legoai` does not need them, and its plain
installation does not include them: they are hidden from the processes, unless `--as-installed` is given.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

LIMIT_SECONDS = 0.400
"""On a machine that does nothing else; README states what was measured."""
LIMIT_IMPORTS = 3.7
"""Limit as a multiple of the time of `import lark`, which other load lengthens alike."""
PROCESSES = 20
BLOCKS = 80

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Environment with compiled files, even where the caller disables them: without, a process takes 50% longer."""

HIDE = "import sys; sys.modules.update(dict.fromkeys(('regex', 'interegular')));"
RUN = "from legoai.cli import main; raise SystemExit(main(['lint', sys.argv[1]]))"

HEAD = """\
# A plan of 100 lines.
plan hundred_lines

model   MODEL
cluster h100_sxm(hosts = 32, fabric = infiniband_ndr)
batch   (global = 512, micro = 1, seq_len = 8192)
mesh    (dp_shard = 256)

fsdp on dp_shard {
  layers.* = unit
  root     = unit
}

attention flash
precision (param = bf16, reduce = fp32)
optimizer adamw(lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1)
clip      (norm = 1.0)

checkpoint {
"""


MODELS = {
    "a preset": 'llama3("70b")',
    "free dimensions": 'llama3("8b", n_layers = 80, n_kv_heads = 16, hidden_dim = 12288, vocab_size = 100352)',
}


def plan_text(model: str) -> str:
    """A plan with a rule for each block of the model; odd blocks are recomputed."""
    rules = [f"  layers.{index:<2} = {'full' if index % 2 else 'none'}" for index in range(BLOCKS)]
    text = HEAD.replace("MODEL", model) + "\n".join(rules) + "\n}\n"
    assert text.count("\n") == 100, text.count("\n")
    return text


def child_seconds() -> float:
    """Processor time of all ended child processes, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(command: list[str]) -> tuple[float, float]:
    """Processor and elapsed time of one process, in seconds."""
    before, start = child_seconds(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=ENVIRONMENT)
    elapsed = time.perf_counter() - start
    assert done.returncode == 0, done.stdout + done.stderr
    return child_seconds() - before, elapsed


def report(name: str, command: list[str]) -> float:
    """Print the medians of a command, and return that of the processor time."""
    measure(command)
    times = [measure(command) for _ in range(PROCESSES)]
    busy, elapsed = (statistics.median(column) for column in zip(*times, strict=True))
    quarter = statistics.quantiles([item[0] for item in times], n=4)
    spread = f"{quarter[0] * 1e3:.0f} to {quarter[2] * 1e3:.0f}"
    print(f"{name:<28} {busy * 1e3:6.0f} ms  (quartiles {spread} ms; elapsed {elapsed * 1e3:.0f} ms)")
    return busy


def imports(command: list[str]) -> None:
    """Print the time of imports, by top-level package and for the slowest modules."""
    command = [command[0], "-X", "importtime", *command[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=ENVIRONMENT)
    own: dict[str, int] = {}
    for line in done.stderr.splitlines():
        fields = line.removeprefix("import time:").split("|")
        if len(fields) == 3 and fields[0].strip().isdigit():
            own[fields[2].strip()] = int(fields[0])
    packages: dict[str, int] = {}
    for module, microseconds in own.items():
        top = module.split(".")[0]
        packages[top if top in ("legoai", "lark") else "other"] = (
            packages.get(top if top in ("legoai", "lark") else "other", 0) + microseconds
        )
    whole = sum(own.values())
    shares = ", ".join(
        f"{name} {time / whole:.0%}" for name, time in sorted(packages.items(), key=lambda item: -item[1])
    )
    print(f"\nimports of {len(own)} modules: {shares}; the slowest, under -X importtime:")
    for module, microseconds in sorted(own.items(), key=lambda item: -item[1])[:10]:
        print(f"  {microseconds / 1e3:5.1f} ms  {module}")


def main() -> int:
    """Measure and print; the exit status is 0 where the limit is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--as-installed", action="store_true", help="do not hide regex and interegular")
    hidden = "import sys;" if parser.parse_args().as_installed else HIDE
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, ", end=""
    )
    print(f"Python {platform.python_version()}, lark {version('lark')}, legoai {version('legoai')}")
    print(f"load {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory() as folder:
        report("an interpreter", [sys.executable, "-c", "pass"])
        bare = report("import lark", [sys.executable, "-c", f"{hidden} import lark"])
        busy = 0.0
        for name, model in MODELS.items():
            file = Path(folder) / "hundred_lines.plan"
            file.write_text(plan_text(model), encoding="utf-8")
            command = [sys.executable, "-c", hidden + RUN, str(file)]
            busy = max(busy, report(f"legoai lint, {name}", command))
        imports(command)
    print(f"\n{busy / bare:.2f} times the import of lark, of at most {LIMIT_IMPORTS}")
    kept = busy <= LIMIT_SECONDS and busy <= LIMIT_IMPORTS * bare
    print(f"{'within' if kept else 'BEYOND'} the limits; the other is {LIMIT_SECONDS * 1e3:.0f} ms")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
