"""The modules of groupwise as a whole: who imports whom."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count; those under ``TYPE_CHECKING``, which never run, do not."""
    graph = grimp.build_graph("groupwise", exclude_type_checking_imports=True, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
