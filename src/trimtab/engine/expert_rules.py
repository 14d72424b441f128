"""Say which settings cannot be combined with expert parallelism, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.engine.tensor_rules import refuse_combination
from trimtab.errors import WrongUse
from trimtab.spec import OptimizerRule
from trimtab.strategies import strategy_of

if TYPE_CHECKING:
    from trimtab.spec import Setting


def refuse_expert_split(setting: Setting) -> None:
    """Raise WrongUse if a setting cannot be combined with expert parallelism."""
    ep = setting.mesh.ep
    if ep == 1:
        return
    refusal = strategy_of(setting).expert_refusal(ep)
    if refusal is not None:
        raise WrongUse(f"strategy {setting.strategy} with ep {ep}", found=refusal.found, cure=refusal.cure)
    options = {
        f"base {setting.base}": setting.base.storage.is_quantized,
        f"precision {setting.precision}": setting.dtypes.products_format is not None,
        f"offload {', '.join(setting.offload)}": bool(setting.offload),
        f"optimizer_rule {setting.optimizer_rule}": setting.optimizer_rule is not OptimizerRule.JOB,
        "sync_batchnorm": setting.sync_batchnorm,
        "compile": setting.compile,
    }
    refuse_combination(f"ep {ep}", options)
