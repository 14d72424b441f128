"""Find what makes compiled fp8 layers lose another amount than uncompiled ones: same weights, same batch.

    python bench/float8_losses.py --precision fp8-tensorwise

On an H200 (torch 2.11) losses of compiled fp8 runs fell much less than in eager mode: a cast to the same
dtype at the end of an autograd function made all gradients 0. engine/float8.py avoids it, and losses agree.
Each variant here switches one part of the compiler off. For each, the script prints a line of JSON:
the losses of some steps, and the parameters whose first gradient differs most from that of eager mode.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from bench.fit_jobs import Decoder

from trimtab.engine.step import prepare_job, run_step
from trimtab.jobs.load import load_job
from trimtab.spec import Precision, Setting

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("", {}),
    "graphs only": ("aot_eager", {}),
    "decompositions": ("aot_eager_decomp_partition", {}),
    "inductor": ("inductor", {}),
    "no mixed-order reductions": ("inductor", {"triton.mix_order_reduction": False}),
    "no split reductions": ("inductor", {"split_reductions": False}),
    "no padding": ("inductor", {"comprehensive_padding": False}),
    "casts as in eager mode": ("inductor", {"emulate_precision_casts": True}),
    "no tiles that transpose": ("inductor", {"triton.max_tiles": 1}),
    "no reuse of buffers": ("inductor", {"allow_buffer_reuse": False, "inplace_buffers": False}),
    "no fusion": ("inductor", {"max_fusion_size": 1}),
}
"""Name of a variant: the backend of torch.compile (empty: none), and options of inductor."""
WORST = 5
"""Parameters that are printed."""


def compare(
    precision: Precision, sizes: dict[str, int], device: str, steps: int, only: list[str]
) -> list[dict[str, Any]]:
    """Return a line for each variant: losses, and the largest relative differences of first gradients."""
    lines: list[dict[str, Any]] = []
    expected: dict[str, torch.Tensor] = {}
    for name, (backend, options) in VARIANTS.items():
        if name != "eager" and only and name not in only:
            continue
        missing = [option for option in options if not _has_option(option)]
        if missing:
            lines.append({"variant": name, "skipped": f"this torch has no {', '.join(missing)}"})
            continue
        torch._dynamo.reset()  # noqa: SLF001 - the documented way to forget what was compiled
        job: Any = load_job(f"bench/fit_jobs.py:{Decoder.__name__}", sizes)
        torch.manual_seed(0)
        setting = Setting(micro_batch=4, global_batch=4, precision=precision)
        state = prepare_job(job, setting, device)
        if backend:
            given = {"options": options} if options else {}
            state.model.compile(backend=backend, dynamic=False, **given)
        torch.manual_seed(1)
        batch = {key: value.to(device) for key, value in job.batch(4).items()}
        gradients = _first_gradients(state.model, job, batch, precision, device)
        expected = expected or gradients
        differences = {key: _distance(gradients[key], expected[key]) for key in gradients}
        worst = sorted(differences, key=lambda key: -differences[key])[:WORST]
        losses = [round(float(run_step(state, [batch])), 4) for _ in range(steps)]
        lines.append(
            {
                "variant": name,
                "losses": losses,
                "gradients": {key: round(differences[key], 4) for key in worst},
            }
        )
        print(json.dumps(lines[-1]), flush=True)
    return lines


def _has_option(name: str) -> bool:
    from torch._inductor import config

    return name in config._config  # type: ignore[attr-defined]  # noqa: SLF001 - there is no other list


def _first_gradients(
    model: torch.nn.Module, job: Any, batch: Any, precision: Precision, device: str
) -> dict[str, torch.Tensor]:
    kind = torch.device(device).type
    with torch.autocast(kind, getattr(torch, str(precision.dtypes.autocast))):
        loss = job.loss(model, batch)
    loss.backward()
    found = {
        name: parameter.grad.detach().float().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return found


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def main() -> None:
    """Compare the variants on the GPU, or on the CPU if there is none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", default="fp8-tensorwise")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--only", default="", help="names of variants, separated by commas")
    options = parser.parse_args()
    sizes = {"layers": options.layers, "vocabulary": 32_000, "seq": 512}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    only = [name for name in options.only.split(",") if name]
    compare(Precision(options.precision), sizes, device, options.steps, only)


if __name__ == "__main__":
    main()
