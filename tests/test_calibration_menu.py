"""The menu of `trimtab calibrate`: which operations a calibration has, traced as on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

LIST_ATTENTION = """
import json, os, sys
import trimtab
from trimtab.trace.fake_cuda import install_fake_cuda

device = trimtab.cluster(sys.argv[1]).devices[0]
install_fake_cuda(device)
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trimtab.calibration.programs import list_programs
from trimtab.trace.kernels import Kernels
from trimtab.trace.recorder import Recorder

mode = FakeTensorMode(allow_non_fake_inputs=True)
recorder = Recorder(Kernels(device), mode)
recorder.records_work = True
with mode, recorder:
    torch._C._set_only_lift_cpu_tensors(True)
    for program in list_programs():
        if "attention" in program.name:
            program.run()
print(json.dumps([(work.op, work.dims) for work in recorder.works if work.kind == "attention"]), flush=True)
# No destructors, as in the processes that trace: threads of the backward pass may still run.
os._exit(0)
"""


def test_a_calibration_measures_attention_over_long_sequences_in_both_directions() -> None:
    command = [sys.executable, "-W", "ignore", "-c", LIST_ATTENTION, "H200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    measured = {
        (op.removeprefix("aten::_scaled_dot_product_"), dims[2], dims[4], bool(dims[5]))
        for op, dims in json.loads(done.stdout)
    }
    for size in (64, 128):
        for way in ("", "_backward"):
            assert {
                (f"cudnn_attention{way}", length, size, True) for length in (8192, 32768, 131072)
            } <= measured
            # Packages call flash attention directly, on short sequences too.
            assert {
                (f"flash_attention{way}", length, size, True) for length in (512, 2048, 8192, 32768)
            } <= measured
            # Before Hopper, only the memory-efficient kernel takes a mask.
            assert {
                (f"efficient_attention{way}", length, size, False) for length in (512, 2048, 8192)
            } <= measured
    assert ("cudnn_attention_backward", 32768, 128, False) in measured
