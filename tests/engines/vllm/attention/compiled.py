"""Compiles the Triton kernels for a GPU of the given capability, as Triton would at their first
call there, and prints the assembler's output: a line for each kernel and use."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvrecall.attention.kernels import device
from kvrecall.attention.kernels import triton_kernels as kernels
from kvrecall.attention.kernels.device import blocks_at_once, warps_of

ASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
CAPABILITY = int(sys.argv[1])
TYPES = dict.fromkeys(("facts", "blocks", "names", "table", "ids"), "*i32")
TYPES |= dict.fromkeys(("slots", "missed", "place", "state"), "*i32")
TYPES |= {"left": "*i8", "counts": "*i64", "addresses": "*i64", "page_at": "*i64", "cache": "i64"}
TYPES |= dict.fromkeys(("logits", "scores", "parts", "lse", "sinks", "floats"), "*fp32")
TYPES |= {"coded": "*i8", "arrived": "*i32", "value_scale": "fp32"}
TYPES |= dict.fromkeys(("scale", "factor", "softcap"), "fp32")

EIGHT_BITS = [("fp8e4nv", 128, 4)] if CAPABILITY >= 90 else []


def uses() -> Any:
    for dtype, dim, group in (
        ("bf16", 128, 4),
        ("fp16", 64, 7),
        ("fp32", 128, 1),
        ("bf16", 80, 8),
        ("bf16", 256, 4),
        *EIGHT_BITS,
    ):
        pointers = dict.fromkeys(("query", "keys", "values", "pages"), f"*{dtype}")
        pointers["output"] = f"*{dtype}" if dtype[-2:].isdigit() else "*bf16"
        wide = max(16, 1 << (dim - 1).bit_length())
        heads = 1 << (group - 1).bit_length()
        sizes = {"GROUP": group, "HEADS": heads, "DIM": dim, "WIDE": wide, "SIZE": 128}
        sizes |= {"CHUNK": 32 // heads, "CAPPED": dim == 64, "SINKS": dim == 128}
        fixed = {**sizes, "SPLITS": 64, "PADDED": 16, "TILE": 64, "key_dim": 1}
        for whole, turn in ((False, 0), (True, 0), (False, 1)):
            of = {**fixed, "value_dim": 1, "WHOLE": whole, "TURN": turn}
            of["OVERLAPS"] = CAPABILITY >= 90 and turn == 1
            yield kernels.attend_rows, {**TYPES, **pointers}, of
    digests = [(128, 8, True), (128, 16, True), (64, 8, False), (80, 16, True)]
    kinds = [("bf16", *one) for one in digests] + [(one[0], 128, 16, True) for one in EIGHT_BITS]
    for dtype, dim, rows, bounds in kinds:
        wide = 1 << (dim - 1).bit_length()
        sizes = {"DIM": dim, "WIDE": wide, "ROWS": rows, "BOUNDS": bounds}
        pointers = dict.fromkeys(("query", "keys"), f"*{dtype}")
        group = {80: 16}.get(dim, 4 if bounds else 7)
        fixed = {**sizes, "GROUP": group, "PADDED": 16, "TILE": device.ROWS_AT_ONCE // rows}
        fixed |= {"HEADS": 1 << (group - 1).bit_length(), "CHUNK": blocks_at_once(group)}
        fixed |= {"TILES": 4, "SEARCH": device.SEARCHED * blocks_at_once(group)}
        for left in (False, True):
            chosen = {**fixed, "RECALLS": left, "OVERLAPS": CAPABILITY >= 90 and left}
            yield kernels.choose_blocks, {**TYPES, **pointers}, chosen
        fixed = {**sizes, "SIZE": 128, "key_dim": 1}
        yield kernels.digest_blocks, {**TYPES, **pointers}, fixed
    for runs, words in ((1, 1024), (8, 128)):
        fixed = {"LANES": 16, "RUNS": runs, "WORDS": words}
        yield kernels.fetch_blocks, TYPES, fixed
    yield kernels.move_words, {"sources": "*i64", "targets": "*i64"}, {"AT_ONCE": 1024}


def main(capability: int) -> None:
    for kernel, types, fixed in uses():
        names = kernel.arg_names
        signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
        strides = "key_", "value_", "page_block", "coded_", "query_"
        aligned = [["tt.divisibility", 16]]  # as PyTorch's memory is, and a cache's strides
        even = [n for n in names if signature[n][0] == "*" or n.startswith(strides)]
        attrs = {(names.index(n),): aligned for n in even if n not in fixed}
        source = ASTSource(kernel, signature=signature, constexprs=fixed, attrs=attrs)
        options = {"num_warps": 8} if kernel is kernels.digest_blocks else {}
        if kernel is kernels.attend_rows:
            size = torch_type(types["keys"]).itemsize
            options = {"num_warps": warps_of(fixed["WIDE"], size)}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        check(kernel, made.asm["ptx"], fixed.get("OVERLAPS", False))
        print(kernel.__name__, fixed, "spills", spills(made.asm["ptx"], capability))


def torch_type(pointer: str) -> torch.dtype:
    """Of Triton's name of a pointer's type."""
    names = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}
    names |= {"*fp8e4nv": torch.float8_e4m3fn}
    return names[pointer]


def check(kernel: Any, assembly: str, overlaps: bool) -> None:
    """What no interpreter shows: a row's programs count themselves in the device's order of memory,
    each when all its threads have written and before any of them reads on, and not through caches
    that are for constants. Buffers' sizes are not compiled in. And no digest, key or value is
    loaded byte by byte. Programs that begin early read nothing before they have waited."""
    acts = re.findall(r"bar\.sync|griddep\w*\.wait|(?:ld|st|atom)\.global[.\w]*", assembly)
    assert (acts[0] == "griddepcontrol.wait") == overlaps
    assert acts.count("griddepcontrol.wait") == overlaps
    counts = [at for at, one in enumerate(acts) if one == "atom.global.gpu.acq_rel.add.u32"]
    assert len(counts) == (kernel in (kernels.choose_blocks, kernels.attend_rows))
    for at in counts:
        assert acts[at - 1] == acts[at + 1] == "bar.sync"
        assert not any(".nc" in one for one in acts)
    assert not any(one.startswith("ld") and one.endswith(("b8", "b16")) for one in acts)
    sizes = {one.name for one in kernel.params if one.do_not_specialize}
    assert sizes == set(kernels.SIZES) & set(kernel.arg_names)


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
    main(CAPABILITY)
