"""Everything of torch that LegoAI uses and that torch does not guarantee to keep.

This folder is the one place that names torch's private modules, functions and classes, and the one place that replaces
anything of torch. The other modules of LegoAI import from here, so that a new version of torch is tried in one place:

- `table` lists what is patched, why, and which test fails when torch changes it; the private names that lowered
  programs import; and the versions on which all of it was tried. `attributes` lists the private attributes of torch's
  objects that other modules read.
- `patching` replaces what the table lists, and nothing else, for as long as a context is entered.
- `operators`, `optimizers`, `fake_tensors` and `estimators` re-export private names, each with its reason, grouped by
  what their import costs; so do the modules of `compiler` and of `distributed`.
- `settings` sets private options of torch's configuration; `compiler.dynamo` is a placeholder for torch's compiler.
- `cpp_warnings` holds back warnings of torch's C++ side.
- `distributed.random_numbers` sets how operators on DTensors draw.
- `distributed.gloo_workers` waits for threads that torch leaves running when it destroys process groups.

The reference models are on a lower floor; what they need is in :mod:`legoai.specs.models.torch_internals`.
"""
