"""The description of the machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cbmir.machine import describe_machine, in_words


def test_description_of_a_machine(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A Fine Processor\nflags\t\t: fpu avx2 amx_bf16 avx512f\n")
    machine = describe_machine(cpuinfo)
    assert machine["processor"] == "A Fine Processor"
    assert machine["features"] == ["amx_bf16", "avx512f", "avx2"]
    assert machine["usable"] >= 1 and machine["memory_gib"] > 0.1 and machine["packages"]["numpy"] == np.__version__
    first, second = in_words(machine).split("\n")
    assert first.startswith("A Fine Processor, ") and first.endswith(" processors, amx_bf16 avx512f avx2")
    assert f"numpy {np.__version__}" in second
    nowhere = describe_machine(tmp_path / "none")
    assert nowhere["features"] == [] and nowhere["processor"]
