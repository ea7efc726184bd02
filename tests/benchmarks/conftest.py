"""Import of the package `benchmarks` without the checkout on the path, which would offer `dsl`, `cost`, … as well."""

import importlib.machinery
import importlib.util
import sys

from support import ROOT

if "benchmarks" not in sys.modules:
    spec = importlib.machinery.ModuleSpec("benchmarks", None, is_package=True)
    spec.submodule_search_locations = [str(ROOT / "benchmarks")]
    sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
