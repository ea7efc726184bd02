"""Lists of modules of several classes, which are no blocks that stages could begin with."""

from __future__ import annotations

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.facts import listed
from legoai.dsl.analysis.stages.pipeline import split_points


@fact
def help_with_unequal_blocks(analysis: Analysis) -> str | None:
    """What makes blocks of the elements of a list that are of several classes; None where the model has no such list.

    Elements of one class are blocks already; those without children are layers.
    """
    assert analysis.manifest is not None
    modules, known = analysis.manifest.modules, split_points(analysis)
    for path, info in modules.items():
        elements = [modules.get(info.child_path(name)) for name in info.children]
        classes = list(dict.fromkeys(element.class_name for element in elements if element is not None))
        inside = known.holder(path) not in (None, path)
        all_hold = all(element is not None and element.children for element in elements)
        if info.kind == "container" and len(classes) > 1 and all_hold and not inside:
            return (
                f"stages begin with blocks, and the elements of `{path}` are of several classes ({listed(classes)}): "
                "give it elements of one class, such as a module that holds one of each"
            )
    return None
