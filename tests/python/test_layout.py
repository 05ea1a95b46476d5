# SPDX-License-Identifier: Apache-2.0
"""The structs of the driver lie in memory as the C compiler lays the header's structs."""
import ctypes
import shutil
import subprocess

import pytest

import fastweight_c as fw


def test_struct_layouts(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    structs = {"fw_tensor": fw.Tensor, "fw_context_options": fw.ContextOptions}
    for op, (desc, grads) in fw.DESCRIPTORS.items():
        structs.update({f"fw_{op}": desc, f"fw_{op}_grads": grads})
    lines, expected = [], []
    for name, struct in structs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field, kind in struct._fields_:
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
            expected.append(f"{name}.{field} {getattr(struct, field).offset} {ctypes.sizeof(kind)}")
    source = tmp_path / "layout.c"
    source.write_text("#include <stdio.h>\n#include <fastweight/fastweight.h>\nint main(void) {\n" + "\n".join(lines)
                      + "\nreturn 0;\n}\n")
    subprocess.run([compiler, "-std=c99", f"-I{fw.REPOSITORY}/include", str(source), "-o", str(tmp_path / "layout")], check=True)
    found = subprocess.run([str(tmp_path / "layout")], check=True, capture_output=True, text=True).stdout.splitlines()
    assert found == expected


def test_bf16_conversion():
    import numpy as np
    values = np.array([1 + 2.0 ** -8, 1 + 3 * 2.0 ** -8, 1 + 2.0 ** -8 + 2.0 ** -40, -0.0, np.inf, 3.4e38, 1e-40])
    assert [hex(x) for x in fw.to_bf16(values)] == ["0x3f80", "0x3f82", "0x3f81", "0x8000", "0x7f80", "0x7f80", "0x1"]
    assert np.isnan(fw.from_bf16(fw.to_bf16(np.array([np.nan])))).all()
    random = np.random.default_rng(0).standard_normal(2000)
    from oracle import yardstick
    assert np.array_equal(fw.load(fw.to_bf16(random)), yardstick.to_bits(random, 8))
