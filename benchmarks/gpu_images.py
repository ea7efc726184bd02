"""Measured steps of models of images on a GPU, in plain PyTorch: `python -m benchmarks.gpu_images -o FILE`.

The models are those of `plans/zoo`, made by `transformers`, in bf16 and in fp32 throughout, which are the variants
`half` and `full` of these plans. Of each: seconds of steps, the peak of active memory, and the operators of one step
by the GPU's time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_steps import about
from benchmarks.machine import write_document
from torch.profiler import ProfilerActivity, profile

MODELS = ("convnextv2_huge", "vit_h14")
ZOO = Path(__file__).parent.parent / "plans" / "zoo"
BATCH = 32
WARM_UP, STEPS = 3, 8
OPERATORS = 14


def rows() -> Iterator[dict[str, Any]]:
    """Measure every model in either dtype."""
    import transformers

    for name in MODELS:
        config = transformers.AutoConfig.for_model(**json.loads((ZOO / f"{name}.json").read_text("utf-8")))
        for dtype in (torch.bfloat16, torch.float32):
            model = transformers.AutoModelForImageClassification.from_config(config).to("cuda", dtype).train()
            yield {"name": name, "dtype": str(dtype).removeprefix("torch."), **_measured(model, config, dtype)}
            del model
            torch.cuda.empty_cache()


def _measured(model: Any, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    images = torch.randn(BATCH, 3, config.image_size, config.image_size, device="cuda", dtype=dtype)
    labels = torch.randint(0, 2, (BATCH,), device="cuda")

    def step() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        logits = model(pixel_values=images).logits
        torch.nn.functional.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    for _ in range(WARM_UP):
        step()
    torch.cuda.reset_peak_memory_stats()
    seconds = [step() for _ in range(STEPS)]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
    operators = sorted(
        (
            {"op": item.key, "ms": round(item.self_device_time_total / 1e3, 3), "calls": item.count}
            for item in found.key_averages()
            if item.key.startswith("aten::") and item.self_device_time_total > 0
        ),
        key=lambda item: -item["ms"],
    )
    return {
        "step_s": [round(one, 6) for one in seconds],
        "peak_active_bytes": torch.cuda.memory_stats()["active_bytes.all.peak"],
        "operators": operators[:OPERATORS],
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="write the measurements here")
    arguments = parser.parse_args()
    write_document(arguments.output, {**about(), "batch": BATCH, "rows": list(rows())})


if __name__ == "__main__":
    main()
