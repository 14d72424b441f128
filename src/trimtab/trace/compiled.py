"""Runs torch.compile for real on the pretended device."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trimtab.trace.recorder import Recorder


class Silent:
    """A Triton kernel that is never compiled."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    def run(self, *args: Any, **kwargs: Any) -> None:
        pass


def install(rec: Recorder) -> None:
    import torch._dynamo.convert_frame as cf
    import torch._inductor.config as ic
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes
    import torch._inductor.fx_passes.pad_mm as pad_mm
    import torch._inductor.scheduler as scheduler
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    import torch.utils._triton as ut

    type(rec).ignore_compile_internals = classmethod(lambda c: True)
    whole = cf._compile

    def _compile(*a, **k):
        p, rec.paused = rec.paused, True
        try:
            with _disable_current_modes():
                return whole(*a, **k)
        finally:
            rec.paused = p

    cf._compile = _compile
    ic.force_disable_caches = True
    ic.compile_threads = 1
    for m in (scheduler, pad_mm):
        m.has_triton = lambda *a: True
    torch.cuda.get_rng_state = lambda *a: torch.empty(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *a: None
    torch.cuda._exchange_device = lambda *a: 0
    torch.cuda._maybe_exchange_device = lambda *a: 0
    FakeTensorMode.avoid_device_init = True
    torch._C._ensureCUDADeviceGuardSet = lambda: None
    ut.triton_hash_with_backend = lambda: "none"
    AsyncCompile.triton = lambda self, name, source, device_str="cuda": Silent(name, source)
    def header(self):
        self.write_get_raw_stream_header()
        self.imports.splice("from torch._inductor.runtime.triton_heuristics import start_graph, end_graph")
    PythonWrapperCodegen.write_triton_header_once = header
    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda")
    def reinterpret(t, size, stride, offset=0):
        return torch.as_strided(t, size, stride, t.storage_offset() + offset)
    guards._reinterpret_tensor = reinterpret
    guards.assert_size_stride = lambda *a: None
    guards.assert_alignment = lambda *a: None
    fold_on_host()


def fold_on_host() -> None:
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    class OnHost(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs or {}))
            return func(*args, **kwargs)

    whole = Folder.run

    def run(self):
        with OnHost():
            return whole(self)

    Folder.run = run
