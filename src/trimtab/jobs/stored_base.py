"""Read in which format a Hugging Face folder stores its frozen weights, from `quantization_config`.

Only config.json is read, without torch: bitsandbytes' formats are known, others are refused with a reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trimtab.errors import WrongUse
from trimtab.jobs.registry import FOLDER
from trimtab.spec import BaseFormat

WHY_NOT = {
    "gptq": "GPTQ rounds weights to whole numbers in groups, with scales and zero points",
    "awq": "AWQ rounds weights to whole numbers in groups, with scales and zero points",
    "fp8": "weights are stored in 8-bit floating point, for inference",
    "fbgemm_fp8": "weights are stored in 8-bit floating point, for inference",
    "compressed-tensors": "weights are stored in formats of compressed-tensors, for inference",
    "mxfp4": "experts are stored in MXFP4, for inference",
    "hqq": "HQQ stores weights in groups, with scales and zero points",
}
"""Methods that transformers loads and trimtab does not compute with."""


def read_base_format(quantization: Any, given: str) -> BaseFormat:
    """Return the format that a `quantization_config` of config.json stands for; raise if it is not known.

    >>> read_base_format({"quant_method": "bitsandbytes", "load_in_4bit": True}, "job hf:x").value
    'fp4'
    >>> read_base_format({"load_in_8bit": True}, "job hf:x").value
    'int8'
    """
    cure = "Take that entry out of config.json to see the model unquantized; --base nf4 stores it in 4 bits."
    if not isinstance(quantization, dict):
        raise WrongUse(given, found="quantization_config in config.json is no table", cure=cure)
    method = str(quantization.get("quant_method") or "bitsandbytes").lower()
    if not method.startswith("bitsandbytes"):
        why = WHY_NOT.get(method, "only formats of bitsandbytes are known here")
        raise WrongUse(
            given, found=f"config.json has a quantization_config of the method {method}: {why}", cure=cure
        )
    if quantization.get("load_in_4bit") or quantization.get("_load_in_4bit"):
        double = "-double" * bool(quantization.get("bnb_4bit_use_double_quant"))
        kind = quantization.get("bnb_4bit_quant_type", "fp4")
        known = [member for member in BaseFormat if member.value == f"{kind}{double}"]
        if known:
            return known[0]
        raise WrongUse(
            given, found=f"config.json has bnb_4bit_quant_type {kind!r}, and nf4 and fp4 are known", cure=cure
        )
    if quantization.get("load_in_8bit") or quantization.get("_load_in_8bit"):
        return BaseFormat.INT8
    raise WrongUse(
        given,
        found="quantization_config in config.json has neither load_in_4bit nor load_in_8bit",
        cure=cure,
    )


def find_stored_base(name: str) -> BaseFormat:
    """Return the format in which a job of the form hf:FOLDER stores its weights; `none` for other jobs.

    What is wrong with the folder is for the job itself to say.
    """
    if not name.startswith(FOLDER):
        return BaseFormat.NONE
    file = Path(name.removeprefix(FOLDER)) / "config.json"
    try:
        text = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return BaseFormat.NONE
    quantization = text.get("quantization_config") if isinstance(text, dict) else None
    return read_base_format(quantization, f"job {name}") if quantization else BaseFormat.NONE
