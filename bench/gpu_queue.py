"""Measurements that need a GPU: a list of cases, run one process a case, most informative first.

    python bench/gpu_queue.py list                      what there is to measure
    python bench/gpu_queue.py run [--out FILE] [--seconds N] [--workers N] [--only PATTERNS] [--packages DIR]
    python bench/gpu_queue.py predict [--predictions FILE] [--workers N] [--only PATTERN]     needs no GPU
    python bench/gpu_queue.py compare [--out FILE] [--predictions FILE] [--only PATTERN]

`compare` prints errors. "step_s with its host" is the error of the step with the speed of the host that was
measured beside it; without that, a usual host is assumed.

`run` appends one line of JSON a case to FILE (default bench/gpu_results.jsonl), with the hardware and the
versions it was measured on, and skips cases that the file has already. Processes import and compile side by
side; a lock lets one of them at a time use the GPU for what is timed. A setting of several GPUs is measured
as rank 0 of a fake process group: collectives move nothing, all else is what a rank does.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]

from trimtab.spec import (  # noqa: E402
    BaseFormat,
    LossForm,
    Mesh,
    OptimizerImplementation,
    OptimizerRule,
    Precision,
    Recompute,
    Schedule,
    Setting,
    Strategy,
)
from trimtab.spec.setting import read_offload  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.zoo import Entry

RESULTS = HERE / "gpu_results.jsonl"
PREDICTIONS = HERE / "gpu_predictions.jsonl"
LOCK = Path(tempfile.gettempdir()) / "trimtab-gpu-queue.lock"
CASE_S, COMPILED_S, CAP_S = 120.0, 400.0, 400.0
"""Seconds after which a case is given up."""
DEVICE = "H200"
EXPERTS = "bench/rank_jobs.py:Experts"
SPREAD = "bench/rank_jobs.py:SpreadExperts"
MANY = "bench/rank_jobs.py:ManyExperts"
LLAMA_70B = {"layers": 80, "width": 8192, "ff": 28672, "heads": 64}


@dataclass(frozen=True)
class QueuedCase:
    """One measurement."""

    id: str
    job: str
    """As on the command line; without a colon, a class of trimtab.exams.jobs."""
    micro_batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    strategy: str = "single"
    gpus: int = 1
    precision: str = "bf16"
    recompute: str = "none"
    optimizer: str = "fused"
    compile: bool = False
    nodes: int = 1
    """Under hsdp, how many copies of the shards there are."""
    sync_batchnorm: bool = False
    base: str = "none"
    rule: str = "job"
    """The optimizer."""
    loss: str = "whole"
    offload: str = "none"
    in_backward: bool = False
    """Whether weights are updated in the backward pass."""
    tp: int = 1
    """Tensor-parallel ranks; `gpus` counts them too."""
    ep: int = 1
    """Ranks with different experts, among those with shards."""
    imbalance: float = 1.0
    """Tokens of this rank over those of the mean rank, with experts on different ranks."""
    stage: int = 0
    """Of a pipeline with a stage a GPU, the rank that is measured."""
    accumulation: int = 1
    schedule: str = "1f1b"
    kind: str = "step"
    """step: memory and time of optimizer steps; cap: the smallest memory limit at which a case runs;
    framework: a training with another framework and our callback, where `job` names the framework;
    losses: compiled fp8 against eager fp8, where `job` names the variant; host: what single layers cost the
    host (bench/host_ops.py)."""

    @property
    def job_name(self) -> str:
        """The job as it is loaded."""
        return self.job if ":" in self.job else f"trimtab.exams.jobs:{self.job}"

    @property
    def setting(self) -> Setting:
        """The setting of every rank."""
        strategy = Strategy(self.strategy)
        meshes = {
            Strategy.SINGLE: {},
            Strategy.DDP: {"dp_replicate": self.gpus},
            Strategy.FSDP: {"dp_shard": self.gpus // self.tp},
            Strategy.HSDP: {"dp_replicate": self.nodes, "dp_shard": self.gpus // self.nodes // self.tp},
            Strategy.PIPELINE: {"pp": self.gpus},
        }
        sizes: dict[str, Any] = meshes[strategy] | {"tp": self.tp, "ep": self.ep}
        mesh = Mesh(**sizes)
        return Setting(
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            global_batch=self.micro_batch * self.accumulation * mesh.data_parallel,
            schedule=Schedule(self.schedule),
            strategy=strategy,
            mesh=mesh,
            precision=Precision(self.precision),
            recompute=Recompute(self.recompute),
            optimizer=OptimizerImplementation(self.optimizer),
            compile=self.compile,
            sync_batchnorm=self.sync_batchnorm,
            base=BaseFormat(self.base),
            optimizer_rule=OptimizerRule(self.rule),
            loss=LossForm(self.loss),
            offload=read_offload(self.offload),
            optimizer_in_backward=self.in_backward,
            expert_imbalance=self.imbalance,
        )


def _stages() -> list[QueuedCase]:
    """One rank of a pipeline of 4, with all its micro-batches in flight; between ranks nothing is sent.

    The first stage holds the embedding, the last one the head.
    """
    llama: dict[str, Any] = {"layers": 16}
    return [
        *(
            QueuedCase(
                f"placed-stage{stage + 1}of4-llama8b16-b1",
                "Llama",
                1,
                llama,
                "pipeline",
                4,
                stage=stage,
                accumulation=8,
            )
            for stage in (0, 1, 3)
        ),
        QueuedCase(
            "placed-stage2of4-llama8b16-zero-bubble-b1",
            "Llama",
            1,
            llama,
            "pipeline",
            4,
            stage=1,
            accumulation=8,
            schedule="zero-bubble",
        ),
        QueuedCase(
            "placed-stage1of4-llama8b16-full-b4",
            "Llama",
            4,
            llama,
            "pipeline",
            4,
            recompute="full",
            accumulation=8,
        ),
    ]


def _tensor_ranks() -> list[QueuedCase]:
    """One rank of tensor parallelism; between ranks nothing is sent."""
    return [
        QueuedCase("tensor-tp8-8b4-b4", FIT, 4, FP8_8B, "fsdp", 8, tp=8),
        QueuedCase("tensor-tp8-8b4-full-b8", FIT, 8, FP8_8B, "fsdp", 8, recompute="full", tp=8),
        QueuedCase("tensor-tp2-8b4-b4", FIT, 4, FP8_8B, "fsdp", 2, tp=2),
        QueuedCase("tensor-tp4-fsdp16-8b4-b4", FIT, 4, FP8_8B, "fsdp", 64, tp=4),
        QueuedCase("tensor-tp2-1b8-true-b4", FIT, 4, FP8_1B, "fsdp", 2, "bf16-true", tp=2),
        QueuedCase("tensor-tp8-hsdp-8b4-b2", FIT, 2, FP8_8B, "hsdp", 64, nodes=2, tp=8),
        QueuedCase(
            "tensor-tp8-llama8b-full-b1", "Llama", 1, {"layers": 32}, "fsdp", 64, recompute="full", tp=8
        ),
    ]


def _expert_ranks() -> list[QueuedCase]:
    """One rank of expert parallelism; it gets the tokens of a stated imbalance, with any values."""
    few = {"layers": 4}
    return [
        QueuedCase("expert-ep8-mixtral4-b2", SPREAD, 2, few, "fsdp", 8, ep=8),
        QueuedCase("expert-ep8-mixtral4-full-b8", SPREAD, 8, few, "fsdp", 8, recompute="full", ep=8),
        QueuedCase("expert-ep8-fsdp64-mixtral4-b4", SPREAD, 4, few, "fsdp", 64, ep=8),
        QueuedCase(
            "expert-ep4-fsdp8-mixtral2-true-b4", SPREAD, 4, {"layers": 2}, "fsdp", 8, "bf16-true", ep=4
        ),
        QueuedCase("expert-ep8-hsdp-mixtral4-b2", SPREAD, 2, few, "hsdp", 16, nodes=2, ep=8),
        QueuedCase("expert-ep8-mixtral4-x2-b2", SPREAD, 2, few, "fsdp", 8, ep=8, imbalance=2.0),
        QueuedCase("expert-ep8-qwen30b4-b4", MANY, 4, few, "fsdp", 8, ep=8),
        QueuedCase("expert-ep8-qwen30b4-full-b8", MANY, 8, few, "fsdp", 8, recompute="full", ep=8),
        QueuedCase("expert-ep8-qwen30b4-x1.5-b4", MANY, 4, few, "fsdp", 8, ep=8, imbalance=1.5),
        QueuedCase("expert-tp2-ep8-qwen30b4-b4", MANY, 4, few, "fsdp", 8, tp=2, ep=8),
        QueuedCase(
            "expert-tp4-ep8-mixtral4-full-b8", SPREAD, 8, few, "fsdp", 8, recompute="full", tp=4, ep=8
        ),
    ]


def _ranks() -> list[QueuedCase]:
    """The engine as one rank of many: what `trimtab train` runs there."""
    llama = {"layers": 32}
    return [
        QueuedCase("rank-fsdp64-llama70b-full-b1", "Llama", 1, LLAMA_70B, "fsdp", 64, recompute="full"),
        QueuedCase("rank-fsdp8-llama8b-full-b2", "Llama", 2, llama, "fsdp", 8, recompute="full"),
        QueuedCase("rank-fsdp64-llama8b-b1", "Llama", 1, llama, "fsdp", 64),
        QueuedCase("rank-fsdp64-llama8b-full-b4", "Llama", 4, llama, "fsdp", 64, recompute="full"),
        QueuedCase("rank-hsdp16-llama8b-full-b2", "Llama", 2, llama, "hsdp", 16, recompute="full", nodes=2),
        QueuedCase("rank-fsdp8-llama8b-true-b2", "Llama", 2, llama, "fsdp", 8, "bf16-true", "full"),
        QueuedCase("fsdp8-llama8-bf16-b4", "Llama", 4, {"layers": 8}, "fsdp", 8),
        QueuedCase(
            "fsdp16-gpt-fp32-b8",
            "GPT",
            8,
            {"layers": 24, "width": 1024, "heads": 16},
            "fsdp",
            16,
            "fp32",
            optimizer="foreach",
        ),
        QueuedCase("fsdp8-lora-bf16-b8", "LoRA", 8, {}, "fsdp", 8),
        QueuedCase(
            "fsdp16-vit-bf16-b128",
            "ViT",
            128,
            {"width": 1280, "heads": 16, "layers": 16, "patch": 14},
            "fsdp",
            16,
        ),
        QueuedCase(
            "fsdp8-bert-bf16-full-b64",
            "Bert",
            64,
            {"layers": 24, "width": 1024, "heads": 16},
            "fsdp",
            8,
            recompute="full",
            optimizer="foreach",
        ),
        QueuedCase("ddp8-gpt-bf16-b16", "GPT", 16, {}, "ddp", 8),
        QueuedCase(
            "ddp4-resnet50-fp32-b128",
            "ResNet50",
            128,
            {"channels_last": True},
            "ddp",
            4,
            "fp32",
            optimizer="foreach",
        ),
        QueuedCase("rank-ddp8-llama4-b4", "Llama", 4, {}, "ddp", 8),
        QueuedCase("rank-ddp8-hfgpt2-b8", "HFGPT2", 8, {}, "ddp", 8),
        QueuedCase("rank-fsdp8-resnet50-b64", "ResNet50", 64, {}, "fsdp", 8),
        QueuedCase("rank-fsdp64-mixtral-full-b1", EXPERTS, 1, {"layers": 8}, "fsdp", 64, recompute="full"),
        QueuedCase("rank-fsdp64-mixtral-b2", EXPERTS, 2, {"layers": 4}, "fsdp", 64),
        *(
            QueuedCase(
                f"rank-{strategy}8-resnet50-sync-b{micro}",
                "ResNet50",
                micro,
                {},
                strategy,
                8,
                sync_batchnorm=True,
            )
            for strategy, micro in (("ddp", 64), ("ddp", 8), ("fsdp", 64))
        ),
    ]


def _scaled() -> list[QueuedCase]:
    """Loss scaling as the trainer does it."""
    return [
        QueuedCase("wave-fp16-b16", "Wave", 16, precision="fp16"),
        QueuedCase("hfgpt2-fp16-full-b16", "HFGPT2", 16, precision="fp16", recompute="full"),
        QueuedCase("vit-fp16-selective-b384", "ViT", 384, precision="fp16", recompute="selective"),
        QueuedCase("lstm-fp16-b128", "LSTM", 128, precision="fp16"),
        QueuedCase(
            "resnet50-full-fp16-b384",
            "ResNet50",
            384,
            {"channels_last": True},
            precision="fp16",
            recompute="full",
        ),
    ]


ZOO = [
    "mixtral",
    "unet3d",
    "video_resnet",
    "packed_lstm",
    "gru_decoder",
    "scripted_gpt",
    "graph_sparse",
    "window_attention",
    "deberta_v2",
    "modernbert",
    "bert",
    "swin",
    "t5",
    "qwen2_moe",
    "masked_experts",
    "sparse_embeddings",
    "gradient_penalty",
    "diffusion_unet",
    "graph_attention",
    "segformer",
    "clip",
    "whisper",
    "wav2vec2",
    "llama",
    "qwen3",
    "gemma3",
    "vit",
    "convnext",
    "resnet",
    "efficientnet",
    "gpt2",
    "nerf",
    "llava",
    "qwen2_vl",
    "gpt_oss",
    "deepseek_v3",
    "mamba2",
    "lfm2",
    "vq_vae",
    "detector",
    "metric_learning",
    "momentum_contrast",
    "nested_lists",
    "wavenet",
    "point_cloud",
    "normalizing_flow",
    "graph_scatter",
    "roberta",
    "bart",
    "blip",
    "hubert",
    "videomae",
    "upernet",
    "dpt",
    "glpn",
    "pvt_v2",
    "mobilevit",
    "vivit",
    "gan",
    "focalnet",
]
"""Models of bench/zoo.py, most informative first."""
COMPILED_ZOO = [
    "modernbert",
    "bert",
    "window_attention",
    "llama",
    "swin",
    "t5",
    "vit",
    "convnext",
    "clip",
    "gpt2",
    "diffusion_unet",
    "qwen3",
    "whisper",
    "gemma3",
    "nerf",
    "wavenet",
]
TIMED_ZOO = {
    "albert": 64, "ast": 16, "bart": 32, "bert": 256, "blip": 32, "bloom": 8, "clip": 256, "convnext": 256,
    "cvt": 64, "deberta_v2": 64, "deepseek_v3": 2, "detector": 16, "detr": 8, "diffusion_unet": 64,
    "dinov2": 128, "dpt": 16, "efficientnet": 64, "esm": 32, "falcon": 2, "focalnet": 128, "gan": 256,
    "gemma3": 4, "gpt2": 16, "gpt_oss": 1, "graph_attention": 8, "graph_scatter": 16, "gru_decoder": 256,
    "hiera": 64, "hubert": 16, "lfm2": 8, "llama": 4, "llava": 4, "longformer": 8, "mamba2": 4,
    "mask2former": 4, "metric_learning": 256, "mixtral": 2, "mobilenet_v2": 256, "modernbert": 32,
    "momentum_contrast": 128, "nerf": 16384, "normalizing_flow": 256, "opt": 16, "packed_lstm": 256,
    "patchtst": 256, "pegasus": 16, "phi3": 2, "point_cloud": 256, "pvt_v2": 256, "qwen3": 4,
    "qwen3_moe": 2, "regnet": 256, "resnet": 256, "roberta": 64, "scripted_gpt": 16, "segformer": 32,
    "siglip": 128, "sparse_embeddings": 16384, "swin": 256, "swinv2": 128, "t5": 32, "unet3d": 8,
    "upernet": 16, "video_resnet": 64, "videomae": 32, "vit": 256, "vivit": 4, "vq_vae": 256,
    "wav2vec2": 16, "wavenet": 32, "whisper": 16, "yolos": 8,
}  # fmt: skip
"""Models of bench/zoo.py whose steps are timed, with a micro-batch that keeps the GPU busy. Of the first,
third and so on, single operations were timed too (h200-zoo.json); the others only check."""
TIMED_COMPILED = (
    "bert", "convnext", "qwen3", "swin", "clip", "whisper", "t5", "diffusion_unet", "segformer", "opt", "esm",
    "gemma3",
)  # fmt: skip
BLIND_ZOO = {
    "actor_critic": 4096, "attention_unet": 16, "deformable_detr": 8, "diffusion_transformer": 128,
    "informer": 256, "levit": 256, "mamba": 8, "optical_flow": 8, "perceiver": 8,
    "poolformer": 128, "protein_pairs": 2, "recurrent_translation": 128, "source_separation": 8,
    "super_resolution": 32, "switch": 16, "table_transformer": 1024, "vocoder": 32, "wavlm": 16, "xlnet": 32,
}  # fmt: skip
"""Models that were predicted before anything of them was measured."""
BLIND_COMPILED = ("attention_unet", "diffusion_transformer", "poolformer", "table_transformer")
BLIND_LATER = {
    "linear_recurrence": 8, "latent_reader": 16, "two_towers": 256, "image_compressor": 16,
    "patch_mixer": 128, "dense_classifier": 64, "molecule": 512, "flow_operator": 32,
    "sequential_recommender": 128,
}  # fmt: skip
"""Models of bench/zoo_blind.py, predicted once with the rules that `BLIND_ZOO` had led to."""
BLIND_LATER_COMPILED = ("linear_recurrence", "patch_mixer", "two_towers", "dense_classifier")
BLIND_NEWEST = {
    "sentence_embedding": 64, "preference_pairs": 4, "grouped_policy": 8, "distilled_decoder": 4,
    "adapted_decoder": 4, "sorted_experts": 8, "sliding_window": 2, "masked_diffusion": 16,
    "delta_recurrence": 8, "sparse_dictionary": 16_384, "squeezed_depthwise": 192, "convnext_unet": 32,
    "neural_ode": 128, "residual_codec": 24, "forecast_stack": 1024, "force_field": 64,
}  # fmt: skip
"""Models of bench/zoo_newest.py, written and predicted before any of them was measured."""
BLIND_NEWEST_COMPILED = (
    "sentence_embedding", "grouped_policy", "adapted_decoder", "sliding_window", "sparse_dictionary",
    "convnext_unet",
)  # fmt: skip
BLIND_CHECK = {
    "codec_language": 16, "speech_transducer": 32, "reward_model": 6, "mixture_of_depths": 8,
    "video_transformer": 5, "self_distillation": 96, "perceptual_autoencoder": 8, "graph_transformer": 128,
    "group_forecast": 48, "robot_policy": 32,
}  # fmt: skip
"""Models of bench/zoo_check.py, written and predicted before any of them was measured."""
BLIND_CHECK_COMPILED = ("codec_language", "perceptual_autoencoder", "graph_transformer", "group_forecast")
BLIND_UNSEEN = {
    "soft_capped_decoder": 2, "late_interaction": 48, "byte_patches": 6, "hybrid_state_space": 4,
    "sequence_tagger": 256, "joint_embedding": 160, "latent_video": 4, "modulated_generator": 32,
    "document_reader": 2, "promptable_segmentation": 2, "edge_convolution": 16, "speech_synthesis": 32,
    "click_crosses": 65_536, "distributional_q": 512, "physics_informed": 16_384, "auto_correlation": 64,
}  # fmt: skip
"""Models of bench/zoo_unseen.py, written and predicted before any of them was measured."""
BLIND_UNSEEN_COMPILED = (
    "soft_capped_decoder", "late_interaction", "byte_patches", "hybrid_state_space", "latent_video",
    "promptable_segmentation",
)  # fmt: skip
ATTENTION = (
    ("Windowed", 64), ("EncoderUnmasked", 32), ("Encoder", 32), ("EncoderDropout", 32), ("RelativeBias", 16),
    ("Head80", 16), ("Head96", 16), ("Head100", 16), ("Head160", 8), ("Grouped", 16), ("GroupedMasked", 16),
    ("Decoder", 16), ("Masked", 16), ("ModernEncoder", 16), ("WindowedHF", 64),
)  # fmt: skip
"""Jobs of bench/attention_jobs.py with their micro-batch."""
CAPS = [
    "gpt-bf16-b16",
    "hfgpt2-bf16-b8",
    "conformer-bf16-b32",
    "fsdp8-llama8-bf16-b4",
    "resnet50-bf16-cl-b256",
    "gpt-compile-b16",
    "gpt-full-bf16-b32",
    "unet-bf16-b64",
    "fsdp16-gpt-fp32-b8",
    "llama4-full-expandable-b8",
]
"""Recorded cases whose smallest memory limit is measured (bench/least_cap.py)."""


def _zoo() -> list[QueuedCase]:
    """Models that no rule was made from."""
    from bench.zoo import entries

    known = entries()
    each = [(name, False) for name in ZOO] + [(name, True) for name in COMPILED_ZOO]
    return [
        _zoo_case(
            known[name], f"zoo-{name}{'-compile' * compiled}", known[name].micro_batch, compiled=compiled
        )
        for name, compiled in each
        if name in known
    ]


def _zoo_case(entry: Entry, name: str, micro_batch: int, *, compiled: bool) -> QueuedCase:
    job = f"{Path(entry.place).relative_to(HERE.parent)}:{entry.name}"
    return QueuedCase(name, job, micro_batch, compile=compiled)


def _timed_zoo() -> list[QueuedCase]:
    """Steps of models that no rule was made from."""
    from bench.zoo import entries

    known = entries()
    sets = (
        ("time", TIMED_ZOO, TIMED_COMPILED),
        ("blind", BLIND_ZOO, BLIND_COMPILED),
        ("later", BLIND_LATER, BLIND_LATER_COMPILED),
        ("newest", BLIND_NEWEST, BLIND_NEWEST_COMPILED),
        ("check", BLIND_CHECK, BLIND_CHECK_COMPILED),
        ("unseen", BLIND_UNSEEN, BLIND_UNSEEN_COMPILED),
    )
    return [
        _zoo_case(
            known[name],
            f"{word}-{name}{'-compile' * compiled}-b{sizes[name]}",
            sizes[name],
            compiled=compiled,
        )
        for word, sizes, also_compiled in sets
        for names, compiled in ((sizes, False), (also_compiled, True))
        for name in names
    ]


def _attention() -> list[QueuedCase]:
    """Jobs that differ in which attention kernel torch chooses."""
    found = [
        QueuedCase(f"attention-{name}-b{micro}", f"bench/attention_jobs.py:{name}", micro)
        for name, micro in ATTENTION
    ]
    found += [
        QueuedCase(
            f"attention-{name}-compile-b{micro}", f"bench/attention_jobs.py:{name}", micro, compile=True
        )
        for name, micro in (("EncoderUnmasked", 32), ("Windowed", 64))
    ]
    return [
        *found,
        QueuedCase("attention-Decoder-fp32-b8", "bench/attention_jobs.py:Decoder", 8, precision="fp32"),
        *(
            QueuedCase(
                f"attention-Decoder-{length // 1024}k-b1",
                "bench/attention_jobs.py:Decoder",
                options={"length": length, "heads": 32, "head": 128, "groups": 8, "layers": 2},
            )
            for length in (8192, 32768, 131072)
        ),
        *(
            QueuedCase(
                f"attention-MaskedEfficient-{precision}-{length // 1024}k-b{micro}",
                "bench/attention_jobs.py:MaskedEfficient",
                micro,
                precision=precision,
                options={"length": length},
            )
            for precision in ("bf16", "fp32")
            for length, micro in ((2048, 4), (8192, 1))
        ),
    ]


FIT = "bench/fit_jobs.py:Decoder"
LORA_1B: dict[str, Any] = {"lora": 16}
LORA_8B: dict[str, Any] = {
    "lora": 16, "width": 4096, "ff": 14336, "layers": 8, "tied": False, "seq": 2048,
}  # fmt: skip


def _bases() -> list[QueuedCase]:
    """Adapters on frozen layers of 4 and 8 bits."""
    found = [
        QueuedCase(f"base-{base}-{size}{'-full' * (how == 'full')}-b{micro}", FIT, micro, options,
                   base=base, recompute=how)
        for size, options, micro in (("1b", LORA_1B, 4), ("8b8", LORA_8B, 2))
        for base, how in (
            ("nf4", "none"), ("nf4-double", "full"), ("int8", "none"), ("none", "none"), ("nf4", "full"),
            ("fp4", "none"), ("int8", "full"), ("nf4-double", "none"),
        )
    ]  # fmt: skip
    peft = [
        QueuedCase(f"base-{base}-peft-b4", "PeftLlama", 4, base=base)
        for base in ("nf4-double", "int8", "none")
    ]
    # These formats are plain torch, and need no package.
    torchao = [
        QueuedCase(
            f"base-{base}-1b{f'-{how}' * (how != 'none')}-b4", FIT, 4, LORA_1B, base=base, recompute=how
        )
        for base, how in (("nf4-ao", "none"), ("int8-ao", "none"), ("nf4-ao", "full"))
    ]
    return [*found[:3], *torchao, *peft, *found[3:]]


def _optimizers() -> list[QueuedCase]:
    """Optimizers other than the job's own."""
    small = {"layers": 8, "vocabulary": 32_000}
    rules = (
        "adamw8bit", "adamw4bit", "paged-adamw8bit", "adafactor", "muon", "adamw8bit-ao", "adamw-fp8",
        "lion8bit", "sgd", "paged-adamw", "lion", "adamw", "adamw-bf16",
    )  # fmt: skip
    return [
        *(QueuedCase(f"optimizer-{rule}-b4", FIT, 4, small, rule=rule) for rule in rules),
        *(
            QueuedCase(f"optimizer-{rule}-true-b4", FIT, 4, small, precision="bf16-true", rule=rule)
            for rule in ("adamw8bit", "adamw4bit", "adafactor")
        ),
        QueuedCase("optimizer-adamw8bit-vit-b64", "ViT", 64, rule="adamw8bit"),
    ]


def _in_backward() -> list[QueuedCase]:
    """Updates in the backward pass, and two of the same steps without (`off`)."""
    small = {"layers": 8, "vocabulary": 32_000}
    return [
        QueuedCase(f"in-backward-{rule}-{precision}-{recompute}-b{micro}", FIT, micro, small,
                   precision=precision, recompute=recompute, rule=rule, in_backward=True)
        for rule, precision, recompute, micro in (
            ("adamw", "bf16-true", "full", 1),
            ("adamw8bit", "bf16-true", "full", 1),
            ("adamw", "bf16", "none", 4),
            ("adamw8bit", "bf16", "none", 4),
            ("adamw4bit", "bf16-true", "none", 4),
            ("muon", "bf16", "none", 4),
        )
    ] + [
        QueuedCase(f"in-backward-off-{rule}-bf16-true-full-b1", FIT, 1, small, precision="bf16-true",
                   recompute="full", rule=rule)
        for rule in ("adamw", "adamw8bit")
    ] + [
        QueuedCase("in-backward-plain-bf16-none-b4", FIT, 4, small, optimizer="plain", in_backward=True),
        QueuedCase("in-backward-adamw-vit-b64", "ViT", 64, rule="adamw", in_backward=True),
    ]  # fmt: skip


def _losses() -> list[QueuedCase]:
    """Losses that never hold all logits."""
    return [
        QueuedCase(f"loss-{form}-v{words // 1000}k-b{micro}", FIT, micro, {"layers": 4, "vocabulary": words},
                   loss=form)
        for words, micro in ((128_256, 8), (32_000, 8), (151_936, 4))
        for form in ("chunked", "liger", "whole")
    ] + [
        QueuedCase("loss-chunked-lora-nf4-b8", FIT, 8, LORA_1B, base="nf4", loss="chunked", recompute="full"),
        QueuedCase("loss-chunked-compile-b8", FIT, 8, {"layers": 4}, loss="chunked", compile=True),
    ]  # fmt: skip


def _named_losses() -> list[QueuedCase]:
    """GPT-2 compiled with the loss in a graph of its own, and in one graph with the model."""
    jobs = {"default": "HFGPT2", "named": "bench/loss_jobs.py:NamedLoss"}
    return [QueuedCase(f"loss-{name}-gpt2-compile-b32", job, 32, compile=True) for name, job in jobs.items()]


def _recomputes() -> list[QueuedCase]:
    """Steps of the dial between no and full recomputation."""
    options = {"layers": 12, "vocabulary": 32_000}
    return [
        QueuedCase(f"recompute-{way}-b8", FIT, 8, options, recompute=way)
        for way in ("every-2", "every-4", "selective", "every-3", "none", "full", "all-but-3", "all-but-4")
    ] + [
        QueuedCase(f"recompute-{way}-compile-b8", FIT, 8, options, recompute=way, compile=True)
        for way in ("budget-0.4", "budget-0.8", "budget-0.2", "budget-0.6", "none", "full")
    ]


FP8_1B: dict[str, Any] = {"layers": 8, "vocabulary": 32_000, "seq": 2048}
FP8_8B: dict[str, Any] = {
    "width": 4096, "ff": 14336, "layers": 4, "vocabulary": 32_000, "tied": False, "seq": 2048,
}  # fmt: skip


def _float8() -> list[QueuedCase]:
    """Linear layers that multiply in 8 bits."""
    decoders = [
        QueuedCase(
            f"fp8-{precision.removeprefix('fp8-')}-{size}{'-compile' * compiled}-b4", FIT, 4, options,
            precision=precision, compile=compiled,
        )
        for size, options, precision, compiled in (
            ("8b4", FP8_8B, "fp8-tensorwise", True),
            ("1b8", FP8_1B, "fp8-rowwise", True),
            ("1b8", FP8_1B, "fp8-tensorwise", False),
            ("8b4", FP8_8B, "fp8-rowwise", False),
            ("8b4", FP8_8B, "fp8-rowwise", True),
            ("1b8", FP8_1B, "fp8-tensorwise", True),
            ("8b4", FP8_8B, "fp8-tensorwise-true", False),
            ("1b8", FP8_1B, "fp8-rowwise-true", False),
        )
    ]  # fmt: skip
    mlps = [
        QueuedCase("fp8-tensorwise-mlp-b8192", "bench/fit_jobs.py:Wide", 8192, precision="fp8-tensorwise"),
        QueuedCase(
            "fp8-rowwise-mlp-full-b8000", "bench/fit_jobs.py:Wide", 8000, precision="fp8-rowwise",
            recompute="full",
        ),
    ]  # fmt: skip
    return [*_float8_losses(), *decoders[:2], mlps[0], *decoders[2:], mlps[1]]


def _float8_losses() -> list[QueuedCase]:
    """Compiled against uncompiled fp8, with parts of the compiler switched off (bench/float8_losses.py).

    Other variants of that script were meant to find out why losses differed, which is known now.
    """
    return [
        QueuedCase(
            f"{recipe}-losses-{variant.replace(' ', '-')}", variant, precision=recipe, compile=True,
            kind="losses",
        )
        for recipe in ("fp8-tensorwise", "fp8-rowwise")
        for variant in ("graphs only", "decompositions", "inductor")
    ]  # fmt: skip


def _offloads() -> list[QueuedCase]:
    """Activations on the host, with and without recomputation: only block inputs are moved with it."""
    return [
        QueuedCase(f"offload-{words}-{size}-{recompute}-{precision}-b{micro}", FIT, micro, options,
                   precision=precision, recompute=recompute, offload=words)
        for size, options, micro, precision, recompute, words in (
            ("8b4", FP8_8B, 4, "bf16-true", "none", "activations"),
            ("1b8", FP8_1B, 4, "bf16-true", "full", "activations"),
            ("8b4", FP8_8B, 4, "bf16-true", "full", "activations"),
            ("1b8", FP8_1B, 4, "bf16-true", "none", "activations"),
            ("1b8", FP8_1B, 4, "bf16", "none", "activations"),
            ("8b4", FP8_8B, 4, "bf16-true", "none", "none"),
            ("1b8", FP8_1B, 4, "bf16-true", "none", "none"),
        )
    ]  # fmt: skip


def _state_offloads() -> list[QueuedCase]:
    """Weights and optimizer states on the host: one GPU, and one rank of a fake group."""
    llama = {"layers": 8}
    return [
        QueuedCase("state-offload-fsdp8-llama8-b4", "Llama", 4, llama, "fsdp", 8, offload="params,optimizer"),
        QueuedCase("state-offload-single-1b8-b4", FIT, 4, FP8_1B, offload="optimizer"),
        QueuedCase("state-offload-fsdp2-1b8-full-b4", FIT, 4, FP8_1B, "fsdp", 2, recompute="full",
                   offload="params,optimizer"),
        QueuedCase("state-offload-single-8b4-true-b2", FIT, 2, FP8_8B, precision="bf16-true",
                   recompute="full", offload="optimizer"),
        QueuedCase("state-offload-fsdp8-llama8-true-b4", "Llama", 4, llama, "fsdp", 8, "bf16-true",
                   offload="params,optimizer"),
    ]  # fmt: skip


def _packed() -> list[QueuedCase]:
    """Documents of different lengths in one row, and Liger's kernels."""
    packed = "bench/packed_jobs.py:Packed"
    return [
        *(
            QueuedCase(f"packed-varlen-{mix}-b1", packed, 1, {"mix": mix})
            for mix in ("long", "short", "even")
        ),
        QueuedCase("packed-flex-long-b1", packed, 1, {"mix": "long", "way": "flex"}),
        *(
            QueuedCase(
                f"liger-v{words // 1000}k-b{micro}", "bench/fit_jobs.py:LigerDecoder", micro,
                {"layers": 4, "vocabulary": words},
            )
            for words, micro in ((128_256, 8), (32_000, 8), (151_936, 4))
        ),
    ]  # fmt: skip


def _ways_to_fit() -> list[QueuedCase]:
    """The most informative of each kind first."""
    kinds = [
        _bases(), _optimizers(), _in_backward(), _losses(), _named_losses(), _recomputes(), _float8(),
        _offloads(), _state_offloads(), _packed(),
    ]  # fmt: skip
    longest = max(map(len, kinds))
    return [cases[place] for place in range(longest) for cases in kinds if place < len(cases)]


def _frameworks() -> list[QueuedCase]:
    """Other frameworks with our callback; `oom`: with a memory limit, from which the run has to recover."""
    return [
        QueuedCase(f"framework-{name}-b{micro}{'-oom' * bool(oom)}", name, micro, oom, kind="framework")
        for name in ("transformers", "lightning", "accelerate")
        for micro, oom in ((8, {}), (16, {"oom": True}))
    ]


def _built_in() -> list[QueuedCase]:
    """Return bridge and naics at full size, eager, and compiled as `trimtab train` does it."""
    jobs = (("trimtab.jobs.bridge.job:Bridge", "bridge", 8), ("trimtab.jobs.naics.job:Naics", "naics", 16))
    return [
        QueuedCase(f"{name}{'-compile' * compiled}-b{micro}", job, micro, compile=compiled)
        for job, name, micro in jobs
        for compiled in (False, True)
    ]


QUALITY: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt2": ("HFGPT2", 64, {}),
    "resnet": ("ResNet50", 512, {"channels_last": True}),
    "t5": ("T5", 128, {}),
    "moe": ("MixtureLM", 64, {}),
    "windows": ("bench/zoo_models.py:WindowedAttention", 128, {}),
    "vit": ("ViT", 512, {}),
    "llama": ("Llama", 16, {"layers": 16, "width": 2048, "ff": 8192}),
    "unet": ("UNet", 256, {}),
    "bert": ("Bert", 128, {}),
    "dlrm": ("DLRM", 65536, {}),
    "conformer": ("Conformer", 128, {}),
}
"""Jobs of eleven kinds at full depth, with the global batch of their plan."""


def _quality() -> list[QueuedCase]:
    """What a plan chooses from on one GPU: micro-batches of the same global batch, compiled, recomputed."""
    choices: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (1, {"compile": True}),
        (2, {}),
        (4, {"compile": True}),
        (1, {"recompute": "selective"}),
        (4, {}),
        (2, {"compile": True}),
        (8, {}),
        (1, {"recompute": "full"}),
    ]
    return [
        QueuedCase(
            "-".join(["quality", name, *map(str, choice.values()), f"b{batch // rounds}"]).replace(
                "True", "compile"
            ),
            job,
            batch // rounds,
            options=options,
            accumulation=rounds,
            **choice,
        )
        for rounds, choice in choices
        for name, (job, batch, options) in QUALITY.items()
        # A model without repeated blocks recomputes nothing.
        if not (name == "dlrm" and "recompute" in choice)
    ]


def _host() -> list[QueuedCase]:
    """What the host needs: single layers, and whole jobs so small that the device waits for the host."""
    small = [
        QueuedCase(f"tiny-{name}-b{2 * rounds}", job, 2, options=options, accumulation=rounds)
        for rounds in (1, 4)
        for name, (job, _, options) in QUALITY.items()
    ]
    return [QueuedCase("host-layers", "", kind="host"), *small]


def queue() -> list[QueuedCase]:
    """Every case, most informative first."""
    zoo = _zoo()
    eager, compiled = ([case for case in zoo if case.compile is wanted] for wanted in (False, True))
    caps = [QueuedCase(f"cap-{name}", name, kind="cap") for name in CAPS]
    return [
        *_frameworks(),
        *_ways_to_fit(),
        *_stages(),
        *_tensor_ranks(),
        *_expert_ranks(),
        *_ranks(),
        *_built_in(),
        *_host(),
        *_quality(),
        *_timed_zoo(),
        *_scaled(),
        *eager[:30],
        *_attention(),
        *compiled,
        *caps,
        *eager[30:],
    ]


def run_forks(run_case: Callable[[Any], None], waiting: list[Any], workers: int) -> None:
    """Run each case in a fork of its own, some at a time, and say which are done and which failed."""
    _import_once()
    running: dict[int, str] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            case = waiting.pop(0)
            child = os.fork()
            if child == 0:
                code = 0
                try:
                    run_case(case)
                except BaseException:  # noqa: BLE001 - the next case goes on
                    traceback.print_exc(limit=-2)
                    code = 1
                os._exit(code)
            running[child] = case.id
        child, status = os.wait()
        print(running.pop(child), "failed" if status else "", flush=True)


def case_named(name: str) -> QueuedCase:
    """The case of that id."""
    return next(case for case in queue() if case.id == name)


class GpuLock:
    """Lets several processes compile side by side on the GPU, and one process alone use it for what is timed.

    Who waits to be alone closes the gate, so that no other process begins in the meantime.
    """

    def __init__(self) -> None:
        self.file, self.gate = LOCK.open("w"), LOCK.with_suffix(".gate").open("w")

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Use the GPU beside others."""
        fcntl.flock(self.gate, fcntl.LOCK_EX)
        fcntl.flock(self.file, fcntl.LOCK_SH)
        fcntl.flock(self.gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Use the GPU alone; what this process shares is given up before."""
        fcntl.flock(self.file, fcntl.LOCK_UN)
        fcntl.flock(self.gate, fcntl.LOCK_EX)
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)
            fcntl.flock(self.gate, fcntl.LOCK_UN)


def measure(name: str, *, alone: bool = False) -> dict[str, Any]:
    """Run one case in this process; a compiled case is compiled beside others unless it needs to be alone."""
    import torch

    from trimtab.calibration.host import measure_host_costs
    from trimtab.exams.measure import measure_rank
    from trimtab.jobs.load import load_job
    from trimtab.trace.server import import_ahead

    case = case_named(name)
    job = load_job(case.job_name, case.options)
    # Imports take longer than the steps, and need no lock.
    import_ahead(job)
    torch.zeros(1, device="cuda")
    lock = GpuLock()
    is_shared = case.compile and not alone
    hold = lock.shared() if is_shared else lock.exclusive()
    speeds: list[dict[str, float]] = []

    @contextlib.contextmanager
    def watch_host() -> Iterator[None]:
        """Measure the host's speed right before and after the timed steps: shared hosts change it often."""
        with lock.exclusive() if is_shared else contextlib.nullcontext():
            speeds.append(measure_host_costs())
            yield
            speeds.append(measure_host_costs())

    try:
        with hold:
            if case.strategy == Strategy.PIPELINE:
                from bench.stage_cases import measure_stage

                return measure_stage(job, case.setting, case.stage)
            found = measure_rank(job, case.setting, timing=watch_host)
            found["host"] = {name: sum(speed[name] for speed in speeds) / len(speeds) for name in speeds[0]}
    except torch.OutOfMemoryError as error:
        found = {"out_of_memory": str(error).split("\n")[0]}
    return found


def run(out: Path, seconds: float, workers: int, only: str, packages: str) -> None:
    """Measure what the file does not have yet, until the time is over.

    `packages` is a folder of Python packages for the cases; some of them use the GPU when they are imported.

    Imports take longer than most cases, so they are done once, before any use of the GPU, and each case runs
    in a fork of this process.
    """
    began = time.monotonic()
    known = {line["id"] for line in read_results(out) if not line.get("failed")}
    waiting = [case for case in queue() if case.id not in known and matches(case.id, only)]
    _import_once()
    print(f"{time.monotonic() - began:6.1f} s  imported", flush=True)
    # Compiled cases use the GPU side by side with others, so they come last.
    waiting.sort(key=lambda case: case.compile)
    alone: list[QueuedCase] = []
    retried: set[str] = set()
    running: list[_ForkedCase] = []
    while waiting or running or alone:
        left = seconds - (time.monotonic() - began)
        if not waiting and not running:
            waiting.append(alone.pop(0))
        while waiting and len(running) < workers:
            case = waiting.pop(0)
            if left > (60 if case.compile or case.kind == "cap" else 15):
                limit = {"cap": CAP_S}.get(case.kind, COMPILED_S if case.compile else CASE_S)
                running.append(_ForkedCase(case, min(left, limit), packages, alone=case.id in retried))
        for forked in [forked for forked in running if forked.is_done()]:
            running.remove(forked)
            line = forked.line()
            if "out_of_memory" in line and workers > 1 and forked.case.id not in retried:
                # Others may have been on the GPU: try again alone.
                retried.add(forked.case.id)
                alone.append(forked.case)
                continue
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            shown = {
                key: line[key]
                for key in ("allocated_bytes", "reserved_bytes", "step_s", "took_s", "failed")
                if key in line
            }
            print(f"{time.monotonic() - began:6.1f} s  {forked.case.id}  {shown}", flush=True)
        time.sleep(0.05)


def matches(name: str, patterns: str) -> bool:
    """Whether a name fits one of several patterns, which commas separate."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))


def _import_once() -> None:
    """Import what most cases need; nothing here may use the GPU, or forks could not."""
    import torch
    import transformers
    from transformers import LlamaForCausalLM

    import trimtab.engine.step
    import trimtab.exams.measure
    import trimtab.trace.server

    del transformers, LlamaForCausalLM, trimtab
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        raise RuntimeError("an import used the GPU: cases cannot run in forks of this process")


class _ForkedCase:
    """A case that runs in a fork of this process."""

    def __init__(self, case: QueuedCase, limit: float, packages: str, *, alone: bool = False) -> None:
        self.case, self.limit, self.began = case, limit, time.monotonic()
        self.alone = alone
        self.packages = packages
        self.folder = tempfile.TemporaryDirectory()
        self.status: int | None = None
        self.pid = os.fork()
        if not self.pid:
            self._run()

    def _run(self) -> None:
        status = 1
        try:
            for number, name in ((1, "out"), (2, "err")):
                handle = os.open(f"{self.folder.name}/{name}", os.O_WRONLY | os.O_CREAT)
                os.dup2(handle, number)
            if self.packages:
                sys.path.append(self.packages)
            answer(self.case.id, alone=self.alone)
            status = 0
        except BaseException:  # noqa: BLE001 - the parent reads what it was
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def is_done(self) -> bool:
        """Whether the fork has ended; it is ended if its time is over."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
            return True
        if time.monotonic() - self.began > self.limit:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return True
        return False

    def line(self) -> dict[str, Any]:
        """The line of the case."""
        line: dict[str, Any] = {"id": self.case.id, "case": asdict(self.case)}
        out, err = ((Path(self.folder.name) / name) for name in ("out", "err"))
        answers = (
            [text for text in out.read_text().splitlines() if text.startswith("{")] if out.exists() else []
        )
        why = err.read_text()[-600:] if err.exists() else ""
        self.folder.cleanup()
        if self.status is None:
            return line | {"failed": f"no answer in {self.limit:.0f} s"}
        if self.status or not answers:
            return line | {"failed": why or f"exit code {self.status}"}
        found: dict[str, Any] = json.loads(answers[-1])
        return line | found | {"took_s": round(time.monotonic() - self.began, 1)}


def _answered_apart(verb: str, case: QueuedCase, limit: float) -> dict[str, Any]:
    """The line of one case, measured or predicted by a process of its own."""
    from trimtab.spec import Allocator

    began = time.monotonic()
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }
    if case.setting.allocator is Allocator.EXPANDABLE:
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    line: dict[str, Any] = {"id": case.id, "case": asdict(case)}
    try:
        done = subprocess.run(
            [sys.executable, __file__, verb, case.id],
            env=env,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return line | {"failed": f"no answer in {limit:.0f} s"}
    answers = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if done.returncode or not answers:
        return line | {"failed": done.stderr.strip()[-600:] or f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(answers[-1])
    return line | found | {"took_s": round(time.monotonic() - began, 1)}


def answer(name: str, *, alone: bool = False) -> None:
    """Print what one case measured, with where it was measured."""
    import torch

    case = case_named(name)
    if case.kind == "cap":
        from bench import least_cap

        # Nothing is timed, so no lock is needed.
        predicted = least_cap.predict_least_cap(least_cap.case_named(case.job))
        found = least_cap.measure_least_cap(case.job, predicted)
        del found["case"]
    elif case.kind == "framework":
        from bench import framework_cases

        measure_case = framework_cases.measure_recovery if case.options else framework_cases.measure
        framework_cases.import_framework(case.job)
        with tempfile.TemporaryDirectory() as folder, GpuLock().exclusive():
            found = measure_case(case.job, case.micro_batch, Path(folder))
    elif case.kind == "losses":
        from bench import float8_losses

        sizes = {"layers": 2, "vocabulary": 32_000, "seq": 512}
        lines = float8_losses.compare(Precision(case.precision), sizes, "cuda", 9, [case.job])
        found = {"lines": lines}
    elif case.kind == "host":
        from bench import host_ops

        with GpuLock().exclusive():
            found = {"layers": host_ops.measure_layers()}
    else:
        found = measure(name, alone=alone)
    found |= {
        "device": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "transformers": _version("transformers"),
        "machine": platform.machine(),
        "taken_on": datetime.now(UTC).date().isoformat(),
    }
    print(json.dumps(found), flush=True)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def read_results(out: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; none where there is no file."""
    if not out.exists():
        return []
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line.strip()]


HOST_SPEEDS = (0.5, 0.6, 0.75, 0.9, 1.1, 1.35, 1.8)
"""How long hosts take for single layers, over the calibrated one: a measured host is between two of them."""


def _predict_by_host(trace: Any, case: QueuedCase, cluster: Any, step_s: float) -> list[list[float]]:
    """Return the step's seconds by how long the host takes for single layers, from the usual host's."""
    from trimtab.catalog.facts import facts_of
    from trimtab.predict import communication, step_time
    from trimtab.predict.calibration import find_speed

    device = cluster.devices[0]
    speed = find_speed(device)
    if speed is None:
        return []
    links = communication.find_links(cluster, case.setting.gpus)

    def time_step(host: Any) -> float:
        return step_time.estimate_step(trace, case.setting, speed.pace, host, links).total_s

    usual_s = time_step(speed.host)
    facts = facts_of(device)
    return [
        [layers, step_s + time_step(step_time.host_costs_at(layers, facts)) - usual_s]
        for layers in HOST_SPEEDS
    ]


def interpolate_host(steps: list[list[float]], host: dict[str, float]) -> float:
    """Return the step's seconds on a measured host, between those of the two nearest hosts."""
    import numpy as np

    from trimtab.catalog.facts import fallback_facts
    from trimtab.predict.step_time import compare_host

    speeds, seconds = zip(*steps, strict=True)
    return float(np.interp(compare_host(host, fallback_facts()), speeds, seconds))


def list_errors(line: dict[str, Any], predicted: dict[str, Any]) -> dict[str, float]:
    """Return the relative error of everything that was both predicted and measured."""
    errors = {name: value / line[name] - 1 for name, value in predicted.items() if line.get(name)}
    steps = predicted.get("step_s_by_host")
    if steps and line.get("step_s") and "host" in line:
        errors["step_s with its host"] = interpolate_host(steps, line["host"]) / line["step_s"] - 1
    return errors


def predict(case: QueuedCase) -> dict[str, Any]:
    """Today's prediction of a case."""
    from trimtab.catalog.clusters import parse_cluster
    from trimtab.predict.estimate import estimate_trace
    from trimtab.predict.memory import add_accumulation
    from trimtab.trace.request import TraceRequest
    from trimtab.trace.tracer import trace_setting

    cluster = parse_cluster(f"{case.setting.gpus}x{DEVICE}")
    request = TraceRequest(
        job=case.job_name, overrides=case.options, setting=case.setting, device=cluster.devices[0]
    )
    trace = trace_setting(request)
    if case.strategy == Strategy.PIPELINE:
        # Without its stages, the trace is that of a rank alone.
        alone = next(rank for rank in trace.ranks if rank.part == case.stage)
        trace = alone.replace(beside=(), stage_layers=())
    found = estimate_trace(trace, case.setting, cluster.devices[0], cluster=cluster)[0]
    found = add_accumulation(found, trace, case.setting)
    step_s = found.step_s
    if step_s is not None and case.accumulation > 1 and any(work.fresh for work in trace.works):
        # All micro-batches of a measured step are the same, so only the first one brings new shapes.
        known = trace.replace(works=tuple(work.replace(fresh=False) for work in trace.works))
        single = case.setting.replace(accumulation=1, global_batch=case.micro_batch)
        times = [
            estimate_trace(form, setting, cluster.devices[0], cluster=cluster)[0].step_s or 0.0
            for form, setting in ((trace, single), (known, case.setting), (known, single))
        ]
        step_s = times[0] + times[1] - times[2]
    if step_s is not None and found.step_time is not None:
        # Ranks of many are measured alone, with collectives that move nothing, and wait for nobody.
        step_s -= found.step_time.communication_s + found.step_time.bubble_s
    return {
        "allocated_bytes": found.allocated_bytes,
        "reserved_bytes": found.reserved_bytes,
        "process_bytes": found.process_bytes,
        **(
            {}
            if step_s is None
            else {"step_s": step_s, "step_s_by_host": _predict_by_host(trace, case, cluster, step_s)}
        ),
        **(
            {}
            if found.host is None
            else {"host_rank_bytes": found.host.rank_bytes, "host_pinned_bytes": found.host.pinned_bytes}
        ),
    }


def predict_all(file: Path, seconds: float, workers: int, only: str) -> None:
    """Predict every case that the file does not have yet, each in a process of its own."""
    began = time.monotonic()
    known = {line["id"] for line in read_results(file)}
    waiting = [
        case for case in queue() if case.id not in known and case.kind == "step" and matches(case.id, only)
    ]

    def one_case(case: QueuedCase) -> None:
        left = seconds - (time.monotonic() - began)
        if left > 30:  # noqa: PLR2004 - seconds
            line = _answered_apart("predict-case", case, left)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one_case, waiting))


def compare(out: Path, only: str, predictions: Path) -> None:
    """Print the error of each prediction, and their medians and worsts."""
    import statistics

    errors: dict[str, list[float]] = {}
    made = {line["id"]: line for line in read_results(predictions)}
    for line in read_results(out):
        if line.get("failed") or line.get("out_of_memory") or not matches(line["id"], only):
            continue
        if line["case"]["kind"] in {"losses", "host"}:
            continue  # Nothing is predicted.
        if line["case"]["kind"] == "cap":
            found = {"least_bytes": line["error"]}
        elif line["case"]["kind"] == "framework":
            # A run that had to recover has smaller micro-batches than were predicted.
            found = {} if line["case"]["options"] else line["error"]
        else:
            try:
                if made.get(line["id"], {}).get("failed"):
                    raise RuntimeError(made[line["id"]]["failed"])  # noqa: TRY301 - as if it was made now
                predicted = (
                    made[line["id"]]["predicted"]
                    if line["id"] in made
                    else predict(QueuedCase(**line["case"]))
                )
            except Exception as why:  # noqa: BLE001 - a case that cannot be predicted is an answer
                print(f"{line['id']:42} {type(why).__name__}: {str(why)[:200]}", flush=True)
                continue
            found = list_errors(line, predicted)
        for name, error in found.items():
            errors.setdefault(name, []).append(error)
        words = "  ".join(f"{name.removesuffix('_bytes')} {error:+.2%}" for name, error in found.items())
        print(f"{line['id']:42} {words}", flush=True)
    for name, values in errors.items():
        sizes = [abs(value) for value in values]
        print(
            f"{name}: {len(values)} cases, median {statistics.median(sizes):.2%}, worst {max(sizes):.2%}, "
            f"largest underestimate {min(0.0, *values):.2%}"
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("verb", choices=["list", "run", "case", "predict", "predict-case", "compare"])
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--only", default="*")
    parser.add_argument("--packages", default="")
    given = parser.parse_args()
    if given.verb == "list":
        known = {line["id"] for line in read_results(given.out) if not line.get("failed")}
        for case in queue():
            print(f"{'done' if case.id in known else 'open'}  {case.id}")
    elif given.verb == "run":
        run(given.out, given.seconds, given.workers, given.only, given.packages)
    elif given.verb == "case":
        answer(given.name)
    elif given.verb == "predict":
        predict_all(given.predictions, given.seconds, given.workers, given.only)
    elif given.verb == "predict-case":
        print(json.dumps({"predicted": predict(case_named(given.name))}), flush=True)
    else:
        compare(given.out, given.only, given.predictions)


if __name__ == "__main__":
    main()
