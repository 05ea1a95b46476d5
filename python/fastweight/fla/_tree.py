# SPDX-License-Identifier: Apache-2.0
"""fla's modules of operators, made from _table.ENTRIES and _helpers.HELPERS: fastweight.fla.ops.<row> and what is below.

The modules have no files: each is put into sys.modules when fastweight.fla.ops is imported.
"""
import sys
import types

from . import _adaptor, _helpers
from ._table import ENTRIES

FUNCTIONS = _adaptor.make()


def homes():
    """[(module under fla.ops, name, function)]: where each function is defined, and every package that shows it too."""
    found = [(module, function.__name__, function) for module, function in _helpers.HELPERS]
    for name, entry in ENTRIES.items():
        path = entry.module.split(".")
        modules = [".".join(path[:depth]) for depth in range(len(path), 0, -1)]
        modules += [""] if entry.is_top else []
        found += [(module, spelling, FUNCTIONS[name]) for module in modules for spelling in (name, *entry.aliases)]
    return found


def plant(root, namespace):
    """Makes the modules below `root` (fastweight.fla.ops); returns what `root` itself exports."""
    shown = []
    for path, name, function in homes():
        if not path:
            namespace[name] = function
            shown.append(name)
            continue
        module = _module(root, path, namespace)
        setattr(module, name, function)
        module.__all__ = sorted({*getattr(module, "__all__", ()), name})
    return sorted(shown)


def _module(root, path, namespace):
    full = f"{root}.{path}"
    if full in sys.modules:
        return sys.modules[full]
    module = types.ModuleType(full, f"fla.ops.{path} on fastweight.ops")
    module.__path__ = []
    module.__package__ = full
    sys.modules[full] = module
    parent, _, last = path.rpartition(".")
    if parent:
        setattr(_module(root, parent, namespace), last, module)
    else:
        namespace[last] = module
    return module
