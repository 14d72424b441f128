"""Which parts of a job can be in host memory under which strategy, and what follows from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.errors import WrongUse
from trimtab.spec import Offload
from trimtab.strategies import strategy_of
from trimtab.strategies.base import Refusal, Wrapping

if TYPE_CHECKING:
    from trimtab.spec import Setting
    from trimtab.strategies.base import ParallelStrategy

TOGETHER = (
    "offload params: FSDP2 moves weights, gradients and optimizer states together, so the optimizer runs on "
    "the CPU too"
)


def has_offloaded_state(setting: Setting) -> bool:
    """Whether optimizer states, and perhaps weights, are in host memory."""
    return Offload.PARAMS in setting.offload or Offload.OPTIMIZER in setting.offload


def runs_host_optimizer(setting: Setting) -> bool:
    """Whether the weights stay on the device and the optimizer runs on copies of them on the host."""
    return Offload.OPTIMIZER in setting.offload and not strategy_of(setting).is_sharded


def find_refusal(strategy: ParallelStrategy, gpus: int, offload: tuple[Offload, ...]) -> Refusal | None:
    """Return why a strategy cannot run with this offload; None if it can."""
    if Offload.PARAMS not in offload and Offload.OPTIMIZER not in offload:
        return None
    if strategy.is_sharded:
        together = Refusal(
            "FSDP2 moves weights, gradients and optimizer states to the host together",
            "Use --offload params,optimizer.",
        )
        return None if Offload.PARAMS in offload else together
    if Offload.PARAMS in offload:
        return Refusal(
            "only shards of weights can be on the host, and this strategy has whole weights",
            "Use --offload optimizer, or strategy fsdp on several GPUs.",
        )
    if strategy.wrapping is not Wrapping.WHOLE:
        return Refusal(
            "its ranks hold different parts of the model, and trimtab does not move those to the host",
            "Use --strategy fsdp --offload params,optimizer, or one GPU.",
        )
    if gpus > 1:
        return Refusal(
            "every rank has the whole model, so the host would hold all optimizer states once for each GPU, "
            "and each CPU update would repeat the same work",
            "Use --strategy fsdp --offload params,optimizer, where each rank holds a shard; or one GPU.",
        )
    return None


def refuse_state_offload(setting: Setting) -> None:
    """Raise if a setting offloads weights or optimizer states in a way that trimtab does not run."""
    if not has_offloaded_state(setting):
        return
    strategy = strategy_of(setting)
    refusal = find_refusal(strategy, setting.gpus, setting.offload)
    if refusal is not None:
        given = f"--offload {','.join(setting.offload)} with strategy {strategy.word}"
        raise WrongUse(given, found=refusal.found, cure=refusal.cure)
    library = setting.optimizer_rule.stored.library
    if library not in {"", "torch"}:
        raise WrongUse(
            f"--offload {','.join(setting.offload)} with --optimizer {setting.optimizer_rule}",
            found=f"the optimizer would run on the CPU, and that of {library} runs on a GPU",
            cure="Use an optimizer of torch, such as adamw, or leave --offload out.",
        )
