"""The job bridge at full size (15 billion frozen parameters) beside the step that one would write first.

    python bench/bridge.py plan        plans for cards of 80 and 40 GiB; needs no GPU
    python bench/bridge.py losses      all losses, K = 4: the plain step and ours, on the same samples
    python bench/bridge.py forced      the teacher-forced loss alone, 256 tokens, batch 16
    python bench/bridge.py caps        a global batch of 64 under a cap of 80 GiB and of 40 GiB, as planned

The plain step runs 2 + 2K forward passes a model and keeps their graphs for one backward pass, has all logits
in fp32, and those of the teacher for the whole text. Results: bridge.json.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import trimtab
from trimtab.jobs.options import set_options
from trimtab.spec import Cluster, Plan

HERE = Path(__file__).parent
PLANS, RESULTS = HERE / "bridge_plans.json", HERE / "bridge.json"
GIB = 2**30
EVERYTHING: dict[str, Any] = {"first_weight": 0.5, "ahead": 4, "teacher": True}
TRIED = (16, 14, 12, 8, 4)
"""Batches of the plain step, until one fits."""
CAPS_GIB = (80, 40)
WARM, TIMED = 2, 5
TEACHER_ROWS = 4
"""Samples that the plain step's teacher reads at once."""
CALIBRATED_ROWS = 65_536
"""Words whose size the plain step looks at, every step."""


# ------------------------------------------------------------------------------------------ the plain step


def plain_losses(model: Any, batch: dict[str, Any], *, calibrate: bool = False) -> dict[str, torch.Tensor]:
    """What BridgeModel.forward returns, with a forward pass for every token that counts once more.

    `calibrate` looks at the size of words in every step, as the plain step does, and changes nothing else.
    """
    latents = model.encoder(batch["source"], batch["source_length"])
    if model.refiner is not None:
        latents = model.refiner(latents)
    return {
        name: _plain(model, name, latents, batch["answers"][name], calibrate=calibrate)
        for name in model.job.branches
    }


def _plain(model: Any, name: str, latents: Any, answer: Any, *, calibrate: bool) -> torch.Tensor:
    job, decoder = model.job, getattr(model, name)
    ids, length = answer["ids"], answer["length"]
    words = decoder.get_input_embeddings()
    share = (length / ids.size(1)).to(latents.dtype)
    prefix = model.adapters[name](latents, share).to(words.weight.dtype)
    if calibrate:
        some = words.weight[torch.randperm(words.weight.size(0), device=ids.device)[:CALIBRATED_ROWS]].float()
        prefix = prefix + 0 * some.square().mean().sqrt().to(prefix.dtype)

    def said(count: int) -> torch.Tensor:
        """Logits in fp32 of every position, after the prefix and so many tokens."""
        text = torch.cat([prefix, words(ids[:, :count])], dim=1)
        logits: torch.Tensor = decoder(inputs_embeds=text, use_cache=False).logits
        return logits.to(_wide(prefix.dtype))

    own = torch.arange(ids.size(1), device=ids.device) < length[:, None]
    total: Any = 0.0
    if job.forced_weight:
        logits = said(ids.size(1) - 1)[:, prefix.size(1) - 1 :]
        each = functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)
        total = total + job.forced_weight * ((each * own).sum(1) / length).mean()
    if job.first_weight:
        total = total + job.first_weight * functional.cross_entropy(said(0)[:, -1], ids[:, 0])
    early = own[:, : job.ahead].to(_wide(prefix.dtype))
    early = early / early.sum(1, keepdim=True)
    for step in range(job.ahead if job.ahead_weight else 0):
        each = functional.cross_entropy(said(step)[:, -1], ids[:, step], reduction="none")
        total = total + job.ahead_weight * (each * early[:, step]).mean()
    if job.teacher:
        taught = _plain_teacher(job, decoder, answer)
        for step in range(job.ahead):
            pupil = functional.log_softmax(said(step)[:, -1] / job.temperature, dim=-1)
            right = functional.log_softmax(taught[:, job.prompt - 1 + step] / job.temperature, dim=-1)
            far = functional.kl_div(pupil, right, reduction="none", log_target=True).sum(-1)
            total = total + job.teacher_weight * job.temperature**2 * (far * early[:, step]).mean()
    found: torch.Tensor = total
    return found


@torch.no_grad()
def _plain_teacher(job: Any, decoder: Any, answer: Any) -> torch.Tensor:
    """Logits in fp32 of all positions of the text and of the tokens after it."""
    text = torch.cat([answer["prompt"], answer["ids"][:, : job.ahead]], dim=1)
    parts = [decoder(input_ids=some, use_cache=False).logits for some in torch.split(text, TEACHER_ROWS)]
    return torch.cat([part.to(_wide(part.dtype)) for part in parts])


def _wide(kind: torch.dtype) -> torch.dtype:
    return torch.promote_types(kind, torch.float32)


# ---------------------------------------------------------------------------------------------- measuring


def fresh() -> None:
    """Give back what can be given back."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def built() -> tuple[Any, Any, Any]:
    """The job, its model on the GPU with random weights, and the optimizer over what learns."""
    begin = time.perf_counter()
    job = trimtab.load("bridge")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = job.model()
    trained = list(learning(model).values())
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)
    for one in trained:
        one.grad = torch.zeros_like(one)
    # A step of nothing, so that the optimizer's state is there before anything is measured.
    optimizer.step()
    say(f"built in {time.perf_counter() - begin:.1f} s, {torch.cuda.memory_allocated() / GIB:.2f} GiB")
    return job, model, optimizer


def batch_of(job: Any, size: int) -> Any:
    """The same samples for every step that is compared."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        return job.batch(size)


def compile_layers(model: Any) -> None:
    """Every layer compiled by itself: equal layers share one compiled program."""
    for name in model.job.branches:
        for layer in getattr(model, name).get_decoder().layers:
            layer.compile(dynamic=False)


def as_written(model: Any) -> None:
    """Layers without their compiled programs."""
    for name in model.job.branches:
        for layer in getattr(model, name).get_decoder().layers:
            layer._compiled_call_impl = None  # noqa: SLF001 - what Module.compile() sets


def measured(model: Any, optimizer: Any, batch: Any, losses: Any) -> Any:
    """Seconds, memory and loss of a step; None where it does not fit."""
    size = batch["source"].size(0)
    optimizer.zero_grad(set_to_none=True)
    fresh()
    held = torch.cuda.memory_allocated()
    times, value = [], 0.0
    try:
        for number in range(WARM + TIMED):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = sum(losses(model, batch).values())
            loss.backward()
            if number == 0:
                value = float(loss.detach())
            del loss
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    except torch.OutOfMemoryError:
        times = []
    if not times:
        # Here, and not where the error still holds what the failed pass left behind.
        optimizer.zero_grad(set_to_none=True)
        fresh()
        return None
    step_s = statistics.median(times[WARM:])
    peak = torch.cuda.max_memory_allocated()
    return {
        "batch": size,
        "step_s": step_s,
        "first_s": times[0],
        "samples_per_s": size / step_s,
        "allocated_bytes": peak,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "bytes_per_item": (peak - held) / size,
        "first_loss": value,
    }


def say(text: str) -> None:
    """Now, not when it ends."""
    print(text, flush=True)


def shown(name: str, run: Any) -> None:
    """One line a run."""
    if run is None:
        say(f"  {name}: out of memory")
        return
    memory = f"{run['allocated_bytes'] / GIB:.2f} GiB ({run['bytes_per_item'] / GIB:.3f} an item)"
    say(
        f"  {name}: batch {run['batch']}, {run['step_s'] * 1e3:.1f} ms, {run['samples_per_s']:.2f} a second, "
        f"{memory}, first step {run['first_s']:.1f} s, loss {run['first_loss']:.4f}"
    )


def compared(
    parts: tuple[Any, Any, Any], options: dict[str, Any], tried: tuple[int, ...], larger: tuple[int, ...]
) -> dict[str, Any]:
    """The plain step at the largest batch that it can take, ours at that one and at larger ones."""
    job, model, optimizer = parts
    before = {name: getattr(job, name) for name in (*options, "sequential")}
    set_options(job, options)
    state = {name: value.detach().clone() for name, value in learning(model).items()}

    def run(name: str, size: int, losses: Any) -> Any:
        found = measured(model, optimizer, batch_of(job, size), losses)
        shown(name, found)
        # Every run begins with the same weights, so that first losses can be compared.
        with torch.no_grad():
            for key, value in learning(model).items():
                value.copy_(state[key])
        return found

    found: dict[str, Any] = {"options": options}
    for size in tried:
        found["plain"] = run("plain", size, lambda model, batch: plain_losses(model, batch, calibrate=True))
        if found["plain"] is not None:
            break
    else:
        return found
    found["eager"] = run("ours, eager", size, job.losses)
    job.sequential = True
    found["sequential"] = run("ours, eager, sequential", size, job.losses)
    job.sequential = False
    compile_layers(model)
    found["compiled"] = run("ours, layers compiled", size, job.losses)
    found["larger"] = [run("ours, layers compiled", number, job.losses) for number in larger]
    as_written(model)
    set_options(job, before)
    plain, ours = found["plain"], found["compiled"]
    if ours is not None:
        best = max([ours, *filter(None, found["larger"])], key=lambda one: one["samples_per_s"])
        found["times_the_speed"] = ours["samples_per_s"] / plain["samples_per_s"]
        found["times_the_speed_at_best"] = best["samples_per_s"] / plain["samples_per_s"]
        found["share_of_memory_per_item"] = ours["bytes_per_item"] / plain["bytes_per_item"]
        say(
            f"  {found['times_the_speed']:.2f}x at the same batch, "
            f"{found['times_the_speed_at_best']:.2f}x at best, "
            f"{found['share_of_memory_per_item']:.2f} of the memory an item"
        )
    return found


def learning(model: Any) -> dict[str, Any]:
    """What learns, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def losses(parts: tuple[Any, Any, Any]) -> dict[str, Any]:
    """All losses, K = 4: answers of 224 tokens, and of 32 as in the original."""
    found: dict[str, Any] = {}
    for answer, larger in ((224, 48), (32, 64)):
        say(f"answers of {answer}")
        found[f"answers of {answer}"] = compared(parts, {**EVERYTHING, "answer": answer}, TRIED, (larger,))
    return found


def forced(parts: tuple[Any, Any, Any]) -> dict[str, Any]:
    """The teacher-forced loss alone."""
    return compared(parts, {}, (16,), ())


# --------------------------------------------------------------------------------------------------- caps


def capped(gib: int) -> Cluster:
    """An H200 with that much memory."""
    where = trimtab.cluster("H200")
    node = where.nodes[0]
    card = node.devices[0].replace(memory_bytes=gib * GIB)
    return where.replace(nodes=(node.replace(devices=(card,)),))


def plan() -> None:
    """Plans for capped cards. Not compiled: two decoders as one program take many minutes to compile."""
    found = {}
    for gib in CAPS_GIB:
        made = trimtab.plan("bridge", capped(gib), pins=["compile=false"])
        say(f"{gib} GiB: {made.choice}")
        found[str(gib)] = made.to_builtins()
    PLANS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def caps() -> dict[str, Any]:
    """A global batch of 64 under each cap, as planned, by the machinery of `trimtab train`."""
    found = {}
    total = torch.cuda.get_device_properties(0).total_memory
    for gib in CAPS_GIB:
        fresh()
        planned = Plan.from_builtins(json.loads(PLANS.read_text(encoding="utf-8"))[str(gib)])
        choice, estimate = planned.choice, planned.estimate
        # A card of that size has to hold the context too.
        torch.cuda.set_per_process_memory_fraction((gib * GIB - estimate.parts.context) / total)
        say(f"{gib} GiB: {choice.micro_batch} x {choice.accumulation}, recompute {choice.recompute}")
        job = trimtab.load("bridge")
        times = []
        torch.manual_seed(0)
        with trimtab.Run(planned, job=job) as run:
            run.prepare()
            samples = job.dataset()
            for step in range(4):
                items = [samples[step * 64 + number] for number in range(64)]
                torch.cuda.synchronize()
                begin = time.perf_counter()
                outcome = run.step(torch.utils.data.default_collate(items))
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
                say(f"  step {step}: loss {outcome.loss:.3f}, {times[-1]:.2f} s, {outcome.attempts} attempts")
        step_s = statistics.median(times[1:])
        found[str(gib)] = {
            "micro_batch": outcome.micro_batch,
            "recompute": str(choice.recompute),
            "attempts": outcome.attempts,
            "samples": outcome.samples,
            "samples_per_s": 64 / step_s,
            "planned_samples_per_s": estimate.samples_per_s,
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "planned_allocated_bytes": estimate.allocated_bytes,
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "planned_reserved_bytes": estimate.reserved_bytes,
        }
        say(f"  {json.dumps(found[str(gib)])}")
        del run
    torch.cuda.set_per_process_memory_fraction(1.0)
    return found


def main(verbs: list[str]) -> None:
    """Run what is asked for, and keep what was found."""
    if "plan" in verbs:
        plan()
        return
    file = Path(os.environ.get("OUT", HERE)) / RESULTS.name
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "date": datetime.now(UTC).date().isoformat(),
    }
    # One layer compiles once a size and pass; the default limit is lower than that.
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - the only name that it has
    compare = {"forced": forced, "losses": losses}
    parts: Any = built() if compare.keys() & set(verbs) else None
    # Caps come last: they need the memory.
    for verb in sorted(verbs, key=lambda verb: verb not in compare):
        say(verb)
        begin = time.perf_counter()
        if verb in compare:
            found[verb] = compare[verb](parts)
        else:
            parts = None
            found[verb] = caps()
        found[verb]["took_s"] = time.perf_counter() - begin
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        say(f"{verb} took {found[verb]['took_s']:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:] or ["forced", "losses", "caps"])
