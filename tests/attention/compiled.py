"""Compiles the Triton kernels for a GPU of the given capability, as Triton would at their first
call there, and prints the assembler's output: a line for each kernel and use."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvrecall.attention.kernels.triton_kernels import attend_rows, best_rows, move_words

ASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
ATTEND = {"table": "*i32", "lengths": "*i32", "output": "*fp32", "lse": "*fp32"}
ATTEND |= {"scale": "fp32", "softcap": "fp32"}
BEST = {"codes": "*i8", "scales": "*fp32", "coded": "*i8", "floats": "*fp32", "best": "*fp32"}


def uses() -> Any:
    for dtype, dim, group in (("bf16", 128, 4), ("fp16", 64, 7), ("fp32", 128, 1), ("bf16", 80, 8)):
        pointers = dict.fromkeys(("query", "keys", "values"), f"*{dtype}")
        wide = max(16, 1 << (dim - 1).bit_length())
        sizes = {"GROUP": group, "PADDED": 16, "DIM": dim, "WIDE": wide, "SIZE": 128, "TILE": 64}
        fixed = {**sizes, "CAPPED": dim == 64, "key_dim": 1, "value_dim": 1}
        yield attend_rows, {**ATTEND, **pointers}, fixed
    for width, rows, placed in ((256, 8, False), (256, 16, True), (128, 8, False), (160, 2, True)):
        wide = 1 << (width - 1).bit_length()
        sizes = {"GROUP": 4, "PADDED": 16, "WIDTH": width, "WIDE": wide}
        fixed = {**sizes, "ROWS": rows, "TILE": 64 // rows, "PLACED": placed}
        yield best_rows, {**BEST, "places": "*i64" if placed else "*i8"}, fixed
    yield move_words, {"sources": "*i64", "targets": "*i64"}, {"AT_ONCE": 1024}


def main(capability: int) -> None:
    for kernel, types, fixed in uses():
        names = kernel.arg_names
        signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
        aligned = [["tt.divisibility", 16]]  # as PyTorch's memory is, and a cache's strides
        even = [n for n in names if signature[n][0] == "*" or n.startswith(("key_", "value_"))]
        attrs = {(names.index(n),): aligned for n in even if n not in fixed}
        source = ASTSource(kernel, signature=signature, constexprs=fixed, attrs=attrs)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        print(kernel.__name__, fixed, "spills", spills(made.asm["ptx"], capability))


def spills(assembly: str, capability: int) -> int:
    """Bytes of registers a thread keeps in memory."""
    target = f"-arch=sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(assembly)
        command = [str(ASSEMBLER), "-v", target, str(path), "-o", f"{folder}/out"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", said)[1])  # type: ignore[index]


if __name__ == "__main__":
    main(int(sys.argv[1]))
