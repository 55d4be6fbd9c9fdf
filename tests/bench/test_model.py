from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from kvrecall.bench.model import fast_dtype


@pytest.mark.parametrize(
    ("flags", "machine", "dtype"),
    [
        ("fpu avx512f avx512_vnni", "x86_64", "float32"),
        ("fpu avx512f avx512_bf16", "x86_64", "bfloat16"),
        ("fpu amx_bf16", "x86_64", "bfloat16"),
        ("fpu", "aarch64", "bfloat16"),
    ],
)
def test_single_precision_where_bfloat16_is_emulated(
    flags: str, machine: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor : 0\nflags\t: {flags}\n")
    assert fast_dtype(file) == dtype
    assert fast_dtype(tmp_path / "absent") == "bfloat16"
