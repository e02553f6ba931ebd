"""What the vocabulary kernels take on a GPU, as compiled for it here: no GPU is needed, triton is.

    python -m tests.figures.kernel_registers [compute capability, as 80 or 90 ...]

Registers of a thread, shared memory of a program, and what ptxas spills. Nothing is run.
"""

import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from detector.vocabulary_kernel import TILING, _compare_tile, _measure_tile

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
"""The newer of triton's two assemblers. It takes code for older GPUs as well."""

TYPES = {"hidden": "*{}", "weight": "*{}", "bias": "*{}", "targets": "*i64", "ranks": "*i32"}
SUMS = ("highs", "lows", "totals", "owns", "normalisers", "entropies", "jsds")


def compiled(kernel: Any, capability: int, dtype: str, rows: int, **form: Any) -> str:
    """One line about one kernel: operands of `dtype` (bf16 or fp32), `form` as the kernel's constants."""
    item = 4 if dtype == "fp32" else 2
    constants = {"step_stride": 1, "weight_step": 1, "SCALE": 1.0, "SOFTCAP": 0.0, "BIASED": False} | form
    constants |= {"ROWS": rows, "COLUMNS": TILING.columns, "DEPTH": TILING.depth_bytes // item}
    types = TYPES | dict.fromkeys(SUMS, "*fp32") | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    signature = {name: types.get(name, "i32").format(dtype) for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants and name not in ("n_conditions", "n_rows")
    }
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    options = {"num_warps": TILING.warps, "num_stages": TILING.stages, "enable_fp_fusion": True}
    source = ASTSource(kernel, signature, values, aligned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # triton's own open files
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(made.asm["ptx"])
        arch = re.search(r"\.target (\w+)", made.asm["ptx"])[1]
        command = [PTXAS, "-v", "-arch", arch, file, "-o", Path(folder, "kernel.cubin")]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", told)[1], re.search(r"(\d+) bytes spill", told)[1]
    return (
        f"{arch} {dtype} {kernel.__name__} of {rows} rows: {registers} registers, {spilled} bytes spilled, "
        f"{made.metadata.shared >> 10} KiB shared"
    )


def main() -> None:
    """One line per kernel, operand type and compute capability."""
    for capability in [int(text) for text in sys.argv[1:]] or [80, 90]:
        for dtype in ("bf16", "fp32"):
            for kernel in (_measure_tile, _compare_tile):
                print(compiled(kernel, capability, dtype, TILING.rows))
        print(compiled(_compare_tile, capability, "bf16", 16, SOFTCAP=30.0, SCALE=0.5, BIASED=True))


if __name__ == "__main__":
    main()
