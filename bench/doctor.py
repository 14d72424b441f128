"""How long `trimtab doctor` takes over large logs, and how much memory: prints a table.

    python bench/doctor.py            1 GB of each form, in a temporary folder
    python bench/doctor.py --mb 100

Forms: the lines of several frameworks with one fault near the end; a progress bar of one endless line; a log
that says the same fault in every line; the first one compressed.
"""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from machine import machine  # type: ignore[import-not-found] # beside this file

if TYPE_CHECKING:
    from collections.abc import Iterator

LINES = (
    "[2026-11-15 10:00:{s:02d},{i:03d}] [INFO] [logging.py:107:log_dist] [Rank 0] step={n}, skipped=0\n"
    "{{'loss': 2.{i:03d}, 'grad_norm': 0.{i:03d}, 'learning_rate': 4.9e-05, 'epoch': 0.{s:02d}}}\n"
    "iter {n}: loss 3.{i:03d}, time 210.{s:02d}ms, mfu 31.20%\n"
    "[rank3]: step {n} loss 2.{i:03d} error_rate 0.{s:02d} tokens/s 123,456 memory 61.2GiB(77.31%)\n"
    "n1:20:31 [0] NCCL INFO Channel {s:02d}/0 : 2[2] -> 3[3] via P2P/CUMEM\n"
)
FAULT = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 3 has a total "
    "capacity of 39.39 GiB of which 1.00 GiB is free. Of the allocated memory 37.00 GiB is allocated by "
    "PyTorch, and 400.00 MiB is reserved by PyTorch but unallocated.\n"
)


def blocks(num_bytes: int) -> Iterator[bytes]:
    """About so many bytes of a healthy log."""
    block = "".join(LINES.format(n=n, i=n % 1000, s=n % 60) for n in range(20_000)).encode()
    for _ in range(max(1, num_bytes // len(block))):
        yield block


def write(folder: Path, form: str, num_bytes: int) -> Path:
    """A log of a form."""
    file = folder / f"{form}.log"
    if form == "gzip":
        with gzip.open(file, "wb", compresslevel=1) as packed:
            for block in blocks(num_bytes):
                packed.write(block)
            packed.write(FAULT.encode())
        return file
    with file.open("wb") as out:
        if form == "lines":
            for block in blocks(num_bytes):
                out.write(block)
        elif form == "one line":
            bar = (
                b"\rEpoch 0:  31%|###       | 120/390 [01:02<02:20,  1.93it/s, v_num=4, train_loss=2.10]"
                * 10_000
            )
            for _ in range(num_bytes // len(bar)):
                out.write(bar)
            out.write(b"\n")
        else:
            every = b"iter 1200: loss nan, time 210.11ms, mfu 31.20%\n" * 20_000
            for _ in range(num_bytes // len(every)):
                out.write(every)
        out.write(FAULT.encode())
    return file


def timed(file: Path) -> tuple[float, float, int, str]:
    """Seconds, processor seconds, peak bytes and the first line of `trimtab doctor FILE`."""
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "trimtab", "doctor", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        said = process.stdout.read().decode()
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
    busy = usage.ru_utime + usage.ru_stime
    return time.perf_counter() - started, busy, usage.ru_maxrss * 1024, said.splitlines()[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=1000, help="size of each log, in 10^6 bytes")
    parser.add_argument("--only", default="", help="one form")
    given = parser.parse_args()
    print(machine())
    print(f"{'form':10} {'MB':>6} {'seconds':>8} {'busy':>6} {'peak MiB':>9}  answer")
    for form in ("lines", "one line", "every line", "gzip"):
        if given.only and form != given.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = write(Path(folder), form, given.mb * 10**6)
            seconds, busy, peak, said = timed(file)
            size = file.stat().st_size / 1e6
        answer = said.rpartition(": ")[2]
        print(f"{form:10} {size:6.0f} {seconds:8.1f} {busy:6.1f} {peak / 2**20:9.0f}  {answer}", flush=True)


if __name__ == "__main__":
    main()
