"""Parallelism-free reference models and the manifests that describe them.

`configs`, `source` and `manifests` (but `described`) never import torch; `llama`, `gpt`, `mixtral` and `vit` do.

What every model here keeps to, so that a program can split, shard and initialise it:

- It is built from one config, `Llama(LlamaConfig(...))`, and can be built under `torch.device("meta")`.
- Blocks live in a `ModuleDict` called `layers` with keys "0", "1", ...: a pipeline stage deletes the blocks that
  it does not hold, and the others keep their names. Any module on the way from tokens to logits may be set to
  None; forward passes it by.
- Attention counts its heads from the tensor it gets (`view(b, t, -1, head_dim)`), so that a tensor-parallel rank
  computes with the heads it holds.
- A module with parameters of its own has `reset_parameters()`, which draws them in place from torch's default
  generator. Nothing else initialises them, so parameters can be materialised one module at a time with a
  generator seeded from the run's seed and the module's path, on any mesh alike.
- A module with buffers of its own has `init_buffers()`, which computes them in place, on the device where they are,
  exactly for the dtype of the module's parameters. `to_empty`, `to` and `double` call it as well.
- `example_inputs()` returns the smallest positional arguments that forward accepts, on the current default device;
  models are followed with them on the meta device.
"""
