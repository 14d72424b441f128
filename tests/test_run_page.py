"""The program on the page about Run does what the page says, started as the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "run.md"


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.slow
def test_the_program_on_the_page_runs_under_python_and_under_torchrun(tmp_path: Path, processes: int) -> None:
    program = tmp_path / "loop.py"
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    program.write_text("\n".join(blocks), encoding="utf-8")
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run([*start, str(program)], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"step (\d): loss \d", done.stdout) == ["0", "1", "2", "3", "4"]
