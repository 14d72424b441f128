"""Say which settings cannot be combined with tensor parallelism, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.errors import WrongUse
from trimtab.spec import LossForm, OptimizerRule
from trimtab.strategies import strategy_of

if TYPE_CHECKING:
    from trimtab.spec import Setting


def refuse_tensor_split(setting: Setting) -> None:
    """Raise WrongUse if a setting cannot be combined with tensor parallelism."""
    if setting.mesh.tp == 1:
        return
    refusal = strategy_of(setting).tensor_refusal(setting.mesh.tp)
    if refusal is not None:
        raise WrongUse(
            f"strategy {setting.strategy} with tp {setting.mesh.tp}", found=refusal.found, cure=refusal.cure
        )
    options = {
        f"loss {setting.loss}": setting.loss is not LossForm.WHOLE,
        f"base {setting.base}": setting.base.storage.is_quantized,
        f"precision {setting.precision}": setting.dtypes.products_format is not None,
        f"offload {', '.join(setting.offload)}": bool(setting.offload),
        f"optimizer_rule {setting.optimizer_rule}": setting.optimizer_rule is not OptimizerRule.JOB,
        "optimizer_in_backward": setting.optimizer_in_backward,
        "sync_batchnorm": setting.sync_batchnorm,
        "compile": setting.compile,
    }
    refuse_combination(f"tp {setting.mesh.tp}", options)


def refuse_combination(split: str, options: dict[str, bool]) -> None:
    """Raise WrongUse if one of the options is used, none of which runs with a way to split the model."""
    option = next((name for name, is_used in options.items() if is_used), "")
    if option:
        raise WrongUse(
            f"{split} with {option}",
            found="trimtab does not run the two together",
            cure="Leave one of the two out.",
        )
