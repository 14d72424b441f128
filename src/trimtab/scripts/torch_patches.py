"""Make torch follow a script on the fake GPU: parameters without memory, one process, watched steps.

Only for a child process that follows one script and then exits: nothing is undone.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import math
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import comm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from trimtab.errors import CannotFollow
from trimtab.scripts.bitsandbytes_patches import patch_bitsandbytes
from trimtab.scripts.compile_patches import patch_compile
from trimtab.scripts.cuda_patches import act_as_worker, copy_for_worker, patch_cuda_tools
from trimtab.scripts.deepspeed_patches import patch_deepspeed
from trimtab.scripts.file_patches import patch_files
from trimtab.scripts.generation_patches import patch_generation
from trimtab.scripts.group_patches import patch_groups
from trimtab.scripts.moved_parameters import MOVED, apply_to_module, follow_moves
from trimtab.scripts.observer import STEPS, TRAINS, Observer, find_script_line, is_script_file, put
from trimtab.scripts.operation_patches import patch_operations
from trimtab.scripts.process_patches import patch_processes
from trimtab.scripts.recorder import make_real
from trimtab.trace.cuda_kernels import patch_cuda_kernels
from trimtab.trace.fake_cuda import hide_fake_tensors
from trimtab.trace.triton_kernels import patch_triton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from trimtab.spec import Device

optimizers = importlib.import_module("torch.optim.optimizer")


def install_patches(observer: Observer, *, world_size: int, devices: int, device: Device) -> None:
    """Patch torch for a script that runs as rank 0 of `world_size` processes."""
    fake_mode = observer.recorder.fake_mode
    _patch_parameters(fake_mode)
    _patch_moves(observer)
    _patch_fake_tensors(fake_mode)
    _patch_modules(observer)
    _patch_optimizers(observer)
    _patch_lbfgs(observer)
    _patch_backward(observer)
    _patch_loaders(observer)
    _patch_cuda(observer, devices)
    patch_cuda_tools(observer, device)
    patch_operations()
    patch_groups(observer, world_size)
    patch_processes(observer)
    patch_compile(observer)
    _patch_checkpointing(observer)
    patch_files(observer, fake_mode)
    patch_triton(lambda: observer.recorder)
    patch_cuda_kernels(lambda: observer.recorder)
    hide_fake_tensors()
    patch_generation(observer)
    patch_bitsandbytes(observer, fake_mode)
    patch_deepspeed()


# Parameters have no memory, not even on the CPU: a model of 8 billion parameters is built in a moment.


def _patch_parameters(fake_mode: Any) -> None:
    original = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) in (torch.Tensor, torch.nn.Parameter) and data.device.type in ("cpu", "cuda"):
            data = make_fake(fake_mode, data)
        return original(cls, data, requires_grad)

    put(torch.nn.Parameter, "__new__", staticmethod(new))


def _patch_moves(observer: Observer) -> None:
    """Let optimizers follow the parameters of a model that moves, so that nothing holds the old ones."""
    running = []

    def apply(module: Any, change: Callable[[Any], Any], recurse: bool = True) -> Any:
        running.append(module)
        try:
            return apply_to_module(module, change, recurse)
        finally:
            running.pop()
            if not running:
                for optimizer in observer.made_optimizers:
                    find_moved_parameters(optimizer)

    put(torch.nn.Module, "_apply", apply)


def make_fake(fake_mode: Any, tensor: torch.Tensor) -> Any:
    """Return a tensor of the same shape, strides and device that has no memory."""
    with _disable_current_modes():
        return fake_mode.from_tensor(tensor.detach())


def _patch_fake_tensors(fake_mode: Any) -> None:
    """Let scripts read values of fake tensors: known ones, or assumed ones."""

    def as_real(method: str) -> Callable[..., Any]:
        def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            real = make_real(tensor, None)
            with _disable_current_modes():
                return getattr(real, method)(*args, **kwargs)

        return run

    for method in ("numpy", "tolist", "__array__", "__format__"):
        setattr(FakeTensor, method, as_real(method))
    create: Any = FakeTensor.__new__

    def new(cls: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(first, torch.Tensor) and cls is FakeTensor:
            # Libraries make another parameter of the same class: type(parameter)(data, requires_grad=False).
            return torch.nn.Parameter(first, kwargs.get("requires_grad", *args[:1] or (True,)))
        return create(cls, first, *args, **kwargs)

    put(FakeTensor, "__new__", staticmethod(new))
    # Frameworks find the same parameter again by its address.
    put(FakeTensor, "data_ptr", find_address)
    original: Any = torch.Tensor.data

    def set_data(tensor: Any, value: Any) -> None:
        if type(value) is torch.Tensor:
            value = make_fake(fake_mode, value)
        original.__set__(tensor, value)

    put(FakeTensor, "data", property(original.__get__, set_data))
    put(torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor)
    put(torch.Tensor, "is_pinned", lambda *_, **__: False)
    # Otherwise optimizers and gradient clipping loop over fake parameters.
    optimizers._foreach_supported_types.append(FakeTensor)
    from torch.utils import _foreach_utils

    supported = _foreach_utils._get_foreach_kernels_supported_devices()
    put(_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: [*supported, "cuda"])
    put(_foreach_utils, "_has_foreach_support", _has_foreach_support)
    put(torch.nn.utils.clip_grad, "_has_foreach_support", _has_foreach_support)


def find_address(tensor: Any) -> int:
    """Return a number for where a tensor without memory begins: equal for tensors that share memory.

    Storage objects are further apart than 64 bytes, so views of up to 256 KiB into one get no other's number.
    """
    begin = tensor.storage_offset() * tensor.element_size()
    return int(tensor.untyped_storage()._cdata) * 4096 + begin


def _has_foreach_support(tensors: Any, device: Any) -> bool:
    from torch.utils import _foreach_utils

    # torch's own list has DTensor as well, once that is imported.
    supported = (*_foreach_utils._foreach_supported_types, FakeTensor)
    return device.type == "cuda" and all(tensor is None or type(tensor) in supported for tensor in tensors)


# What is watched


def _patch_modules(observer: Observer) -> None:
    original = torch.nn.Module.__call__

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return observer.call_module(original, module, args, kwargs)

    put(torch.nn.Module, "__call__", call)


def find_moved_parameters(optimizer: Any) -> None:
    """Give an optimizer the parameters that its own have become, with the states of its own."""
    for group in getattr(optimizer, "param_groups", ()):
        for place, tensor in enumerate(group["params"]):
            if hasattr(tensor, MOVED):
                group["params"][place] = moved = follow_moves(tensor)
                if tensor in optimizer.state:
                    optimizer.state[moved] = optimizer.state.pop(tensor)


def _patch_optimizers(observer: Observer) -> None:
    make: Any = torch.optim.Optimizer.__init__

    @functools.wraps(make)
    def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        observer.has_optimizer = True
        observer.made_optimizers.add(optimizer)
        make(optimizer, *args, **kwargs)

    put(torch.optim.Optimizer, "__init__", init)
    original = torch.optim.Optimizer.zero_grad

    @functools.wraps(original)
    def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        find_moved_parameters(optimizer)
        return original(optimizer, *args, **kwargs)

    def begin_step(optimizer: Any, _: Any, __: Any) -> None:
        find_moved_parameters(optimizer)
        observer.begin_step()

    put(torch.optim.Optimizer, "zero_grad", zero_grad)
    optimizers.register_optimizer_step_pre_hook(begin_step)
    optimizers.register_optimizer_step_post_hook(lambda optimizer, _, __: observer.end_step(optimizer))


def _patch_lbfgs(observer: Observer) -> None:
    """Let L-BFGS take all of its iterations in a step: whether it stops early depends on values.

    Its memory of directions is full after several steps. Fill it before the last step that is followed.
    """
    original: Any = torch.optim.LBFGS.step

    @functools.wraps(original)
    def step(optimizer: Any, closure: Any) -> Any:
        group = optimizer.param_groups[0]
        tolerance = group["tolerance_change"]
        observer.notes[
            f"L-BFGS is taken to need all of its {group['max_iter']} iterations in a step, and to remember "
            f"{group['history_size']} directions"
        ] = None
        if observer.steps == STEPS - 1:
            state = optimizer.state[optimizer._params[0]]
            directions, steps, factors = (state.get(name, []) for name in ("old_dirs", "old_stps", "ro"))
            while directions and len(directions) < group["history_size"]:
                directions.append(torch.empty_like(directions[-1]))
                steps.append(torch.empty_like(steps[-1]))
                factors.append(factors[-1])
        # Neither the slope nor the progress is below it, whatever they are taken to be.
        group["tolerance_change"] = -math.inf
        try:
            return original(optimizer, closure)
        finally:
            group["tolerance_change"] = tolerance

    put(torch.optim.LBFGS, "step", step)


def _prepare_thread(_: Any) -> None:
    """Let autograd's thread make tensors of numbers on the GPU, as a custom backward pass may do.

    torch must make them on the CPU and copy them, which is a setting of the thread.
    """
    torch._C._set_only_lift_cpu_tensors(True)


def _patch_backward(observer: Observer) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        observer.begin_backward()
        hooks = [
            root.register_hook(_prepare_thread)
            for root in tree_leaves(args[:1])
            if isinstance(root, torch.Tensor) and root.grad_fn is not None
        ]
        if observer.last_loader is not None:
            observer.last_loader.__dict__[TRAINS] = True
        # A script may read its gradients through an optimizer that it made before it moved the model.
        for optimizer in observer.made_optimizers:
            find_moved_parameters(optimizer)
        try:
            original(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
            observer.end_backward()

    put(torch.autograd, "backward", backward)


def _patch_loaders(observer: Observer) -> None:
    """Load data in this process, and end loaders once the script has shown its steps."""
    _patch_iterators(observer)
    _patch_batches(observer)
    _patch_fetchers(observer)


def _patch_iterators(observer: Observer) -> None:
    """Let loaders, also those with iterators of their own, load without worker processes."""
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

    def patch_class(cls: Any) -> None:
        """Patch a loader with iterators of its own, such as torchdata's StatefulDataLoader."""
        if "_get_iterator" in vars(cls):
            put(cls, "_get_iterator", _load_here(vars(cls)["_get_iterator"], observer))
        if "__iter__" in vars(cls) and cls is not DataLoader:
            put(cls, "__iter__", _end_generators(vars(cls)["__iter__"]))
        for subclass in cls.__subclasses__():
            patch_class(subclass)

    @classmethod  # type: ignore[misc]
    def patch_later(cls: Any, **options: Any) -> None:
        super(DataLoader, cls).__init_subclass__(**options)
        patch_class(cls)

    patch_class(DataLoader)
    put(DataLoader, "__init_subclass__", patch_later)
    put(DataLoader, "_get_iterator", _load_here(_SingleProcessDataLoaderIter, observer))


def _load_here(make_iterator: Callable[[Any], Any], observer: Observer) -> Callable[[Any], Any]:
    """Return a function that makes the iterator of a loader without worker processes."""

    @functools.wraps(make_iterator)
    def get_iterator(loader: Any) -> Any:
        workers, dataset = loader.num_workers, loader.dataset
        if loader.batch_size is not None:
            observer.learn("loader", f"batch_size={loader.batch_size}, num_workers={workers}")
        own = copy_for_worker(loader)
        with act_as_worker(loader, own):
            if workers and loader.worker_init_fn is not None:
                loader.worker_init_fn(0)
            loader.__dict__.update(num_workers=0, dataset=own)
            try:
                iterator: Any = make_iterator(loader)
            finally:
                loader.__dict__.update(num_workers=workers, dataset=dataset)
        iterator._trimtab_loader, iterator._trimtab_dataset = loader, own
        if observer.training_loader is None and not observer.is_over and torch.is_grad_enabled():
            observer.training_loader = loader
        return iterator

    return get_iterator


class LoaderEnd(StopIteration):
    """Ends a loader before its data ends."""


def was_loader_ended(error: BaseException) -> bool:
    """Return whether an error is due to the end of a loader; a generator turns that into RuntimeError."""
    return isinstance(error, StopIteration) or isinstance(error.__cause__, LoaderEnd)


def _end_generators(make_iterator: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let a loader whose own generator reads a loader end without an error when that one is ended."""

    def end_with_loader(batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
        except RuntimeError as error:
            if not was_loader_ended(error):
                raise

    @functools.wraps(make_iterator)
    def iterate(loader: Any) -> Any:
        batches = make_iterator(loader)
        return end_with_loader(batches) if inspect.isgenerator(batches) else batches

    return iterate


def _patch_batches(observer: Observer) -> None:
    """Note every batch, and end loaders once the script has shown its steps."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original = _BaseDataLoaderIter.__next__

    def next_batch(iterator: Any) -> Any:
        observer.check_time()
        count = iterator.__dict__.setdefault("_trimtab_count", 0)
        loader = iterator.__dict__.get("_trimtab_loader", iterator)
        # A loader for training ends; others may be for evaluations, of which there can be one in each epoch.
        trains = getattr(loader, TRAINS, False) and torch.is_grad_enabled()
        if observer.is_over and trains and not count:
            # One batch, as scripts divide by the number of batches.
            observer.note_last_epoch()
        if observer.is_over and trains and count:
            raise LoaderEnd
        if (observer.is_over or not torch.is_grad_enabled()) and count >= LAST_BATCHES and is_read_by_loop():
            if not observer.is_over:
                observer.notes["evaluation was followed for its first batches only"] = None
            raise LoaderEnd
        iterator._trimtab_count = count + 1
        observer.note_batch(loader)
        begin = time.perf_counter()
        workers: Any = contextlib.nullcontext()
        if loader is not iterator:
            workers = act_as_worker(loader, iterator._trimtab_dataset)
        try:
            with workers:
                batch = original(iterator)
        except StopIteration:
            if not count and loader is not iterator:
                observer.note_empty_pass(loader)
            raise
        observer.loader_s += time.perf_counter() - begin
        observer.loader_batches += 1
        return batch

    put(_BaseDataLoaderIter, "__next__", next_batch)


def _patch_fetchers(observer: Observer) -> None:
    """Count the samples of each batch: a collator may join them, so that the batch does not show them."""
    from torch.utils.data._utils import fetch as fetchers

    def watch(original: Any) -> Any:
        @functools.wraps(original)
        def fetch(fetcher: Any, index: Any) -> Any:
            if isinstance(index, list | tuple):
                observer.note_fetch(len(index))
            return original(fetcher, index)

        return fetch

    for kind in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):
        put(kind, "fetch", watch(kind.fetch))


LOOP_OPCODES = {dis.opmap["FOR_ITER"], dis.opmap["SEND"]}
"""Instructions at which Python is in `for` and in `yield from`."""
NEXT_NAMES = {"next", "__next__"}


def find_opcode(frame: FrameType) -> int:
    """Return the instruction at which a frame is; from Python 3.12 on, the position may be in its cache."""
    at, codes = frame.f_lasti, frame.f_code.co_code
    while at > 0 and codes[at] == dis.opmap["CACHE"]:
        at -= 2
    return codes[at]


def is_read_by_loop() -> bool:
    """Return whether a loop or a function such as list() asks a loader for a batch, so that it may end early.

    Where a script calls next() itself, it may count on a batch.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        calls_next = not NEXT_NAMES.isdisjoint(code.co_names) and is_script_file(code.co_filename)
        if calls_next and find_opcode(frame) not in LOOP_OPCODES:
            return False
        # A generator ends with the loop in it, and so does an iterator that calls next(): ask who reads them.
        if not code.co_flags & inspect.CO_GENERATOR and code.co_name != "__next__":
            return True
        frame = frame.f_back
    return True


LAST_BATCHES = 3
"""Batches that a loader gives after the third step, and in an evaluation."""


class CpuGenerator(torch.Generator):
    """A generator that draws on the CPU, whatever device the script names."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """Return a generator on the CPU."""
        make: Any = super().__new__
        return make(cls, device="cpu")


def _patch_cuda(observer: Observer, devices: int) -> None:
    """Answer what scripts ask of torch.cuda and no job does."""
    state = torch.zeros(16, dtype=torch.uint8)
    put(torch.cuda, "device_count", lambda: devices)
    put(torch.cuda, "get_rng_state", lambda *_, **__: state)
    put(torch.cuda, "get_rng_state_all", lambda *_, **__: [state] * devices)
    for name in ("set_rng_state", "set_rng_state_all", "reset_accumulated_memory_stats"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in ("get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all"):
        put(torch.cuda.random, name, getattr(torch.cuda, name))
    put(torch.cuda, "memory_summary", lambda *_, **__: "")
    put(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    put(torch, "Generator", CpuGenerator)
    # `with torch.cuda.device(...)` asks a build with CUDA which device was the current one.
    for name in ("_exchange_device", "_maybe_exchange_device"):
        put(torch.cuda, name, lambda _: 0)

    def refuse(*_: Any, **__: Any) -> Any:
        raise CannotFollow(
            f"nn.DataParallel ({find_script_line()})",
            found="it splits a batch over several GPUs from one process, and trimtab follows one GPU",
            cure="Give one device with --on, or start the script with torchrun and DistributedDataParallel.",
        )

    if devices > 1:
        put(torch.nn.DataParallel, "__init__", refuse)
    # On one GPU nn.DataParallel passes its inputs on, but calls functions that only torch for CUDA has.
    put(comm, "scatter", lambda tensor, gpus, *_, **__: (tensor.to(torch.device("cuda", gpus[0])),))
    put(comm, "gather", lambda tensors, *_, **__: tensors[0])


def _patch_checkpointing(observer: Observer) -> None:
    import torch.utils.checkpoint as checkpointing

    original = checkpointing.checkpoint

    @functools.wraps(original)
    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        observer.learn("recompute", "full", "torch.utils.checkpoint")
        return original(*args, **kwargs)

    put(checkpointing, "checkpoint", checkpoint)
