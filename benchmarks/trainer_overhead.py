"""Overhead of the trainer over a hand-written loop of the same torch calls.

Both loops run the same lowered program: its model, mesh, parallelization, optimizer and schedule. The hand-written one
reads prepared batches and contains only what training requires: forward, backward, the mean loss over all ranks, the
gradient norm, clipping, the update, and one wait for the loss. The trainer does the same with its own data stream,
gradient norm, metrics, and checks for signals, checkpoints and losses that are not finite.

The time is the whole interval from one update to the next, so it includes everything between steps. Starting, building
and the first steps are excluded. The two loops alternate, each for some steps of a new training, so that other load of
the machine affects both; the figure is the median over the turns of the ratio of their median intervals.

The limit is on the elapsed time, which is meaningless where other programs keep the processors busy: then the turns
differ by more than the limit, and the load is printed. The processor time of rank 0 is printed too, without a limit: it
depends less on the load, and excludes waiting.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

Stamp = tuple[float, float]

LIMIT = 1.02
CLIP = 1.0
"""Norm in the plan's `clip`."""
WARM_UP = 3
HEAD = """\
plan overhead
model   llama3("tiny")
cluster cpu(devices = 2)
batch   (global = 8, micro = 4, seq_len = 256)
precision (master = fp32, param = fp32)
optimizer adamw(lr = 3e-4, weight_decay = 0.1)
clip      (norm = 1.0)
schedule  cosine(warmup = 10, steps = 1000)
"""
PLANS = {
    "one process": (1, HEAD),
    "FSDP over 2 processes": (2, f"{HEAD}mesh (dp_shard = 2)\nfsdp on dp_shard {{ layers.* = unit, root = unit }}\n"),
}


def program_of(plan: str) -> str:
    """Lower the plan."""
    from legoai.dsl.analysis.analysis import Analysis
    from legoai.dsl.frontend.resolve import resolve
    from legoai.lowering.program import lower
    from legoai.specs.models.manifests.load import load_manifest

    resolution = resolve(plan, "overhead.plan", directory=Path())
    assert resolution.plan is not None
    assert not resolution.diagnostics
    manifest = load_manifest(resolution.plan.model.source(), base_directory=".")
    return lower(Analysis(resolution.plan, manifest, resolution=resolution)).text


def now() -> Stamp:
    """Seconds elapsed, and seconds of processor time of this process."""
    return time.perf_counter(), time.process_time()


def by_trainer(program: dict[str, Any], steps: int) -> Stamp:
    """Median seconds between updates of the trainer."""
    from dataclasses import replace

    from legoai.runtime import RunOptions

    trainer = program["trainer"]()
    stamps: list[Stamp] = []

    def stamped(parameters: list[dict[str, Any]]) -> Any:
        optimizer = program["build_optimizer"](parameters)
        optimizer.register_step_post_hook(lambda *_: stamps.append(now()))
        return optimizer

    replace(trainer, build_optimizer=stamped).fit(RunOptions(device="cpu", steps=steps, log_every=0))
    return median_interval(stamps)


def by_hand(program: dict[str, Any], steps: int) -> Stamp:
    """Median seconds between updates of the hand-written loop."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F  # noqa: N812

    from legoai.runtime.device import Device
    from legoai.runtime.initialize import materialize

    trainer = program["trainer"]()
    mesh = program["build_mesh"]("cpu")
    with torch.device("meta"):
        model = program["build_model"]()
    model = program["parallelize"](model, mesh)
    materialize(model, device=Device(type="cpu"), seed=0)
    parameters = list(model.parameters())
    optimizer = program["build_optimizer"]([{"params": parameters}])
    scheduler = program["build_lr_scheduler"](optimizer)
    micro_batches = trainer.global_batch // trainer.micro_batch // dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (steps, micro_batches, trainer.micro_batch, trainer.seq_len + 1)
    batches = torch.randint(256, shape, generator=generator)
    stamps: list[Stamp] = []
    for step in range(steps):
        total = torch.zeros(())
        for batch in batches[step]:
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / micro_batches
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        stamps.append(now())
        optimizer.zero_grad()
        scheduler.step()
        total.item()
    return median_interval(stamps)


def median_interval(stamps: list[Stamp]) -> Stamp:
    """Medians of the differences, without those of the first steps."""
    pairs = list(pairwise(stamps[WARM_UP:]))
    elapsed, processor_time = (statistics.median(after[i] - before[i] for before, after in pairs) for i in (0, 1))
    return elapsed, processor_time


def measure(path: Path, turns: int, steps: int) -> None:
    """Alternate the loops in this process; rank 0 prints the median seconds of each turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    program: dict[str, Any] = {"__name__": "program"}
    exec(compile(path.read_text(), str(path), "exec"), program)
    for turn in range(turns + 1):
        order = (by_trainer, by_hand) if turn % 2 else (by_hand, by_trainer)
        taken = {loop.__name__: loop(program, steps) for loop in order}
        if turn and dist.get_rank() == 0:  # the first turn warms the allocator and the caches
            print(*taken["by_trainer"], *taken["by_hand"], flush=True)
    dist.destroy_process_group()


def run(world: int, plan: str, turns: int, steps: int) -> list[tuple[Stamp, Stamp]]:
    """Measure in `world` processes; return the medians of each turn of the trainer and of the hand-written loop."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        program = Path(folder) / "program.py"
        program.write_text(program_of(plan))
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, __file__, "--rank-of", str(program), "--turns", str(turns), "--steps", str(steps)]
        common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
        ranks = [
            subprocess.Popen(
                command,
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            outputs = [rank.communicate(timeout=1200)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    lines = [[float(word) for word in line.split()] for line in outputs[0].splitlines()]
    assert len(lines) == turns, "a rank failed; run its command by hand"
    return [((line[0], line[1]), (line[2], line[3])) for line in lines]


def main() -> int:
    """Measure every plan; the exit status is 1 where the overhead exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"of {', '.join(map(repr, PLANS))}; all by default")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        measure(options.rank_of, options.turns, options.steps)
        return 0
    if unknown := set(options.name) - set(PLANS):
        parser.error(f"there is no plan {unknown.pop()!r}")
    import torch

    print(f"{datetime.now(UTC):%Y-%m-%d}, {processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, one thread for each process")
    missed = 0
    for name in options.name or PLANS:
        world, plan = PLANS[name]
        pairs = run(world, plan, options.turns, options.steps)
        for index, kind in enumerate(("elapsed", "processor time")):
            ratios = [trainer[index] / hand[index] for trainer, hand in pairs]
            cost = statistics.median(ratios)
            trainer, hand = (statistics.median(turn[side][index] for turn in pairs) for side in (0, 1))
            limit = f", limit {LIMIT}" if index == 0 else ""
            print(
                f"{name}, {kind}: trainer {trainer * 1e3:.2f} ms a step, by hand {hand * 1e3:.2f} ms, ratio {cost:.4f} "
                f"± {spread(ratios):.4f} (turns {min(ratios):.4f} to {max(ratios):.4f}){limit}"
            )
            missed += index == 0 and cost > LIMIT
        print(f"load now {os.getloadavg()[0]:.1f}", flush=True)
    return 1 if missed else 0


def spread(ratios: list[float]) -> float:
    """Standard error of the median of the turns: 1.2533 times that of their mean, for a normal distribution."""
    return 1.2533 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("inf")


def processor() -> str:
    """The processor's name, where Linux reports it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
