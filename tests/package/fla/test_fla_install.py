# SPDX-License-Identifier: Apache-2.0
"""install(): in place of a package named fla, back, and where there is none. The signatures against a checkout of fla, if one is named."""
import ast
import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from fla_truth import fla_ops, function, inputs, torch

import fastweight.fla
from fastweight.fla._table import ENTRIES
from fastweight.fla.ops import chunk_kda as ours

CHECKOUT = os.environ.get("FW_FLA_CHECKOUT")

FILES = {
    "fla/__init__.py": "",
    "fla/ops/__init__.py": "from .kda import chunk_kda\nfrom .gsa import chunk_gsa\n__all__ = ['chunk_kda', 'chunk_gsa']\n",
    "fla/ops/gsa.py": "def chunk_gsa():\n    pass\n",
    "fla/ops/kda/__init__.py": "from .chunk import chunk_kda\n",
    "fla/ops/kda/chunk.py": "def chunk_kda():\n    return 'kernel'\n",
    "fla/modules/__init__.py": "from .convolution import ShortConvolution\nfrom . import activations\n__all__ = ['ShortConvolution']\n",
    "fla/modules/convolution.py": "class ShortConvolution:\n    pass\n",
    "fla/modules/activations.py": "import torch.nn.functional as F\nclass A:\n    @classmethod\n    def apply(cls): pass\n"
                                  "swish = A.apply\nsigmoid = F.relu\nACT2FN = {'swish': swish}\n",
    "written_for_fla.py": "from fla.ops import chunk_kda as mine\nfrom fla.modules import ShortConvolution\n"
                          "from fla.modules.activations import ACT2FN, swish\nimport fla.ops.kda.chunk as deep\n",
}


def forget():
    """Takes every module named fla, and the script, out of sys.modules; returns them."""
    names = [name for name in sys.modules if name.partition(".")[0] in ("fla", "written_for_fla", "later", "holds")]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package named fla with a few of its names."""
    kept = forget()
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    if fastweight.fla._install._active is not None:
        fastweight.fla._install._active.uninstall()
    forget()
    sys.modules.update(kept)


def test_in_place_and_back(package):
    script = importlib.import_module("written_for_fla")
    before = dict(vars(script))
    found = fastweight.fla.install()
    assert found.stands_in is None
    assert script.mine is fla_ops.chunk_kda and script.deep.chunk_kda is fla_ops.chunk_kda
    assert sys.modules["fla"].ops.kda.chunk_kda is fla_ops.chunk_kda
    assert script.ShortConvolution is fastweight.fla.modules.ShortConvolution
    assert script.ACT2FN is fastweight.fla.modules.activations.ACT2FN and script.swish is torch.nn.functional.silu
    names = {"fla.ops.kda.chunk_kda", "fla.ops.chunk_kda", "fla.ops.kda.chunk.chunk_kda", "fla.modules.ShortConvolution"}
    assert names <= set(found.replaced)
    assert "fla.ops.chunk_gsa" in found.left and "fla.ops.gla.chunk.chunk_gla" in found.left
    assert "not fla's" in found.left["fla.modules.activations.sigmoid"], "what is torch's stays torch's"
    assert "chunk_gsa" in str(found) and "fla.ops.kda.chunk_kda" in str(found)
    (package / "later.py").write_text("from written_for_fla import mine\nfrom fla.modules import ShortConvolution as Conv\n")
    later = importlib.import_module("later")
    assert later.mine is fla_ops.chunk_kda
    assert fastweight.fla.install() is found
    relu = torch.nn.functional.relu
    found.uninstall()
    assert {name: vars(script)[name] for name in before} == before
    assert later.mine() == "kernel" and later.Conv is before["ShortConvolution"], "also what was imported since"
    assert torch.nn.functional.silu is fastweight.fla.modules.activations.swish and torch.nn.functional.relu is relu
    assert fla_ops.chunk_kda.__module__ == "fastweight.fla.ops.kda.chunk", "our own modules keep their functions"
    assert ours is fla_ops.chunk_kda, "and so does a module that asked fastweight for them"
    found.uninstall()


def test_as_a_context_manager(package):
    script = importlib.import_module("written_for_fla")
    with fastweight.fla.install():
        assert script.mine is fla_ops.chunk_kda
    assert script.mine() == "kernel"
    with pytest.raises(ZeroDivisionError), fastweight.fla.install():
        raise ZeroDivisionError
    assert script.mine() == "kernel"


def test_the_end_of_one_installation_leaves_an_earlier_one_in_force(package):
    script = importlib.import_module("written_for_fla")
    first = fastweight.fla.install()
    with fastweight.fla.install() as second:
        assert second is first
        with fastweight.fla.install():
            pass
        assert script.mine is fla_ops.chunk_kda
    assert script.mine is fla_ops.chunk_kda
    with first:  # ends the first call itself
        pass
    assert script.mine() == "kernel"
    with fastweight.fla.install():
        assert script.mine is fla_ops.chunk_kda
    assert script.mine() == "kernel"


def test_field_133_without_fla(package):
    """fla cannot be imported: the program that imports it gets ours, and afterwards what was there."""
    (package / "fla/ops/__init__.py").write_text("import a_compiler_that_is_not_here\n")
    with fastweight.fla.install() as found:
        assert "a_compiler_that_is_not_here" in found.stands_in and "fla.ops.kda.chunk.chunk_kda" in found.replaced
        script = importlib.import_module("written_for_fla")
        assert script.mine is fla_ops.chunk_kda and script.deep.chunk_kda is fla_ops.chunk_kda
        import fla
        assert fla.__version__ == fastweight.fla.fla_version and importlib.util.find_spec("fla") is not None
        from fla.layers import GatedDeltaNet
        from fla.modules.conv import causal_conv1d
        from fla.ops.rwkv7.fused_k_update import fused_k_rwkv7
        assert GatedDeltaNet is fastweight.torch.nn.GatedDeltaNet and causal_conv1d and fused_k_rwkv7
        with pytest.raises(ModuleNotFoundError, match="fla.models"):
            importlib.import_module("fla.models")
        assert fastweight.fla.install() is found
    assert not [name for name in sys.modules if name.partition(".")[0] == "fla"]
    with pytest.raises(ModuleNotFoundError, match="a_compiler"):
        importlib.import_module("fla.ops")


@pytest.mark.parametrize("error", ["import a_compiler_that_is_not_here", "raise RuntimeError('no driver')"])
def test_a_part_of_fla_cannot_be_imported(package, error):
    """What a script took from the part that can be imported is exchanged all the same, and put back."""
    (package / "holds.py").write_text("from fla.ops.kda import chunk_kda as mine\n")
    script = importlib.import_module("holds")
    kernel = script.mine
    assert kernel() == "kernel"
    for name in [name for name in sys.modules if name.startswith("fla.modules")]:
        del sys.modules[name]
    (package / "fla/modules/__init__.py").write_text(error + "\n")
    with fastweight.fla.install() as found:
        assert found.stands_in and script.mine is fla_ops.chunk_kda and not found.left
        from fla.modules import RMSNorm
        assert RMSNorm is fastweight.fla.modules.RMSNorm
    assert script.mine is kernel and sys.modules["fla.ops.kda"].chunk_kda is kernel


def test_names_of_modules_and_functions():
    for name, entry in ENTRIES.items():
        module = importlib.import_module(f"fastweight.fla.ops.{entry.module}")
        assert getattr(module, name) is function(name) and name in module.__all__
        assert (name in fla_ops.__all__) == entry.is_top
        parent = importlib.import_module(f"fastweight.fla.ops.{entry.module.split('.')[0]}")
        assert getattr(parent, name) is function(name)
    assert fla_ops.chunk_gdn is fla_ops.chunk_gated_delta_rule and fla_ops.fused_recurrent_gdn is fla_ops.fused_recurrent_gated_delta_rule
    assert "chunk_kda" in fla_ops.chunk_kda.__doc__ and "gated_delta_rule" not in fla_ops.chunk_kda.__doc__
    with torch.no_grad():
        assert fla_ops.chunk_kda(**inputs("chunk_kda", dtype=torch.float32))[0].shape == (2, 7, 2, 3)


def signature(node):
    """[(name, default as a value or None, is there one)] of a function's parameters, ** as "**"."""
    arguments = node.args
    given = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = [*zip(arguments.args, given), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    found = [(argument.arg, None if default is None else ast.unparse(default), default is not None) for argument, default in pairs]
    return found + ([("**", None, False)] if arguments.kwarg else [])


@pytest.mark.skipif(not CHECKOUT, reason="not run: FW_FLA_CHECKOUT names no checkout of fla")
def test_field_066_signatures_are_those_of_the_checkout():
    for name, entry in ENTRIES.items():
        path = Path(CHECKOUT) / "fla" / "ops" / (entry.module.replace(".", "/") + ".py")
        nodes = {node.name: node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
        ours = ast.parse(f"def f({entry.signature}): pass").body[0]
        assert signature(ours) == signature(nodes[name]), name
