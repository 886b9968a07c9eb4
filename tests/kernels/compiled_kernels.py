"""What Triton's compiler makes of the kernels of some orders, for a GPU that need not be there: registers, stack, shared memory, copies.

The launches are those of `compile_ahead.launches_of`, so what is looked at is what a run on such a GPU launches. As a module of its own it
is the process that compiles: Triton must not be in interpreter's mode there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tlora.kernels.compile_request import CompileRequest

IN_LOOPS = ("gemm_kernel", "shrink_kernel", "sum_kernel", "forward_kernel", "dq_kernel", "dkv_kernel")
EXPERTS_IN_LOOPS = ("expert_gemm_kernel", "expert_shrink_kernel", "expert_sum_kernel", "rows_kernel")
"""Kernels whose time goes into a loop of products over what they load."""
_COPIES = {"bulk": r"cp\.async\.bulk\.tensor\S*shared", "cp.async": r"cp\.async\.c[ag]\."}
_DOT = r"(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma) "  # in Triton's own language
_PRODUCTS = {"tcgen05": r"tcgen05\.mma", "wgmma": r"wgmma\.mma_async", "mma.sync": r"mma\.sync"}


@dataclass(frozen=True)
class Compiled:
    """One kernel; `constants` are its compile-time arguments, `copies` and `products` the instructions that it uses for both."""

    name: str
    constants: dict[str, str]
    warps: int
    stages: int
    registers: int
    stack: int
    shared_memory: int
    copies: tuple[str, ...]
    products: tuple[str, ...]
    lost: int = 0  # by so many it has fewer instructions for products than there are products: LLVM has left some out

    def __str__(self) -> str:
        """One row of a table."""
        told = " ".join(f"{k}={v}" for k, v in self.constants.items() if k in _SHOWN and v not in ("None", "False"))
        sizes = f"{self.registers:3} registers {self.stack:4} stack {self.shared_memory / 1024:5.1f} KiB"
        how = " ".join((*self.copies, *self.products)) or "-"
        return f"{self.name:20} {sizes} {how:18} {self.warps} warps {self.stages} stages {told}"


_SHOWN = (
    "M",
    "NK",
    "MANY",
    "SKIP",
    "W",
    "R",
    "SPLIT",
    "WHICH",
    "BM",
    "BN",
    "BK",
    "BT",
    "BC",
    "BD",
    "WINDOW",
    "SOFTCAP",
    "SCALED",
    "MASKED",
)


def compiled(orders: Sequence[CompileRequest], cache: Path) -> list[Compiled]:
    """The kernels of `orders`, each once, by one process that keeps what it compiles in `cache`."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", __spec__.name]
    text = json.dumps([asdict(order) for order in orders])
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    return [Compiled(**row | {name: tuple(row[name]) for name in ("copies", "products")}) for row in rows]


def _compile(orders: Sequence[CompileRequest]) -> Iterable[Compiled]:
    from triton import knobs

    from tlora.kernels import compile_ahead

    found: dict[str, Compiled] = {}

    def listen(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: object) -> None:
        files = {Path(path).suffix: Path(path) for path in metadata_group.values()}
        if metadata["hash"] not in found:
            found[metadata["hash"]] = _read(src, metadata, {kind: files[kind] for kind in (".ttgir", ".ptx", ".cubin")})

    knobs.compilation.listener = listen
    compile_ahead._compile_launcher = lambda _: None  # C code, which a GPU's driver calls
    for order in orders:
        compile_ahead._without_a_gpu(order.capability)
        for launch in compile_ahead.launches_of(order):
            launch()
    return found.values()


def _read(src: Any, metadata: dict[str, Any], files: dict[str, Path]) -> Compiled:
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    said = subprocess.run([tool, "-res-usage", files[".cubin"]], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert usage, said
    names = src.fn.arg_names
    constants = {names[path[0]]: str(value) for path, value in src.constants.items() if len(path) == 1}
    ptx = files[".ptx"].read_text()
    copies, products = (tuple(name for name, pattern in kinds.items() if re.search(pattern, ptx)) for kinds in (_COPIES, _PRODUCTS))
    lost = len(re.findall(_DOT, files[".ttgir"].read_text())) - len(re.findall("|".join(_PRODUCTS.values()), ptx))
    sizes = int(usage[1]), int(usage[2]), int(metadata["shared"])
    return Compiled(src.fn.__name__, constants, metadata["num_warps"], metadata["num_stages"], *sizes, copies, products, max(0, lost))


if __name__ == "__main__":
    from tlora.kernels.compile_request import read_order

    print(json.dumps([asdict(kernel) for kernel in _compile([read_order(json.dumps(row)) for row in json.load(sys.stdin)])]))
