"""Record of a patch of torch, and the versions on which patches were tried.

CI runs the tests of this folder on the newest version of :data:`TRIED`, and on the oldest where it can be installed; on
both they passed on 2026-11-22. On 2.12.1 plans were costed only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

TRIED: Final = ("2.12.0", "2.12.1", "2.13.0")
"""Versions of torch on which the patches were tried, oldest first; the module's head says how."""

Kind: TypeAlias = Literal[
    "function", "static", "class method", "property", "class", "builtin", "mapping", "module", "setting"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Something of torch that is temporarily replaced.

    Attributes:
        path: `module:name` or `module:Class.name`.
        kind: of the original.
        parameters: names of the first parameters, on whose order the replacement or a caller relies, including `self`;
            those of a builtin cannot be inspected.
        why: what would happen without it.
        since: first version of torch that needs it.
        until: first version of torch that does not need it, for which :func:`~.patching.patched` does not apply it.
        build: the only build of torch that needs it, `cuda`; empty for all.
        test: that fails when torch no longer behaves as the patch expects; `file::function` under this folder's tests.
    """

    path: str
    kind: Kind = "function"
    parameters: str = ""
    why: str
    test: str
    since: str = ""
    until: str = ""
    build: Literal["", "cuda"] = ""
