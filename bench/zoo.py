"""Over 100 models to try the tracer on: 80 and more of transformers, 20 in the style of public repositories.

    python bench/zoo.py [--only NAME,...] [--family NAME] [--list] [--out FILE.jsonl]

traces each model for an H200 (bf16 autocast, no GPU needed) and prints one line for it: the predicted
memory and step time, or why it was refused. With --out it appends a JSON line a model, and skips models
that the file has already. Each model is a job as well, so you can measure it on a GPU:

    trimtab profile bench/zoo.py:bert --micro-batch 64

Models have published widths and random weights. Layers are cut where training would take more than about
40 GiB. Inputs are drawn at random: token ids, padding masks, labels, boxes, audio.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import select
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = "H200"
TIMEOUT_S = 300.0
IGNORED = -100
"""The label that losses of transformers leave out."""


@dataclass(frozen=True)
class Entry:
    """A model of the zoo."""

    name: str
    family: str
    micro_batch: int
    build: Callable[[], Any]
    """Gives the job."""
    place: str = str(Path(__file__).resolve())
    """The file that has the job under this name."""


@dataclass
class TransformersJob:
    """A model of transformers that computes its own loss."""

    name: str
    architecture: str
    """The model's class."""
    inputs: Callable[[Any, int], dict[str, Any]]
    """Makes a batch from the config and a size."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Options of the config that differ from its defaults."""
    read_loss: Callable[[Any], torch.Tensor] | None = None
    """Takes the loss from the output, where the model has none of its own."""
    global_batch: int = 256
    samples: int = 100_000

    @functools.cached_property
    def config(self) -> Any:
        """The config with its changes; nothing is downloaded."""
        import transformers

        made = getattr(transformers, self.architecture).config_class(**_configs(self.changes))
        made.use_cache = False
        return made

    def model(self) -> Any:
        """The model with random weights."""
        import transformers

        return getattr(transformers, self.architecture)(self.config)

    def batch(self, size: int) -> dict[str, Any]:
        """Random inputs and labels."""
        return self.inputs(self.config, size)

    def loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """The model's own loss."""
        output = model(**batch)
        return output.loss if self.read_loss is None else self.read_loss(output)


def _configs(changes: dict[str, Any]) -> dict[str, Any]:
    """Options with configs of parts built: a part is a dict with the key `config`, the name of its class."""
    import transformers

    def built(value: Any) -> Any:
        if isinstance(value, dict) and "config" in value:
            rest = {key: one for key, one in value.items() if key != "config"}
            return getattr(transformers, value["config"])(**_configs(rest))
        return value

    return {key: built(value) for key, value in changes.items()}


# ---------------------------------------------------------------------------------------------- inputs


def _words(config: Any) -> int:
    return int(getattr(config.get_text_config(), "vocab_size", 0) or config.vocab_size)


def _padding(size: int, seq: int) -> torch.Tensor:
    """A mask of samples between half and all of `seq` long."""
    lengths = torch.randint(seq // 2, seq + 1, (size,))
    lengths[0] = seq
    return (torch.arange(seq) < lengths[:, None]).long()


def causal(seq: int, *, skip: int = 0) -> Callable[[Any, int], dict[str, Any]]:
    """Token ids that are their own labels; ids below `skip` are special and left out."""

    def make(config: Any, size: int) -> dict[str, Any]:
        ids = torch.randint(skip, _words(config), (size, seq))
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def masked(seq: int, **more: Any) -> Callable[[Any, int], dict[str, Any]]:
    """Padded token ids, a seventh of which are to be guessed."""

    def make(config: Any, size: int) -> dict[str, Any]:
        ids = torch.randint(10, _words(config), (size, seq))
        labels = torch.where(torch.rand(size, seq) < 0.15, ids, torch.full_like(ids, IGNORED))  # noqa: PLR2004
        return {"input_ids": ids, "attention_mask": _padding(size, seq), "labels": labels, **more}

    return make


def labelled(seq: int, labels: int = 2, highest: int | None = None) -> Callable[[Any, int], dict[str, Any]]:
    """Padded token ids with one label a sample."""

    def make(config: Any, size: int) -> dict[str, Any]:
        ids = torch.randint(10, highest or _words(config), (size, seq))
        return {
            "input_ids": ids,
            "attention_mask": _padding(size, seq),
            "labels": torch.randint(labels, (size,)),
        }

    return make


def translated(source: int, target: int) -> Callable[[Any, int], dict[str, Any]]:
    """Padded token ids and the tokens to make of them."""

    def make(config: Any, size: int) -> dict[str, Any]:
        words = _words(config)
        return {
            "input_ids": torch.randint(10, words, (size, source)),
            "attention_mask": _padding(size, source),
            "labels": torch.randint(10, words, (size, target)),
        }

    return make


def pictures(side: int, classes: int = 2, key: str = "labels") -> Callable[[Any, int], dict[str, Any]]:
    """Images with one class each."""

    def make(_: Any, size: int) -> dict[str, Any]:
        return {"pixel_values": torch.randn(size, 3, side, side), key: torch.randint(classes, (size,))}

    return make


def unlabelled(side: int, channels: int = 3) -> Callable[[Any, int], dict[str, Any]]:
    """Images alone."""
    return lambda _, size: {"pixel_values": torch.randn(size, channels, side, side)}


def videos(frames: int, side: int, **more: Any) -> Callable[[Any, int], dict[str, Any]]:
    """Clips with one class each."""

    def make(_: Any, size: int) -> dict[str, Any]:
        clip = torch.randn(size, frames, 3, side, side)
        return {"pixel_values": clip, "labels": torch.randint(2, (size,)), **more}

    return make


def boxes(side: int, classes: int = 80, most: int = 12) -> Callable[[Any, int], dict[str, Any]]:
    """Images with a few boxes each, as (middle, size) in shares of the image."""

    def make(_: Any, size: int) -> dict[str, Any]:
        targets = []
        for number in range(size):
            count = 1 + (5 * number + 3) % most
            middles, sizes = torch.rand(count, 2) * 0.5 + 0.25, torch.rand(count, 2) * 0.4 + 0.05
            targets.append(
                {
                    "class_labels": torch.randint(classes, (count,)),
                    "boxes": torch.cat([middles, sizes], dim=-1),
                }
            )
        return {"pixel_values": torch.randn(size, 3, side, side), "labels": targets}

    return make


def maps(side: int, classes: int = 2) -> Callable[[Any, int], dict[str, Any]]:
    """Images with a class a pixel."""

    def make(_: Any, size: int) -> dict[str, Any]:
        return {
            "pixel_values": torch.randn(size, 3, side, side),
            "labels": torch.randint(classes, (size, side, side)),
        }

    return make


def depths(side: int) -> Callable[[Any, int], dict[str, Any]]:
    """Images with a distance a pixel."""

    def make(_: Any, size: int) -> dict[str, Any]:
        return {"pixel_values": torch.randn(size, 3, side, side), "labels": torch.rand(size, side, side)}

    return make


def instances(side: int, count: int = 8, classes: int = 80) -> Callable[[Any, int], dict[str, Any]]:
    """Images with a mask and a class for each of a few things."""

    def make(_: Any, size: int) -> dict[str, Any]:
        return {
            "pixel_values": torch.randn(size, 3, side, side),
            "mask_labels": [(torch.rand(count, side, side) < 0.2).float() for _ in range(size)],  # noqa: PLR2004
            "class_labels": [torch.randint(classes, (count,)) for _ in range(size)],
        }

    return make


def speech(seconds: float, letters: int = 60) -> Callable[[Any, int], dict[str, Any]]:
    """Sound at 16 kHz with the letters that are spoken."""

    def make(config: Any, size: int) -> dict[str, Any]:
        return {
            "input_values": torch.randn(size, int(seconds * 16_000)),
            "labels": torch.randint(1, config.vocab_size, (size, letters)),
        }

    return make


def spectrum(
    *shape: int, letters: int = 60, name: str = "input_features"
) -> Callable[[Any, int], dict[str, Any]]:
    """Features of sound with the tokens that are spoken."""

    def make(config: Any, size: int) -> dict[str, Any]:
        return {
            name: torch.randn(size, *shape),
            "labels": torch.randint(1, _words(config), (size, letters)),
        }

    return make


def captioned(side: int, seq: int, **more: Any) -> Callable[[Any, int], dict[str, Any]]:
    """Pairs of an image and a text."""

    def make(config: Any, size: int) -> dict[str, Any]:
        return {
            "pixel_values": torch.randn(size, 3, side, side),
            "input_ids": torch.randint(10, _words(config) - 2, (size, seq)),
            "attention_mask": _padding(size, seq),
            **more,
        }

    return make


def shown(side: int, tokens: int, seq: int) -> Callable[[Any, int], dict[str, Any]]:
    """A conversation about an image, whose tokens stand at the start of the text."""

    def make(config: Any, size: int) -> dict[str, Any]:
        picture = getattr(config, "image_token_index", None) or config.image_token_id
        text = torch.randint(10, min(_words(config), picture) - 1, (size, seq))
        ids = torch.cat([torch.full((size, tokens), picture), text], dim=1)
        labels = torch.cat([torch.full((size, tokens), IGNORED), text], dim=1)
        return {
            "pixel_values": torch.randn(size, 3, side, side),
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": labels,
        }

    return make


def patches(grid: int, seq: int) -> Callable[[Any, int], dict[str, Any]]:
    """A conversation about an image that comes as a list of patches, as for Qwen2-VL."""

    def make(config: Any, size: int) -> dict[str, Any]:
        vision = config.vision_config
        numbers = 3 * vision.temporal_patch_size * vision.patch_size**2
        tokens = (grid // vision.spatial_merge_size) ** 2
        text = torch.randint(10, 100_000, (size, seq))
        begin = torch.full((size, 1), config.vision_start_token_id)
        ids = torch.cat([begin, torch.full((size, tokens), config.image_token_id), text], dim=1)
        labels = torch.cat([torch.full((size, tokens + 1), IGNORED), text], dim=1)
        return {
            "pixel_values": torch.randn(size * grid**2, numbers),
            "image_grid_thw": torch.tensor([[1, grid, grid]] * size),
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == config.image_token_id).long(),
            "labels": labels,
        }

    return make


def paged(seq: int) -> Callable[[Any, int], dict[str, Any]]:
    """Words of a page with the box that each stands in, a label a word."""

    def make(config: Any, size: int) -> dict[str, Any]:
        low, high = torch.randint(0, 500, (size, seq, 2)), torch.randint(500, 1000, (size, seq, 2))
        return {
            "input_ids": torch.randint(10, config.vocab_size, (size, seq)),
            "bbox": torch.cat([low, high], dim=-1),
            "attention_mask": _padding(size, seq),
            "labels": torch.randint(config.num_labels, (size, seq)),
        }

    return make


def pages(side: int, seq: int) -> Callable[[Any, int], dict[str, Any]]:
    """The same with the page's image."""

    def make(config: Any, size: int) -> dict[str, Any]:
        return {**paged(seq)(config, size), "pixel_values": torch.randn(size, 3, side, side)}

    return make


def asked(side: int, seq: int) -> Callable[[Any, int], dict[str, Any]]:
    """Questions about an image, with a score for each answer."""

    def make(config: Any, size: int) -> dict[str, Any]:
        return {
            **captioned(side, seq)(config, size),
            "labels": torch.rand(size, config.num_labels),
        }

    return make


def read_aloud(side: int, seq: int) -> Callable[[Any, int], dict[str, Any]]:
    """Images with the text that is written in them."""

    def make(config: Any, size: int) -> dict[str, Any]:
        return {
            "pixel_values": torch.randn(size, 3, side, side),
            "labels": torch.randint(10, config.decoder.vocab_size, (size, seq)),
        }

    return make


def series(past: int, channels: int, future: int = 0) -> Callable[[Any, int], dict[str, Any]]:
    """Numbers over time, and those to foretell."""

    def make(_: Any, size: int) -> dict[str, Any]:
        made = {"past_values": torch.randn(size, past, channels)}
        return {**made, "future_values": torch.randn(size, future, channels)} if future else made

    return make


def dated(past: int, future: int, lag: int) -> Callable[[Any, int], dict[str, Any]]:
    """One number over time with features of the time, as the forecasting transformers take it."""

    def make(config: Any, size: int) -> dict[str, Any]:
        length, features = past + lag, config.num_time_features
        return {
            "past_values": torch.randn(size, length),
            "past_time_features": torch.randn(size, length, features),
            "past_observed_mask": torch.ones(size, length),
            "future_values": torch.randn(size, future),
            "future_time_features": torch.randn(size, future, features),
        }

    return make


def played(steps: int) -> Callable[[Any, int], dict[str, Any]]:
    """States, actions and rewards of a game."""

    def make(config: Any, size: int) -> dict[str, Any]:
        return {
            "states": torch.randn(size, steps, config.state_dim),
            "actions": torch.randn(size, steps, config.act_dim),
            "rewards": torch.randn(size, steps, 1),
            "returns_to_go": torch.randn(size, steps, 1),
            "timesteps": torch.arange(steps).expand(size, steps),
            "attention_mask": torch.ones(size, steps),
        }

    return make


# ---------------------------------------------------------------------------------------------- models

FAMILIES = (
    "encoder",
    "decoder",
    "encoder-decoder",
    "vision",
    "detection",
    "segmentation",
    "audio",
    "multimodal",
    "moe",
    "state-space",
    "series",
    "written",
)


def _few(layers: int, **more: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, **more}


RESNET: dict[str, Any] = {
    "config": "ResNetConfig", "out_features": ["stage4"], "layer_type": "bottleneck",
}  # fmt: skip
RESNET_PYRAMID = {**RESNET, "out_features": ["stage2", "stage3", "stage4"]}
SWIN = {"config": "SwinConfig", "out_features": ["stage1", "stage2", "stage3", "stage4"]}
WITHOUT_TIMM = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}

Row = tuple[str, str, str, int, "Callable[[Any, int], dict[str, Any]]", dict[str, Any]]
"""Name, family, model class, micro-batch, inputs, changes to the config."""


def _mean(name: str) -> Callable[[Any], torch.Tensor]:
    return lambda output: getattr(output, name).float().square().mean()


LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "sam_vision": _mean("last_hidden_state"),
    "clap": lambda output: output.loss,
    "decision": _mean("action_preds"),
    "dinov2_backbone": _mean("last_hidden_state"),
    "vjepa2": _mean("last_hidden_state"),
    "depth_anything": _mean("predicted_depth"),
    "sam": _mean("pred_masks"),
    "encodec": _mean("audio_values"),
    "mimi": _mean("audio_values"),
    "dac": lambda output: output.loss.mean(),
    "dpr": _mean("pooler_output"),
    "superpoint": _mean("last_hidden_state"),
    "swin2sr": _mean("reconstruction"),
    "univnet": lambda output: output[0].float().square().mean(),
}
"""Of models that compute no loss themselves."""

ROWS: list[Row] = [
    # Encoders of text.
    ("bert", "encoder", "BertForMaskedLM", 64, masked(128), {}),
    ("roberta", "encoder", "RobertaForMaskedLM", 32, masked(256), {"max_position_embeddings": 514}),
    ("xlm_roberta", "encoder", "XLMRobertaForMaskedLM", 16, masked(256),
     {"vocab_size": 250_002, "max_position_embeddings": 514}),
    ("distilbert", "encoder", "DistilBertForMaskedLM", 64, masked(256), {}),
    ("albert", "encoder", "AlbertForMaskedLM", 16, masked(256),
     {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    ("electra", "encoder", "ElectraForPreTraining", 64, masked(256), {}),
    ("deberta", "encoder", "DebertaForSequenceClassification", 32, labelled(256),
     {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "vocab_size": 50_265,
      "type_vocab_size": 0, "position_biased_input": False}),
    ("deberta_v2", "encoder", "DebertaV2ForSequenceClassification", 32, labelled(256),
     {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
      "relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"],
      "share_att_key": True, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0,
      "position_biased_input": False}),
    ("modernbert", "encoder", "ModernBertForMaskedLM", 16, masked(1024), {}),
    ("longformer", "encoder", "LongformerForMaskedLM", 4, masked(2048), {"max_position_embeddings": 4098}),
    ("big_bird", "encoder", "BigBirdForMaskedLM", 4, masked(2048), {}),
    ("fnet", "encoder", "FNetForSequenceClassification", 32,
     lambda config, size: {key: one for key, one in labelled(512)(config, size).items()
                           if key != "attention_mask"}, {}),
    ("funnel", "encoder", "FunnelForSequenceClassification", 32, labelled(256), {}),
    ("convbert", "encoder", "ConvBertForMaskedLM", 32, masked(256), {}),
    ("xlnet", "encoder", "XLNetForSequenceClassification", 16, labelled(256), {"n_layer": 12, "d_model": 768,
     "n_head": 12, "d_inner": 3072}),
    ("roformer", "encoder", "RoFormerForMaskedLM", 32, masked(256), {}),
    ("mobilebert", "encoder", "MobileBertForMaskedLM", 32, masked(128), {}),
    ("squeezebert", "encoder", "SqueezeBertForMaskedLM", 32, masked(128), {}),
    ("nystromformer", "encoder", "NystromformerForMaskedLM", 16, masked(512), {}),
    ("canine", "encoder", "CanineForSequenceClassification", 8, labelled(1024, highest=100_000), {}),
    ("esm", "encoder", "EsmForMaskedLM", 8, masked(512),
     {"vocab_size": 33, "hidden_size": 1280, "num_hidden_layers": 12, "num_attention_heads": 20,
      "intermediate_size": 5120, "position_embedding_type": "rotary", "pad_token_id": 1,
      "mask_token_id": 32, "token_dropout": True}),
    ("layoutlm", "encoder", "LayoutLMForTokenClassification", 16, paged(512), {}),
    # Decoders.
    ("gpt2", "decoder", "GPT2LMHeadModel", 8, causal(1024), {}),
    ("gpt_neo", "decoder", "GPTNeoForCausalLM", 4, causal(1024),
     {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]}),
    ("gptj", "decoder", "GPTJForCausalLM", 2, causal(1024), {"n_layer": 4}),
    ("gpt_neox", "decoder", "GPTNeoXForCausalLM", 4, causal(1024),
     {"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 8192}),
    ("opt", "decoder", "OPTForCausalLM", 8, causal(1024), {}),
    ("bloom", "decoder", "BloomForCausalLM", 4, causal(1024),
     {"hidden_size": 1024, "n_layer": 12, "n_head": 16}),
    ("llama", "decoder", "LlamaForCausalLM", 2, causal(2048),
     _few(4, num_key_value_heads=8, intermediate_size=14_336, vocab_size=128_256)),
    ("mistral", "decoder", "MistralForCausalLM", 2, causal(2048), _few(4)),
    ("qwen2", "decoder", "Qwen2ForCausalLM", 4, causal(2048),
     {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
      "intermediate_size": 4864, "tie_word_embeddings": True}),
    ("qwen3", "decoder", "Qwen3ForCausalLM", 4, causal(2048),
     {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
      "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True}),
    ("gemma2", "decoder", "Gemma2ForCausalLM", 1, causal(2048), _few(8)),
    ("gemma3", "decoder", "Gemma3ForCausalLM", 2, causal(2048),
     _few(12, hidden_size=1152, intermediate_size=6912, num_attention_heads=4, num_key_value_heads=1,
          head_dim=256, sliding_window=512)),
    ("phi", "decoder", "PhiForCausalLM", 2, causal(2048), _few(12)),
    ("phi3", "decoder", "Phi3ForCausalLM", 2, causal(2048), _few(8)),
    ("falcon", "decoder", "FalconForCausalLM", 2, causal(1024), _few(4, new_decoder_architecture=False)),
    ("mpt", "decoder", "MptForCausalLM", 4, causal(1024), {"n_layers": 8}),
    ("stablelm", "decoder", "StableLmForCausalLM", 4, causal(2048), _few(12)),
    ("olmo2", "decoder", "Olmo2ForCausalLM", 2, causal(2048), _few(4)),
    ("starcoder2", "decoder", "Starcoder2ForCausalLM", 2, causal(2048), _few(12)),
    ("cohere", "decoder", "CohereForCausalLM", 1, causal(1024), _few(2, hidden_size=4096,
     intermediate_size=14_336, num_attention_heads=32, num_key_value_heads=8, vocab_size=64_000)),
    ("codegen", "decoder", "CodeGenForCausalLM", 4, causal(1024), {"n_layer": 6}),
    ("xglm", "decoder", "XGLMForCausalLM", 4, causal(1024), {"num_layers": 12}),
    ("imagegpt", "decoder", "ImageGPTForCausalImageModeling", 4,
     lambda _, size: {"input_ids": torch.randint(512, (size, 1024)),
                           "labels": torch.randint(512, (size, 1024))}, {}),
    # Encoders with decoders.
    ("t5", "encoder-decoder", "T5ForConditionalGeneration", 16, translated(512, 128),
     {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}),
    ("umt5", "encoder-decoder", "UMT5ForConditionalGeneration", 8, translated(256, 128),
     {"decoder_start_token_id": 0}),
    ("longt5", "encoder-decoder", "LongT5ForConditionalGeneration", 2, translated(2048, 256),
     {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0,
      "encoder_attention_type": "transient-global"}),
    ("bart", "encoder-decoder", "BartForConditionalGeneration", 8, translated(512, 128), {}),
    ("mbart", "encoder-decoder", "MBartForConditionalGeneration", 8, translated(256, 128), {}),
    ("pegasus", "encoder-decoder", "PegasusForConditionalGeneration", 8, translated(512, 128), {}),
    ("marian", "encoder-decoder", "MarianMTModel", 32, translated(128, 128),
     {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
      "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
      "pad_token_id": 58_100, "decoder_start_token_id": 58_100}),
    ("m2m100", "encoder-decoder", "M2M100ForConditionalGeneration", 8, translated(128, 128), {}),
    ("led", "encoder-decoder", "LEDForConditionalGeneration", 2, translated(2048, 256), {}),
    ("prophetnet", "encoder-decoder", "ProphetNetForConditionalGeneration", 8, translated(256, 128), {}),
    # Images.
    ("vit", "vision", "ViTForImageClassification", 64, pictures(224), {}),
    ("deit", "vision", "DeiTForImageClassification", 64, pictures(224), {}),
    ("beit", "vision", "BeitForImageClassification", 32, pictures(224),
     {"use_relative_position_bias": True, "use_mask_token": False}),
    ("swin", "vision", "SwinForImageClassification", 64, pictures(224), {}),
    ("swinv2", "vision", "Swinv2ForImageClassification", 32, pictures(256), {"image_size": 256,
     "window_size": 8}),
    ("convnext", "vision", "ConvNextForImageClassification", 64, pictures(224), {}),
    ("convnextv2", "vision", "ConvNextV2ForImageClassification", 64, pictures(224), {}),
    ("resnet", "vision", "ResNetForImageClassification", 64, pictures(224), {}),
    ("regnet", "vision", "RegNetForImageClassification", 64, pictures(224), {}),
    ("efficientnet", "vision", "EfficientNetForImageClassification", 16, pictures(300),
     {"image_size": 300, "width_coefficient": 1.2, "depth_coefficient": 1.4, "hidden_dim": 1536}),
    ("mobilenet_v2", "vision", "MobileNetV2ForImageClassification", 64, pictures(224), {}),
    ("mobilevit", "vision", "MobileViTForImageClassification", 64, pictures(256), {}),
    ("pvt_v2", "vision", "PvtV2ForImageClassification", 64, pictures(224), {}),
    ("poolformer", "vision", "PoolFormerForImageClassification", 64, pictures(224), {}),
    ("levit", "vision", "LevitForImageClassification", 64, pictures(224), {}),
    ("cvt", "vision", "CvtForImageClassification", 32, pictures(224), {}),
    ("bit", "vision", "BitForImageClassification", 32, pictures(224), {}),
    ("focalnet", "vision", "FocalNetForImageClassification", 32, pictures(224), {}),
    ("dinov2", "vision", "Dinov2ForImageClassification", 32, pictures(224), {"image_size": 518,
     "patch_size": 14}),
    ("hiera", "vision", "HieraForImageClassification", 32, pictures(224), {}),
    ("vit_mae", "vision", "ViTMAEForPreTraining", 64, unlabelled(224), {}),
    ("perceiver", "vision", "PerceiverForImageClassificationLearned", 4, pictures(224, key="labels"),
     {"image_size": 224}),
    ("videomae", "vision", "VideoMAEForVideoClassification", 8, videos(16, 224), {}),
    ("timesformer", "vision", "TimesformerForVideoClassification", 4, videos(8, 224), {}),
    ("vivit", "vision", "VivitForVideoClassification", 2, videos(32, 224), {}),
    # Detection.
    ("detr", "detection", "DetrForObjectDetection", 4, boxes(800), {**WITHOUT_TIMM,
     "backbone_config": RESNET, "num_labels": 91}),
    ("conditional_detr", "detection", "ConditionalDetrForObjectDetection", 4, boxes(640), {**WITHOUT_TIMM,
     "backbone_config": RESNET, "num_labels": 91}),
    ("deformable_detr", "detection", "DeformableDetrForObjectDetection", 2, boxes(640), {**WITHOUT_TIMM,
     "backbone_config": RESNET_PYRAMID, "num_labels": 91}),
    ("rt_detr", "detection", "RTDetrForObjectDetection", 4, boxes(640), {"num_labels": 80}),
    ("yolos", "detection", "YolosForObjectDetection", 4, boxes(512), {"num_labels": 91}),
    # Segmentation and depth.
    ("segformer", "segmentation", "SegformerForSemanticSegmentation", 8, maps(512, 150),
     {"num_labels": 150}),
    ("upernet", "segmentation", "UperNetForSemanticSegmentation", 4, maps(512, 150),
     {"backbone_config": SWIN, "num_labels": 150, "backbone": None}),
    ("maskformer", "segmentation", "MaskFormerForInstanceSegmentation", 2, instances(384),
     {"num_labels": 80}),
    ("mask2former", "segmentation", "Mask2FormerForUniversalSegmentation", 2, instances(384),
     {"num_labels": 80}),
    ("dpt", "segmentation", "DPTForSemanticSegmentation", 8, maps(384, 150), {"num_labels": 150,
     "is_hybrid": False}),
    ("beit_seg", "segmentation", "BeitForSemanticSegmentation", 4, maps(224, 150), {"num_labels": 150}),
    ("glpn", "segmentation", "GLPNForDepthEstimation", 4, depths(384), {}),
    # Sound.
    ("wav2vec2", "audio", "Wav2Vec2ForCTC", 4, speech(10), {}),
    ("hubert", "audio", "HubertForCTC", 4, speech(10), {}),
    ("wavlm", "audio", "WavLMForCTC", 4, speech(10), {}),
    ("sew", "audio", "SEWForCTC", 4, speech(10), {}),
    ("wav2vec2_conformer", "audio", "Wav2Vec2ConformerForCTC", 4, speech(10), {}),
    ("whisper", "audio", "WhisperForConditionalGeneration", 4, spectrum(80, 3000),
     {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
      "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
      "decoder_start_token_id": 50_257}),
    ("speech_to_text", "audio", "Speech2TextForConditionalGeneration", 8, spectrum(1000, 80), {}),
    ("ast", "audio", "ASTForAudioClassification", 8,
     lambda config, size: {"input_values": torch.randn(size, 1024, 128),
                           "labels": torch.randint(config.num_labels, (size,))}, {}),
    ("moonshine", "audio", "MoonshineForConditionalGeneration", 4,
     lambda config, size: {"input_values": torch.randn(size, 160_000),
                           "labels": torch.randint(config.vocab_size, (size, 60))}, {}),
    # Images with text.
    ("clip", "multimodal", "CLIPModel", 64, captioned(224, 77, return_loss=True), {}),
    ("siglip", "multimodal", "SiglipModel", 64, captioned(224, 64, return_loss=True), {}),
    ("blip", "multimodal", "BlipForConditionalGeneration", 8,
     lambda config, size: {**(made := captioned(384, 32)(config, size)), "labels": made["input_ids"]}, {}),
    ("vilt", "multimodal", "ViltForQuestionAnswering", 8, asked(384, 40), {"num_labels": 3129}),
    ("git", "multimodal", "GitForCausalLM", 8,
     lambda config, size: {**(made := captioned(224, 64)(config, size)), "labels": made["input_ids"]}, {}),
    ("layoutlmv3", "multimodal", "LayoutLMv3ForTokenClassification", 8, pages(224, 512), {}),
    ("trocr", "multimodal", "VisionEncoderDecoderModel", 8, read_aloud(384, 64),
     {"encoder": {"model_type": "vit", "image_size": 384},
      "decoder": {"model_type": "trocr", "d_model": 1024, "decoder_layers": 12, "is_decoder": True,
                  "add_cross_attention": True, "cross_attention_hidden_size": 768},
      "decoder_start_token_id": 0, "pad_token_id": 1}),
    ("llava", "multimodal", "LlavaForConditionalGeneration", 2, shown(336, 576, 512),
     {"text_config": {"config": "LlamaConfig", **_few(4), "vocab_size": 32_064},
      "vision_config": {"config": "CLIPVisionConfig", "hidden_size": 1024, "intermediate_size": 4096,
                        "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14,
                        "image_size": 336},
      "image_token_index": 32_000}),
    ("qwen2_vl", "multimodal", "Qwen2VLForConditionalGeneration", 2, patches(28, 256),
     {"text_config": {"config": "Qwen2VLTextConfig", **_few(8), "hidden_size": 1536,
                      "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
                      "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
      "vision_config": {"config": "Qwen2VLVisionConfig", "depth": 12, "hidden_size": 1536},
      "image_token_id": 151_655}),
    ("paligemma", "multimodal", "PaliGemmaForConditionalGeneration", 2,
     lambda config, size: {**(made := shown(224, 256, 128)(config, size)),
                           "token_type_ids": torch.ones_like(made["input_ids"])},
     {"text_config": {"config": "GemmaConfig", **_few(6), "hidden_size": 2048,
                      "intermediate_size": 16_384, "num_attention_heads": 8, "num_key_value_heads": 1,
                      "vocab_size": 257_216},
      "vision_config": {"config": "SiglipVisionConfig", "hidden_size": 1152, "intermediate_size": 4304,
                        "num_hidden_layers": 12, "num_attention_heads": 16, "patch_size": 14,
                        "image_size": 224},
      "image_token_index": 257_152, "projection_dim": 2048}),
    # Mixtures of experts.
    ("mixtral", "moe", "MixtralForCausalLM", 2, causal(1024), _few(1)),
    ("qwen2_moe", "moe", "Qwen2MoeForCausalLM", 2, causal(1024), _few(2)),
    ("qwen3_moe", "moe", "Qwen3MoeForCausalLM", 2, causal(1024),
     _few(2, hidden_size=2048, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)),
    ("olmoe", "moe", "OlmoeForCausalLM", 2, causal(1024), _few(4)),
    ("granite_moe", "moe", "GraniteMoeForCausalLM", 4, causal(1024),
     _few(12, hidden_size=1024, intermediate_size=512, num_attention_heads=16, num_key_value_heads=8,
          num_local_experts=32, num_experts_per_tok=8, vocab_size=49_155)),
    ("deepseek_v3", "moe", "DeepseekV3ForCausalLM", 1, causal(1024),
     _few(2, hidden_size=2048, n_routed_experts=64, num_experts_per_tok=6, n_group=8, topk_group=4,
          first_k_dense_replace=1, num_attention_heads=16, num_key_value_heads=16, vocab_size=102_400)),
    ("gpt_oss", "moe", "GptOssForCausalLM", 1, causal(1024),
     _few(2, num_local_experts=32, vocab_size=201_088, layer_types=["sliding_attention", "full_attention"])),
    ("switch", "moe", "SwitchTransformersForConditionalGeneration", 8, translated(256, 128),
     {"decoder_start_token_id": 0}),
    ("phimoe", "moe", "PhimoeForCausalLM", 1, causal(1024),
     _few(1, num_local_experts=8, intermediate_size=6400)),
    # State spaces and recurrence.
    ("mamba", "state-space", "MambaForCausalLM", 8, causal(32), _few(2)),
    ("mamba2", "state-space", "Mamba2ForCausalLM", 2, causal(512),
     _few(8, hidden_size=768, num_heads=24, head_dim=64)),
    ("falcon_mamba", "state-space", "FalconMambaForCausalLM", 4, causal(32), _few(2)),
    ("rwkv", "state-space", "RwkvForCausalLM", 16, causal(32),
     {"hidden_size": 1024, "num_hidden_layers": 2, "attention_hidden_size": 1024}),
    ("recurrent_gemma", "state-space", "RecurrentGemmaForCausalLM", 2, causal(512), _few(6)),
    ("jamba", "state-space", "JambaForCausalLM", 4, causal(32),
     _few(2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
          hidden_size=2048, intermediate_size=7168, num_experts=4, use_mamba_kernels=False)),
    ("bamba", "state-space", "BambaForCausalLM", 1, causal(512), _few(3, attn_layer_indices=[1])),
    ("zamba2", "state-space", "Zamba2ForCausalLM", 1, causal(256), _few(6)),
    ("lfm2", "state-space", "Lfm2ForCausalLM", 4, causal(1024),
     _few(8, hidden_size=1024, intermediate_size=6656, full_attn_idxs=[2, 5])),
    ("qwen3_next", "state-space", "Qwen3NextForCausalLM", 1, causal(512),
     _few(4, num_experts=32, num_experts_per_tok=4)),
    ("xlstm", "state-space", "xLSTMForCausalLM", 1, causal(256),
     {"hidden_size": 1024, "num_blocks": 4, "num_heads": 4, "num_hidden_layers": 4}),
    # Numbers over time.
    ("patchtst", "series", "PatchTSTForPrediction", 64, series(512, 7, 96),
     {"num_input_channels": 7, "context_length": 512, "prediction_length": 96, "patch_length": 16,
      "patch_stride": 8, "d_model": 128, "num_attention_heads": 16, "ffn_dim": 256}),
    ("patchtsmixer", "series", "PatchTSMixerForPrediction", 64, series(512, 7, 96),
     {"num_input_channels": 7, "context_length": 512, "prediction_length": 96, "patch_length": 16,
      "patch_stride": 8, "d_model": 128}),
    ("informer", "series", "InformerForPrediction", 64, dated(96, 24, 7),
     {"prediction_length": 24, "context_length": 96, "num_time_features": 4, "d_model": 256,
      "encoder_layers": 3, "decoder_layers": 2}),
    ("decision", "series", "DecisionTransformerModel", 64, played(20), {}),
]  # fmt: skip


def _transformers(row: Row) -> Entry:
    name, family, architecture, micro_batch, inputs, changes = row

    def build() -> TransformersJob:
        return TransformersJob(name, architecture, inputs, changes, LOSSES.get(name))

    return Entry(name, family, micro_batch, build)


def _written() -> list[Entry]:
    """The models of zoo_models.py and of five more files, which stand beside this file."""
    models = _load_beside("zoo_models")
    for file in ("zoo_later", "zoo_blind", "zoo_newest", "zoo_check", "zoo_unseen"):
        _load_beside(file)  # adds its jobs to those of zoo_models.py
    return [Entry(job.name, "written", job.micro_batch, job) for job in models.JOBS]


def _load_beside(file: str) -> Any:
    name = f"trimtab_{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{file}.py"))
        assert spec is not None  # noqa: S101 - a .py file has a loader
        assert spec.loader is not None  # noqa: S101
        module = importlib.util.module_from_spec(spec)
        with warnings.catch_warnings():
            # torch.jit.script is deprecated, and widely used.
            warnings.simplefilter("ignore", DeprecationWarning)
            spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


@functools.cache
def entries() -> dict[str, Entry]:
    """All models by name."""
    return {entry.name: entry for entry in (*map(_transformers, ROWS), *_written())}


def __getattr__(name: str) -> Any:
    """A job by its name, so that `bench/zoo.py:NAME` is one."""
    if name.startswith("_") or name not in entries():
        raise AttributeError(name)
    return entries()[name].build()


# ---------------------------------------------------------------------------------------------- the program


@dataclass
class Line:
    """What came of one model."""

    name: str
    family: str
    micro_batch: int
    answered: bool = False
    seconds: float = 0.0
    """That tracing took."""
    words: str = ""
    """Why there is no answer."""
    exit_code: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    step_s: float = 0.0
    mfu: float = 0.0
    flops: int = 0
    parameters: int = 0
    assumptions: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.name:18} {self.family:16} {self.micro_batch:3}  "
        if not self.answered:
            return f"{head}refused ({self.exit_code}): {self.words}"
        memory = (
            f"{self.allocated_bytes / 2**30:6.2f} GiB allocated, {self.reserved_bytes / 2**30:6.2f} reserved"
        )
        return f"{head}{memory}, {1e3 * self.step_s:7.1f} ms, MFU {self.mfu:.0%} ({self.seconds:.0f} s)"


def trace_entry(entry: Entry) -> Line:
    """Trace one model in this process, which cannot be used for anything else afterwards."""
    from trimtab.api.detecting import cluster
    from trimtab.api.estimating import first_device
    from trimtab.errors import TrimtabError
    from trimtab.predict.estimate import estimate_trace
    from trimtab.spec import Precision, Setting, Trace
    from trimtab.trace import worker
    from trimtab.trace.request import TraceRequests
    from trimtab.trace.server import decode_answer

    began = time.monotonic()
    line = Line(name=entry.name, family=entry.family, micro_batch=entry.micro_batch)
    where = cluster(DEVICE)
    device = first_device(where)
    size = entry.micro_batch
    setting = Setting(micro_batch=size, global_batch=size, precision=Precision.BF16)
    requests = TraceRequests(
        job=f"{entry.place}:{entry.name}", settings=(setting,), device=device, timeout_s=TIMEOUT_S
    )
    try:
        ready = worker.prepare_job(requests)
        answer = decode_answer(worker._answer_requests(ready, requests, worker.JobChecks()))  # noqa: SLF001
        if isinstance(answer, TrimtabError):
            raise answer
        trace = Trace.from_builtins(answer["trace"])
        found, _ = estimate_trace(trace, setting, device, cluster=where)
        line.answered = True
        line.allocated_bytes, line.reserved_bytes = found.allocated_bytes, found.reserved_bytes
        line.step_s, line.mfu = found.step_s or 0.0, found.mfu or 0.0
        line.flops = sum(trace.works[number].flops for number in trace.sequence)
        line.parameters, line.assumptions = trace.parameters, list(trace.assumptions)
    except TrimtabError as error:
        line.words, line.exit_code = str(error), error.exit_code
    line.seconds = time.monotonic() - began
    return line


def in_copy(entry: Entry) -> Line:
    """Trace one model in a copy of this process, which has torch and transformers loaded already."""
    read, write = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        os.setsid()
        os.close(read)
        with open(os.devnull, "wb") as nothing, os.fdopen(write, "w") as answer:  # noqa: PTH123
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
            answer.write(json.dumps(asdict(trace_entry(entry))))
            answer.flush()
            os._exit(0)
    os.close(write)
    line = Line(name=entry.name, family=entry.family, micro_batch=entry.micro_batch, exit_code=1)
    line.words = "the process that traced it ended without an answer"
    said = bytearray()
    with os.fdopen(read, "rb", buffering=0) as answer:
        while select.select([answer], [], [], max(0.0, began + 2 * TIMEOUT_S - time.monotonic()))[0]:
            more = answer.read(2**16)
            if not more:
                break
            said += more
        else:
            line.words = f"tracing took more than {2 * TIMEOUT_S:.0f} s"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    line.seconds = time.monotonic() - began
    return Line(**json.loads(said)) if said else line


def main() -> None:
    """Trace the models that were asked for, one after another."""
    parser = argparse.ArgumentParser(description="Trace the models of the zoo.")
    parser.add_argument("--only", metavar="NAME,...", help="trace these models; default: all")
    parser.add_argument("--family", choices=FAMILIES, help="trace the models of one family")
    parser.add_argument("--list", action="store_true", help="print names and families, and trace nothing")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="append a JSON line a model; skip those in it"
    )
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(entries())
    unknown = [name for name in names if name not in entries()]
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; --list prints the names")
    wanted = [entries()[name] for name in names if args.family in (None, entries()[name].family)]
    if args.list:
        for entry in wanted:
            print(f"{entry.name:20} {entry.family:16} micro-batch {entry.micro_batch}")
        return
    done = set()
    if args.out is not None and args.out.is_file():
        done = {json.loads(text)["name"] for text in args.out.read_text(encoding="utf-8").splitlines()}
    answered = refused = 0
    import_once()
    for entry in wanted:
        if entry.name in done:
            continue
        line = in_copy(entry)
        print(line, flush=True)
        answered, refused = answered + line.answered, refused + (not line.answered)
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(line)) + "\n")
    print(f"{answered} answered, {refused} refused, {len(wanted) - answered - refused} skipped")


def import_once() -> None:
    """Import what every model needs, before copies of this process are made."""
    import transformers
    import transformers.modeling_utils

    import trimtab.api.estimating
    import trimtab.predict.estimate
    import trimtab.trace.worker

    _ = transformers.PreTrainedModel, trimtab.api.estimating.estimate


if __name__ == "__main__":
    main()
