"""Turn the model of a running training script into a job that another process can trace.

trimtab traces jobs in a child process. The live model is pickled without its weights: every tensor becomes
its shape and dtype. The child process builds the same modules from that, with adapters, frozen parameters and
dtypes as they are. The file is a few kilobytes for each layer.
"""

from __future__ import annotations

import ast
import inspect
import io
import pickle
import pickletools
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trimtab.errors import CannotFollow
from trimtab.files import write_atomic
from trimtab.jobs.job import Job

JOB_FOLDER, JOB_FILE, MODEL_FILE = "job", "model.py", "model.modules"
JOB_CLASS = "LiveModel"
MAIN = "__main__"
MAIN_COPY = "trimtab_training_script"
"""Name under which the child process imports the training script."""
WRAPPED = ("forward", "_original_forward", "_hf_hook", "_old_forward")
"""Attributes that Accelerate adds to a model when it replaces forward()."""
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
LEAST_HASH = 1 << 48
"""A larger number in a pickled model is taken for a hash, which differs in every process."""
PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


class LiveParts(NamedTuple):
    """What a training step consists of."""

    model: nn.Module
    batch: Any
    """A micro-batch as the model gets it."""
    samples: int
    """Samples in that micro-batch."""
    method: str = ""
    """Method of the model that returns the loss of a batch; empty: call the model with the batch."""
    loss: Any = None
    """Function (model, batch) -> loss; None: the method, or the `loss` of the model's output."""
    optimizer: Any = None
    """Class of the optimizer and its options; None: AdamW."""


class TensorShape(NamedTuple):
    """A tensor of a batch, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_samples: bool
    """Whether its first dimension counts samples."""


def write_live_job(
    folder: Path, parts: LiveParts, *, global_batch: int, samples: int | None = None, epochs: int = 1
) -> tuple[str, list[str]]:
    """Write the job into FOLDER/job; return its name and notes on what was left out.

    Raises CannotFollow if the model cannot be rebuilt in another process.
    """
    notes: list[str] = []
    data = _pickle_parts(parts, notes)
    digest = _digest_model(data, parts)
    place = folder / JOB_FOLDER
    place.mkdir(parents=True, exist_ok=True)
    write_atomic(place / MODEL_FILE, data)
    text = f'''"""The model of this run without its weights, as a job. Written by trimtab.integrations.

trimtab plan {JOB_FILE}:{JOB_CLASS} --on 4xH100
"""

from trimtab.integrations.live_model import RebuiltModel


class {JOB_CLASS}(RebuiltModel):
    name = {type(parts.model).__name__!r}
    file = __file__
    digest = {digest!r}
    script = {_main_script()!r}
    paths = {[str(Path(path).absolute()) for path in sys.path]!r}
    global_batch = {global_batch}
    samples = {samples}
    epochs = {epochs}
'''
    write_atomic(place / JOB_FILE, text.encode())
    return f"{place / JOB_FILE}:{JOB_CLASS}", notes


def _digest_model(data: bytes, parts: LiveParts) -> str:
    """Return a digest that is the same in every process with the same model, so that cached traces are found.

    The pickled bytes are not: sets are pickled in any order, and some objects store hashes of strings.
    """
    values = sorted(
        f"{code.name} {value!r}"
        for code, value, _ in pickletools.genops(data)
        if value is not None and "GET" not in code.name and not _is_hash(value)
    )
    tensors = (*parts.model.named_parameters(), *parts.model.named_buffers())
    shapes = [f"{name} {tuple(tensor.shape)} {tensor.requires_grad}" for name, tensor in tensors]
    text = "\n".join([str(parts.model), *shapes, *values])
    return sha256(text.encode(errors="replace")).hexdigest()


def _is_hash(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >= LEAST_HASH


def describe_batch(batch: Any, samples: int) -> Any:
    """Return the batch with a TensorShape in place of every tensor."""
    if isinstance(batch, torch.Tensor):
        rows = batch.dim() > 0 and batch.shape[0] == samples
        return TensorShape(tuple(batch.shape), batch.dtype, rows)
    if hasattr(batch, "items"):
        return {key: describe_batch(value, samples) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(describe_batch(value, samples) for value in batch))
    if isinstance(batch, list | tuple):
        items = [describe_batch(value, samples) for value in batch]
        return items if isinstance(batch, list) else tuple(items)
    return batch


def make_batch(shapes: Any, size: int) -> Any:
    """Return a batch of `size` samples with those shapes, all zeros, on the default device."""
    if isinstance(shapes, TensorShape):
        shape = (size, *shapes.shape[1:]) if shapes.has_samples else shapes.shape
        return torch.zeros(shape, dtype=shapes.dtype)
    if isinstance(shapes, dict):
        return {key: make_batch(value, size) for key, value in shapes.items()}
    if isinstance(shapes, tuple) and hasattr(shapes, "_fields"):
        return type(shapes)(*(make_batch(value, size) for value in shapes))
    if isinstance(shapes, list | tuple):
        return type(shapes)(make_batch(value, size) for value in shapes)
    return shapes


class RebuiltModel(Job):
    """A job whose model, batch and optimizer come from a file of `write_live_job`."""

    file = ""
    digest = ""
    """Of the pickled model: another model is another job."""
    script = ""
    """The training script, if it can be imported."""
    paths: tuple[str, ...] | list[str] = ()
    """Folders from which the training script imports modules."""
    additive = True
    """The framework splits the batch in any case: it accumulates gradients."""
    _parts: dict[str, Any] | None = None

    def import_ahead(self) -> None:
        """Import the modules that the model needs."""
        self._load()

    def _load(self) -> dict[str, Any]:
        data = (Path(self.file).parent / MODEL_FILE).read_bytes()
        sys.path += [path for path in self.paths if path not in sys.path]
        parts: dict[str, Any] = _ScriptUnpickler(io.BytesIO(data), self.script).load()
        return parts

    @property
    def _step(self) -> dict[str, Any]:
        """All but the model, which is built again each time."""
        if self._parts is None:
            with torch.device("meta"):
                self._parts = {key: value for key, value in self._load().items() if key != "model"}
        return self._parts

    def model(self) -> Any:
        """Build the modules, with tensors on the default device."""
        built = self._load()["model"]
        built.train()
        return built

    def batch(self, size: int) -> Any:
        """Return zeros in the shapes of the recorded batch."""
        return make_batch(self._step["batch"], size)

    def loss(self, model: Any, batch: Any) -> Any:
        """Return the loss as the training script computes it."""
        step = self._step
        if step["loss"] is not None:
            return step["loss"](model, batch)
        if step["method"]:
            function = getattr(model, step["method"])
            output = (
                function(batch, 0) if len(inspect.signature(function).parameters) > 1 else function(batch)
            )
        else:
            output = model(**batch) if isinstance(batch, dict) else model(batch)
        return read_loss(output)

    def optimizer(self, params: Any) -> Any:
        """Return the optimizer of the training script, or AdamW."""
        made = self._step["optimizer"]
        if made is None:
            return torch.optim.AdamW(params, lr=1e-4)
        cls, options = made
        return cls(params, **keep_accepted(cls, options))


def keep_accepted(cls: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the constructor of an optimizer takes.

    The `defaults` of a live optimizer can hold more: AdamW stores `decoupled_weight_decay` there.
    """
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def read_loss(output: Any) -> Any:
    """Return the loss in what a model or a training step returned."""
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list):
        return output[0]
    return loss


def is_importable_script(text: str) -> bool:
    """Return whether importing a script only defines things: training is in a main guard or a function.

    >>> is_importable_script("import os; rate = 0.1")
    True
    >>> is_importable_script("model = build(); train(model)")
    False
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return all(_only_defines(node) for node in tree.body)


def _only_defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Assign | ast.AnnAssign):
        # A call may build a model or read data, so only values that cost nothing are allowed.
        value = node.value
        return value is None or not any(isinstance(part, ast.Call) for part in ast.walk(value))
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        names = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
        return bool(names & {"__name__", "TYPE_CHECKING"})
    return False


def _main_script() -> str:
    file = getattr(sys.modules.get(MAIN), "__file__", None)
    return str(Path(file).absolute()) if file else ""


def _why_not_importable() -> str:
    """Return why a class of the training script cannot be imported in another process; empty if it can."""
    file = _main_script()
    if not file:
        return "it is defined in an interactive session"
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return f"{file} cannot be read"
    if is_importable_script(text):
        return ""
    return f"{Path(file).name} trains when it is imported"


class _ScriptUnpickler(pickle.Unpickler):
    """Loads the classes of the training script from its file, without running its main guard."""

    def __init__(self, stream: io.BytesIO, script: str) -> None:
        super().__init__(stream)
        self._script = script

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function by name."""
        if module != MAIN:
            return super().find_class(module, name)
        if MAIN_COPY not in sys.modules:
            from importlib.util import module_from_spec, spec_from_file_location

            spec = spec_from_file_location(MAIN_COPY, self._script)
            assert spec is not None  # noqa: S101 - a .py file has a loader
            assert spec.loader is not None  # noqa: S101
            loaded = module_from_spec(spec)
            sys.modules[MAIN_COPY] = loaded
            sys.path.insert(0, str(Path(self._script).parent))
            spec.loader.exec_module(loaded)
        return super().find_class(MAIN_COPY, name)


def _make_tensor(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_(requires_grad)


def _make_parameter(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=requires_grad)


def _make_device() -> torch.device:
    return torch.get_default_device()


class _WeightlessPickler(pickle.Pickler):
    """Pickles modules with shapes in place of tensors, and notes what it leaves out."""

    def __init__(self, stream: io.BytesIO, notes: list[str]) -> None:
        super().__init__(stream)
        self._notes = notes

    def reducer_override(self, value: Any) -> Any:
        """Reduce tensors, devices and modules in our own way; leave the rest to pickle."""
        if isinstance(value, torch.Tensor):
            return self._reduce_tensor(value)
        if isinstance(value, torch.device):
            return _make_device, ()
        if isinstance(value, nn.Module):
            return self._reduce_module(value)
        if isinstance(value, type) or callable(value):
            why = _why_not_importable() if getattr(value, "__module__", "") == MAIN else ""
            if why and hasattr(value, "__qualname__"):
                raise CannotFollow(
                    f"{value.__qualname__} of the training script",
                    found=f"another process cannot import it: {why}",
                    cure="Move it to a module, or put the training under if __name__ == '__main__'.",
                )
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in PLAIN_TENSORS:
            raise CannotFollow(
                "the live model",
                found=f"it has weights of the type {type(tensor).__name__}, which is not predicted yet",
                cure="Describe the training as a job (docs/jobs.md) to get a prediction.",
            )
        make = _make_parameter if isinstance(tensor, nn.Parameter) else _make_tensor
        trained = tensor.requires_grad and tensor.is_leaf
        return make, (tuple(tensor.shape), tensor.dtype, trained)

    def _reduce_module(self, module: nn.Module) -> Any:
        reduced: Any = module.__reduce_ex__(4)
        state = dict(reduced[2]) if isinstance(reduced[2], dict) else reduced[2]
        if isinstance(state, dict):
            if callable(state.get("forward")):
                for name in WRAPPED:
                    state.pop(name, None)
            for name in HOOKS:
                state[name] = self._keep_hooks(module, state.get(name))
        return (*reduced[:2], state, *reduced[3:])

    def _keep_hooks(self, module: nn.Module, hooks: Any) -> Any:
        """Leave out hooks that are no functions of a module: another process cannot import them."""
        if not hooks:
            return hooks
        kept = {key: hook for key, hook in hooks.items() if not _is_local(hook)}
        if len(kept) < len(hooks):
            self._notes.append(f"a hook on {type(module).__name__} is left out of the prediction")
        return type(hooks)(kept)


def _is_local(hook: Any) -> bool:
    name = getattr(hook, "__qualname__", "")
    return "<" in name or (not isinstance(hook, bool | type) and getattr(hook, "__module__", "") == MAIN)


def _pickle_parts(parts: LiveParts, notes: list[str]) -> bytes:
    stream = io.BytesIO()
    content = {
        "model": parts.model,
        "batch": describe_batch(parts.batch, parts.samples),
        "method": parts.method,
        "loss": parts.loss,
        "optimizer": parts.optimizer,
    }
    try:
        _WeightlessPickler(stream, notes).dump(content)
    except CannotFollow:
        raise
    except Exception as error:
        text = str(error).strip().split("\n")[0][:200]
        raise CannotFollow(
            f"the live model {type(parts.model).__name__}",
            found=f"it cannot be rebuilt in another process: {type(error).__name__}: {text}",
            cure="Describe the training as a job (docs/jobs.md) to get a prediction.",
        ) from error
    return stream.getvalue()
