"""Let a script start process groups and wrap its model, as rank 0 of processes that do not exist."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.errors import CannotFollow
from trimtab.scripts.moved_parameters import apply_to_module
from trimtab.scripts.observer import Observer, find_script_line, put
from trimtab.strategies import limits
from trimtab.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST_BUCKET_BYTES = MIB
"""Size of the first bucket in which DistributedDataParallel sends gradients; the others are larger."""


def patch_groups(observer: Observer, world_size: int) -> None:
    """Let a script start process groups without other processes: it is rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    original_init, original_group = dist.init_process_group, dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original_init).bind_partial(*args, **kwargs).arguments
        size = given.get("world_size", -1)
        size = size if isinstance(size, int) and size > 0 else world_size
        observer.learn("gpus", size, "init_process_group")
        original_init("fake", store=FakeStore(), rank=0, world_size=size)

    def new_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return original_group(ranks)

    for place in (dist, dist.distributed_c10d):
        put(place, "init_process_group", init_process_group)
        put(place, "new_group", new_group)
    # A device mesh starts the process group itself if the script has not.
    put(device_mesh, "init_process_group", init_process_group)
    put(dist, "is_nccl_available", lambda: True)
    put(dist, "get_backend", lambda *_, **__: "nccl")

    def same_for_all(objects: list[Any], value: Any, *_: Any, **__: Any) -> None:
        objects[:] = [value] * len(objects)

    put(dist, "all_gather_object", same_for_all)
    put(dist, "broadcast_object_list", lambda *_, **__: None)

    def gather_object(value: Any, objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if objects is not None:
            objects[:] = [value] * len(objects)

    put(dist, "gather_object", gather_object)
    put(dist, "scatter_object_list", lambda out, inputs, *_, **__: out.__setitem__(0, inputs[0]))
    for name in ("barrier", "monitored_barrier"):
        put(dist, name, lambda *_, **__: None)

    _patch_spawn(observer)
    _patch_sharding(observer)
    _refuse_remote_calls()
    _watch_own_collectives(observer)
    FollowedDataParallel.observer = observer
    for place in (torch.nn.parallel, torch.nn.parallel.distributed):
        put(place, "DistributedDataParallel", FollowedDataParallel)


class EndedProcesses:
    """What `torch.multiprocessing.spawn` returns with join=False: here its processes have ended by then."""

    processes: tuple[Any, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        """Return that all of them have ended."""
        return True

    def pids(self) -> list[int]:
        """Return that there are none."""
        return []


def _patch_spawn(observer: Observer) -> None:
    """Run the first of the processes that a script starts with torch.multiprocessing in this one."""

    def spawn(
        fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> EndedProcesses | None:
        observer.learn("gpus", nprocs, "torch.multiprocessing.spawn")
        fn(0, *args)
        return None if join else EndedProcesses()

    for name in ("spawn", "start_processes"):
        put(torch.multiprocessing, name, spawn)
        put(sys.modules["torch.multiprocessing.spawn"], name, spawn)


REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor")
"""Functions of torch.distributed that add up what the ranks have."""
LEAST_GRADIENT_BYTES = MIB
"""Less than this is a loss, a norm or a metric."""


def _watch_own_collectives(observer: Observer) -> None:
    """Note that a script adds up the gradients of its ranks itself, where neither DDP nor FSDP does."""
    sent_bytes = 0

    def watch(name: str) -> None:
        original = getattr(dist, name)

        @functools.wraps(original)
        def reduce(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent_bytes
            sent = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if "strategy" not in observer.facts and observer.sends_gradients(sent):
                sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in sent)
                if sent_bytes >= LEAST_GRADIENT_BYTES:
                    observer.learn("strategy", "ddp", f"torch.distributed.{name}")
                    observer.notes[
                        "the script adds up the gradients of its ranks itself, with "
                        f"torch.distributed.{name} ({find_script_line()}): in the step time they are sent "
                        "as by DistributedDataParallel"
                    ] = None
            return original(*args, **kwargs)

        put(dist, name, reduce)

    for name in REDUCING:
        watch(name)


def _patch_sharding(observer: Observer) -> None:
    """Watch fully sharded data parallelism, of both kinds; torch's own code runs."""
    from torch.distributed import fsdp

    original = fsdp.fully_shard

    @functools.wraps(original)
    def fully_shard(*args: Any, **kwargs: Any) -> Any:
        observer.learn("strategy", "fsdp", "fully_shard")
        return original(*args, **kwargs)

    put(fsdp, "fully_shard", fully_shard)
    _patch_moves_to_gpu()
    _patch_moves_of_units()
    init = fsdp.FullyShardedDataParallel.__init__

    @functools.wraps(init)
    def wrap(module: Any, *args: Any, **kwargs: Any) -> None:
        observer.learn("strategy", "fsdp", "FullyShardedDataParallel")
        init(module, *args, **kwargs)

    put(fsdp.FullyShardedDataParallel, "__init__", wrap)
    _patch_tensor_parallel(observer)


def _patch_tensor_parallel(observer: Observer) -> None:
    """Watch tensor parallelism; torch's own code runs."""
    from torch.distributed.tensor import parallel

    original = parallel.parallelize_module

    @functools.wraps(original)
    def parallelize_module(module: Any, device_mesh: Any = None, *args: Any, **kwargs: Any) -> Any:
        size = device_mesh.size() if device_mesh is not None else dist.get_world_size()
        observer.learn("tensor_parallel", size, "parallelize_module")
        return original(module, device_mesh, *args, **kwargs)

    put(parallel, "parallelize_module", parallelize_module)


def _refuse_remote_calls() -> None:
    """Refuse torch.distributed.rpc: what the other processes do is not in this one."""
    try:
        from torch.distributed import rpc
    except ImportError:
        return

    def init_rpc(*_: Any, **__: Any) -> None:
        raise CannotFollow(
            f"torch.distributed.rpc ({find_script_line()})",
            found="it runs functions in other processes, and trimtab follows the process that trains",
            cure="Give the command of a script that trains with DistributedDataParallel or FSDP, or in one "
            "process.",
        )

    put(rpc, "init_rpc", init_rpc)


def _patch_moves_to_gpu() -> None:
    """Let `fully_shard` move a model from the CPU to the GPU."""
    from torch.distributed.fsdp import _fully_shard as package

    original = package._fsdp_init._get_managed_states

    @functools.wraps(original)
    def get_managed_states(modules: Any, ignored_params: Any = None) -> Any:
        ignored = ignored_params or set()

        def move(tensor: Any) -> Any:
            return tensor.cuda() if tensor.device.type == "cpu" and tensor not in ignored else tensor

        for module in modules:
            apply_to_module(module, move, recurse=False)
        return original(modules, ignored_params)

    for place in (package._fsdp_init, package._fully_shard):
        if hasattr(place, original.__name__):
            put(place, original.__name__, get_managed_states)


def _patch_moves_of_units() -> None:
    """Let FullyShardedDataParallel move its units from the CPU to the GPU, one by one, as with device_id."""
    from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils

    original = _init_utils._move_module_to_device

    @functools.wraps(original)
    def move_unit(module: Any, ignored_params: Any, ignored_buffers: Any, device: Any) -> None:
        def move(tensor: Any) -> Any:
            is_ignored = tensor in ignored_params or tensor in ignored_buffers
            return tensor if is_ignored or tensor.device.type != "cpu" else tensor.to(device)

        waiting = [module] if device is not None else []
        while waiting:
            part = waiting.pop()
            apply_to_module(part, move, recurse=False)
            waiting += [child for child in part.children() if not isinstance(child, FullyShardedDataParallel)]
        original(module, ignored_params, ignored_buffers, device)

    put(_init_utils, original.__name__, move_unit)


def _keep_in(view: Any) -> Callable[[Any], None]:
    def keep(parameter: Any) -> None:
        if parameter.grad is not view:
            with torch.no_grad():
                view.copy_(parameter.grad)
            parameter.grad = view

    return keep


def _send_through(view: Any, wrapper: FollowedDataParallel) -> Callable[[Any], None]:
    """Return a hook that copies a gradient into its bucket, and what the ranks agree on back into it."""

    def send(parameter: Any) -> None:
        gradient = parameter.grad
        if wrapper.require_backward_grad_sync and gradient.layout is torch.strided:
            with torch.no_grad():
                view.copy_(gradient)
                gradient.copy_(view)

    return send


class FollowedDataParallel(torch.nn.Module):
    """Replicates a model: the memory of torch's own, without the processes."""

    observer: Observer

    def __init__(self, module: Any, device_ids: Any = None, *_: Any, **kwargs: Any) -> None:
        super().__init__()
        self.observer.learn("strategy", "ddp", "DistributedDataParallel")
        self.module = module
        self.device_ids = device_ids
        self.require_backward_grad_sync = True
        self._views = bool(kwargs.get("gradient_as_bucket_view", False))
        size = kwargs.get("bucket_cap_mb")
        self._bucket_bytes = limits.BUCKET_BYTES if size is None else int(size * MIB)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not parameters:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameters that "
                "require a gradient."
            )
        self.device = parameters[0].device
        self.__dict__["_buckets"] = list(self._make_buckets(parameters))

    def _make_buckets(self, parameters: list[Any]) -> Iterator[Any]:
        """Make the flat tensors that gradients are sent in, in the order of the backward pass."""
        members: list[Any] = []
        limit, size = min(FIRST_BUCKET_BYTES, self._bucket_bytes), 0
        for parameter in reversed(parameters):
            members.append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= limit:
                yield self._make_bucket(members)
                members, size, limit = [], 0, self._bucket_bytes
        if members:
            yield self._make_bucket(members)

    def _make_bucket(self, parameters: list[Any]) -> Any:
        first = parameters[0]
        count = sum(parameter.numel() for parameter in parameters)
        with torch.no_grad():
            flat = torch.empty(count, dtype=first.dtype, device=first.device)
        self.observer.label(flat, "gradients" if self._views else "communication")
        at = 0
        for parameter in parameters:
            view = flat[at : at + parameter.numel()].view(parameter.shape)
            hook = _keep_in(view) if self._views else _send_through(view, self)
            parameter.register_post_accumulate_grad_hook(hook)
            at += parameter.numel()
        return flat

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; with a device given, its inputs are moved there first."""
        if self.device_ids:
            args, kwargs = tree_map(self._move_input, (args, kwargs))
        return self.module(*args, **kwargs)

    def _move_input(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients out of their buckets for a while."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, *_: Any, **__: Any) -> Any:
        """Return a context: there are no other ranks to wait for."""
        return contextlib.nullcontext()

    def register_comm_hook(self, *_: Any, **__: Any) -> None:
        """Do nothing: nothing is sent."""

    def _set_static_graph(self) -> None:
        """Do nothing: the graph is followed as it is."""
