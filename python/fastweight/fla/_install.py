# SPDX-License-Identifier: Apache-2.0
"""Our functions and modules in place of fla's own in a running program, and back."""
import importlib
import importlib.machinery
import sys
import types

from . import _tree, layers, modules, ops

VERSION = "0.5.2"  # of fla, whose interface this is
# Where fla keeps a module under a second name.
SECOND_NAMES = {"fla.modules.conv": modules.convolution, "fla.modules.conv.causal_conv1d": modules.convolution,
                "fla.modules.conv.short_conv": modules.convolution}


def pairs():
    """[(module of fla, name, ours)] of all that has a counterpart here."""
    found = [(f"fla.ops.{path}".rstrip("."), name, function) for path, name, function in _tree.homes()]
    for name, module in vars(modules).items():
        if isinstance(module, types.ModuleType) and module.__name__.startswith(modules.__name__ + "."):
            found += [(f"fla.modules.{name}", word, getattr(module, word)) for word in module.__all__]
    found += [("fla.modules", word, getattr(modules, word)) for word in modules.__all__
              if not isinstance(getattr(modules, word), types.ModuleType)]
    return found


def _names_of(found):
    """[(module, name)] of every module outside this package that holds one of the objects {id: object}."""
    places = []
    for module in {id(module): module for module in list(sys.modules.values())}.values():
        if not isinstance(module, types.ModuleType) or module.__name__.partition(".")[0] == "fastweight":
            continue
        places += [(module, name) for name, held in list(vars(module).items()) if id(held) in found and found[id(held)] is held]
    return places


def _from_fla(thing):
    """Whether fla made it: a function, a class, or what a class of fla's is bound to."""
    home = getattr(getattr(thing, "__self__", thing), "__module__", None) or getattr(thing, "__module__", None)
    return isinstance(thing, dict) or (home or "").partition(".")[0] == "fla"


class Installation:
    """What install() did. `replaced`: names of fla that are ours now; `left`: {name: why it is fla's still}; `stands_in`: why fla
    itself could not be imported, None when it could. As a context manager it undoes
    itself at the end, unless it was in force when the install() of the `with` was called."""

    def __init__(self):
        self.replaced, self.left, self.stands_in = [], {}, None
        self._originals = {}  # id of fla's object: (fla's, ours)
        self._places = []     # (module, name, fla's, ours)
        self._asked_for = set()  # (module's name, name) that held ours before: imported from fastweight, and stay
        self._is_again, self._blocks = False, []  # whether the last install() found this in force; the same of every `with` around
        self._put, self._kept = {}, {}  # entries of sys.modules: ours, and what was there

    def __enter__(self):
        self._blocks.append(self._is_again)
        self._is_again = False
        return self

    def __exit__(self, *error):
        if not self._blocks.pop():
            self.uninstall()

    def __str__(self):
        if self.stands_in is not None:
            head = f"fla could not be imported ({self.stands_in}): {len(self._put)} modules named fla are fastweight's"
        else:
            count = len({module.__name__ for module, *_ in self._places})
            head = f"{len(self.replaced)} names of fla are fastweight's, in {len(self._places)} places of {count} modules"
        rows = [f"  {name}" for name in self.replaced]
        rows += ["left as they are:"] + [f"  {name}: {why}" for name, why in self.left.items()] if self.left else []
        return "\n".join([head, *rows])

    def uninstall(self):
        """Puts fla's own objects back, also where ours were imported from a replaced name since. Again: nothing."""
        global _active
        for module, name, theirs, ours in self._places:
            if vars(module).get(name) is ours:
                setattr(module, name, theirs)
        back = {id(ours): (ours, theirs) for theirs, ours in self._originals.values()
                if (getattr(ours, "__module__", None) or "").startswith("fastweight.")}
        for module, name in _names_of({key: ours for key, (ours, _) in back.items()}):
            if (module.__name__, name) in self._asked_for:
                continue
            setattr(module, name, back[id(vars(module)[name])][1])
        for name, module in self._put.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.modules.update(self._kept)
        self._places, self._put, self._kept, self._originals, self._asked_for = [], {}, {}, {}, set()
        _active = None if _active is self else _active

    def _exchange(self, module_of):
        """Fills the table of originals, out of the modules that module_of(name) gives, and puts ours wherever a module holds one."""
        if not self._places:
            self._asked_for = {(module.__name__, name) for module, name in _names_of({id(ours): ours for *_, ours in pairs()})}
        for path, name, ours in pairs():
            full = f"{path}.{name}"
            try:
                theirs = vars(module_of(path))[name]
            except Exception as error:  # whatever importing a part of fla raises
                self.left[full] = f"fla has none ({type(error).__name__}: {error})"
                continue
            if theirs is ours:
                continue
            if not _from_fla(theirs):
                self.left[full] = f"is {theirs!r}, not fla's"
                continue
            self._originals.setdefault(id(theirs), (theirs, ours))
            self.replaced.append(full)
        for module, name in _names_of({key: theirs for key, (theirs, _) in self._originals.items()}):
            theirs, ours = self._originals[id(vars(module)[name])]
            setattr(module, name, ours)
            self._places.append((module, name, theirs, ours))

    def _replace(self):
        self._exchange(importlib.import_module)
        for package in ("fla.ops", "fla.modules"):
            for name in getattr(sys.modules[package], "__all__", ()):
                held = getattr(sys.modules[package], name, None)
                if (getattr(held, "__module__", None) or "fla").partition(".")[0] == "fla":
                    self.left[f"{package}.{name}"] = "fastweight has no counterpart"

    def _stand_in(self, reason):
        """Modules named fla that are ours, for programs where fla cannot be imported."""
        self.stands_in = reason
        root = types.ModuleType("fla", "fastweight.fla in place of fla, which could not be imported")
        root.__path__, root.__version__ = [], VERSION
        root.__spec__ = importlib.machinery.ModuleSpec("fla", None, is_package=True)
        put = {"fla": root, "fla.layers": layers, **SECOND_NAMES}
        for package in (ops, modules):
            put.update((name.replace("fastweight.fla", "fla", 1), module) for name, module in sys.modules.items()
                       if f"{name}.".startswith(package.__name__ + "."))
        root.ops, root.modules, root.layers = ops, modules, layers
        self._kept = {name: module for name, module in sys.modules.items() if name == "fla" or name.startswith("fla.")}
        self._exchange(self._kept.__getitem__)  # for who holds something of a part that could be imported
        self.left = {}
        for name in self._kept:
            del sys.modules[name]
        sys.modules.update(put)
        self._put = put
        self.replaced = sorted(f"{path}.{name}" for path, name, _ in pairs())


_active = None


def install():
    """Puts fastweight's functions and modules in place of fla's own, everywhere in this process; returns an Installation.

    Replaced are the operator functions of fastweight's rows, the helpers and the modules of fastweight.fla, by identity, in every
    module that holds one under any name, `from fla.ops.kda import chunk_kda` in a script that already ran included. Objects held
    elsewhere (attributes of instances, entries of containers, layers that were built before) stay. When fla cannot be imported
    (it needs triton), modules named fla, fla.ops, fla.modules and fla.layers that are fastweight's take its place; fla.models is
    not among them.

    A second call finds what has been imported since and returns the same Installation, which the end of a `with`
    around that call leaves in force. print(install()) reports.
    """
    global _active
    found = _active or Installation()
    found._is_again = _active is not None
    if found.stands_in is not None:
        return found
    if _active is None:
        before = set(sys.modules)
        try:
            importlib.import_module("fla.ops")
            importlib.import_module("fla.modules")
        except Exception as error:  # whatever fla's import raises here, it cannot be used
            for name in [name for name in sys.modules if name.partition(".")[0] == "fla" and name not in before]:
                del sys.modules[name]
            found._stand_in(f"{type(error).__name__}: {error}")
            _active = found
            return found
    found._replace()
    _active = found
    return found
