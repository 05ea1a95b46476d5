# SPDX-License-Identifier: Apache-2.0
"""Our operators inside transformers' models, in place of its torch fallbacks (and of what it imported from fla), reversibly.

    import fastweight.hf
    enabled = fastweight.hf.enable()     # models built before and after alike
    print(enabled)                       # what was replaced, what was left and why, and what ran since
    fastweight.hf.disable()

    with fastweight.hf.enable(["qwen3_next"]):
        model.generate(...)

Functions and forwards are replaced in transformers' modules and classes; no model, parameter, configuration or cache changes
its type or contents.
"""
import importlib
import importlib.util
import sys

from .. import torch as _operators  # noqa: F401, torch.compile sees the operators once it is imported
from ._functions import function_of_fla, gated_norm
from ._layers import LAYERS, layer_forward
from ._models import DIGESTS, FLA_MODELS, MODELS, OTHER_PARTS
from ._packing import model_forward
from ._places import Place, digest

__all__ = ["Enabled", "disable", "enable", "enabled", "models"]
_now = None


class Enabled:
    """What one enable() did. A context manager that disables at its end; `places` lists what is replaced, `left` what is not."""

    def __init__(self):
        self.places, self.left, self.is_active = [], [], False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.uninstall()

    def uninstall(self):
        """Puts the stock functions back; twice does nothing. Models keep working, with what the next enable() finds."""
        global _now
        if not self.is_active:
            return
        self.is_active = False
        for place in reversed(self.places):
            if not place.take_back():
                self.left.append((place.name, "replaced by somebody else in the meantime: not put back"))
        if _now is self:
            _now = None
        _forget_graphs()

    def calls(self):
        """{place: {"fastweight": calls that our operators computed, reason: calls passed on to the stock function}}."""
        return {place.name: {"fastweight": place.ran, **place.refused} for place in self.places if place.ran or place.refused}

    def __str__(self):
        lines = [f"fastweight.hf: {'enabled' if self.is_active else 'disabled'}", "replaced:"]
        for place in self.places:
            counts = [f"{place.ran} calls"] * bool(place.ran) + [f"{count} to stock: {why}" for why, count in place.refused.items()]
            lines.append(f"  {place.name} <- {place.operators}" + (f" ({'; '.join(counts)})" if counts else ""))
        lines += ["left:"] + [f"  {what}: {why}" for what, why in self.left]
        return "\n".join(lines)

    def _put(self, owner, attribute, operators, make):
        place = Place(owner, attribute, operators)
        place.put(make(place))
        self.places.append(place)

    def _model(self, name, model):
        path = f"transformers.models.{model.module}"
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            self.left.append((name, f"this transformers does not have it ({error})"))
            return
        for function, (make, operators) in model.functions.items():
            if callable(getattr(module, function, None)):
                self._put(module, function, operators, make)
            else:
                self.left.append((f"{path}.{function}", "not in this transformers"))
        class_name, kind = model.layer
        for owner, make, operators in ((model.norm, gated_norm, "rms_norm"), (model.text_model, model_forward, "cu_seqlens of position_ids")):
            if hasattr(module, owner):
                self._put(getattr(module, owner), "forward", operators, make)
            else:
                self.left.append((f"{path}.{owner}", "not in this transformers"))
        layer = getattr(module, class_name, None)
        found = digest(layer.forward) if layer else None
        if found in DIGESTS:
            self._put(layer, "forward", f"the layer in place: {kind}", layer_forward(LAYERS[kind]))
        else:
            self.left.append((f"{path}.{class_name}.forward", "not a forward that ours was compared with; it calls the functions above"))


    def _fla_model(self, name, places, is_named):
        if not is_named and "fla" not in sys.modules:
            self.left.append((name, "fla is not imported; name it to have it imported"))
            return
        try:
            modules = {path: importlib.import_module(path) for path in places}
        except Exception as error:  # fla's import needs triton and what its other models need
            self.left.append((name, f"fla cannot be imported ({type(error).__name__}: {error})"))
            return
        from ..fla._install import pairs

        ours = {word: thing for _, word, thing in pairs()}
        for path, words in places.items():
            for word in words:
                if getattr(vars(modules[path]).get(word), "__module__", "").startswith("fastweight."):
                    self.left.append((f"{path}.{word}", "is fastweight's already (fastweight.fla.install)"))
                elif word in vars(modules[path]):
                    self._put(modules[path], word, f"fastweight.fla {word}", function_of_fla(ours[word]))
                else:
                    self.left.append((f"{path}.{word}", "not in this fla"))
        self.left.append((f"fla's norm modules in {name}", "classes are bound when a model is built; fuse_norm=False has torch's own"))


def _forget_graphs():
    """Compiled graphs keep the forward they were traced from."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def models():
    """Names that enable() takes."""
    return (*MODELS, *FLA_MODELS)


def enabled():
    """The Enabled in force, or None."""
    return _now


def enable(models=None):
    """Replaces the linear layers' functions of `models` (a name, names, or None: all of models()) until disable().

    Returns an Enabled. Calling it again while enabled disables first. ImportError without transformers; ValueError for a name that
    is not known.
    """
    global _now
    known = (*MODELS, *FLA_MODELS)
    names = known if models is None else (models,) if isinstance(models, str) else tuple(models)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"enable: models has {unknown[0]!r}, allowed {', '.join(known)}")
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("enable: transformers is not installed")
    disable()
    found = Enabled()
    found.is_active = True
    for name in names:
        if name in MODELS:
            found._model(name, MODELS[name])
        else:
            found._fla_model(name, FLA_MODELS[name], models is not None)
    found.left.append(OTHER_PARTS)
    _forget_graphs()
    _now = found
    return found


def disable():
    """Ends what enable() did; nothing when it is not in force."""
    if _now is not None:
        _now.uninstall()
