"""Stand in for nvidia-smi while a script is followed: print the GPUs that it is to see.

Run as a program: `nvidia_smi.py NAME MEMORY_MIB COUNT [nvidia-smi's own options]`. It imports nothing of
trimtab, so that it starts fast.
"""

from __future__ import annotations

import sys
from pathlib import Path

DRIVER = "580.00"
VALUES = {
    "driver_version": DRIVER,
    "memory.used": "0 MiB",
    "utilization.gpu": "0 %",
    "utilization.memory": "0 %",
    "temperature.gpu": "30",
    "power.draw": "70.00 W",
    "uuid": "GPU-00000000-0000-0000-0000-000000000000",
}


def describe_gpus(name: str, memory_mib: int, count: int, options: list[str]) -> str:
    r"""Return what nvidia-smi prints.

    >>> describe_gpus("H100", 81559, 1, ["--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    'H100, 81559'
    >>> describe_gpus("H100", 81559, 2, ["-L"])
    'GPU 0: H100\nGPU 1: H100'
    """
    query = next((word.partition("=")[2] for word in options if word.startswith("--query-gpu=")), "")
    if "-L" in options or "--list-gpus" in options:
        return "\n".join(f"GPU {index}: {name}" for index in range(count))
    if not query:
        rows = [f"| {index}  {name}  0MiB / {memory_mib}MiB |" for index in range(count)]
        return "\n".join([f"NVIDIA-SMI {DRIVER}   Driver Version: {DRIVER}   CUDA Version: 13.0", *rows])
    how = next((word.partition("=")[2] for word in options if word.startswith("--format=")), "csv").split(",")
    fields = query.split(",")
    memory = f"{memory_mib} MiB"
    lines = [] if "noheader" in how else [", ".join(fields)]
    for index in range(count):
        known = {"name": name, "gpu_name": name, "memory.total": memory, "memory.free": memory}
        known |= {"index": str(index), "count": str(count)}
        texts = [(known | VALUES).get(field.strip(), "0") for field in fields]
        if "nounits" in how:
            own = {"name", "gpu_name", "uuid"}
            texts = [
                text if field.strip() in own else text.split(" ")[0]
                for field, text in zip(fields, texts, strict=True)
            ]
        lines.append(", ".join(texts))
    return "\n".join(lines)


def write_program(folder: Path, *, name: str, memory_bytes: int, count: int) -> None:
    """Write a program called nvidia-smi that shows these GPUs."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    here = Path(__file__).resolve()
    words = f"'{name}' {memory_bytes // 2**20} {count}"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{here}" {words} "$@"\n', encoding="utf-8")
    program.chmod(0o755)


if __name__ == "__main__":
    sys.stdout.write(describe_gpus(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]) + "\n")
