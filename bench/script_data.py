"""Make small data sets, tokenizers and models for the public scripts of bench/scripts.py, without a network.

Each function gets the folder that the script starts in and writes what the script will look for there.
Everything is generated from fixed seeds, so that two machines prepare the same data.
"""

from __future__ import annotations

import gzip
import json
import pickle
import random
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

WORDS = [
    first + second
    for first in (
        "ba",
        "co",
        "di",
        "fu",
        "ga",
        "he",
        "ki",
        "lo",
        "mu",
        "ne",
        "pa",
        "ro",
        "su",
        "ta",
        "ve",
        "zi",
    )
    for second in ("", "l", "n", "r", "s", "t", "ka", "li", "mo", "no", "pe", "ri", "sta", "ton", "ver", "x")
]
METRIC = """
import datasets
import evaluate


class Share(evaluate.Metric):
    def _info(self):
        features = datasets.Features(
            {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        )
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, **_):
        right = sum(int(a == b) for a, b in zip(predictions, references))
        return {"accuracy": right / max(1, len(references)), "f1": 0.0}
"""


def make_sentences(count: int, shortest: int, longest: int, seed: int = 0) -> list[str]:
    """Return sentences of random words."""
    draw = random.Random(seed)  # noqa: S311 - not a secret
    return [" ".join(draw.choices(WORDS, k=draw.randint(shortest, longest))) for _ in range(count)]


def write_text(folder: Path, name: str, lines: list[str]) -> None:
    """Write lines to a file of the folder."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_tokens(folder: Path, name: str = "openwebtext", vocabulary: int = 50257) -> None:
    """Write train.bin and val.bin of 16-bit tokens, as nanoGPT's preparation does."""
    target = folder / "data" / name
    target.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for split, count in (("train", 2_000_000), ("val", 200_000)):
        rng.integers(0, vocabulary, count).astype(np.uint16).tofile(target / f"{split}.bin")


def write_characters(folder: Path, name: str = "input.txt") -> None:
    """Write a text for a character model; it has every character of "O God, O God!"."""
    write_text(folder, name, ["O God, O God! " + line for line in make_sentences(4000, 8, 16)])


def write_word_corpus(folder: Path, name: str = "data/wikitext-2", vocabulary: int = 33278) -> None:
    """Write train.txt, valid.txt and test.txt with the vocabulary of WikiText-2."""
    draw = random.Random(0)  # noqa: S311 - not a secret
    words = [f"w{index}" for index in range(vocabulary - 1)]
    lines = [" ".join(words[start : start + 24]) for start in range(0, len(words), 24)]
    lines += [" ".join(draw.choices(words, k=24)) for _ in range(10_000)]
    write_text(folder, f"{name}/train.txt", lines)
    for split in ("valid", "test"):
        write_text(folder, f"{name}/{split}.txt", lines[-1000:])


def write_wikitext_file(folder: Path) -> None:
    """Write the one file that Lightning's WikiText2 reads."""
    write_word_corpus(folder, "data")
    (folder / "data" / "train.txt").rename(folder / "data" / "wikitext-2.txt")


def write_digits(folder: Path, root: str = "../data") -> None:
    """Write MNIST's files with random digits."""
    raw = folder / root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for split, count in (("train", 60_000), ("t10k", 10_000)):
        images = (
            struct.pack(">IIII", 2051, count, 28, 28) + rng.integers(0, 256, count * 784, np.uint8).tobytes()
        )
        labels = struct.pack(">II", 2049, count) + rng.integers(0, 10, count, np.uint8).tobytes()
        for kind, content in ((f"{split}-images-idx3", images), (f"{split}-labels-idx1", labels)):
            (raw / f"{kind}-ubyte").write_bytes(content)
            with gzip.open(raw / f"{kind}-ubyte.gz", "wb", compresslevel=1) as file:
                file.write(b"")


def write_cifar(folder: Path, root: str = "dataset") -> None:
    """Write CIFAR-10's files with random images."""
    target = folder / root / "cifar-10-batches-py"
    target.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"):
        entry = {
            "data": rng.integers(0, 256, (400, 3072), np.uint8),
            "labels": rng.integers(0, 10, 400).tolist(),
        }
        (target / name).write_bytes(pickle.dumps(entry))
    (target / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(index) for index in range(10)]}))


def write_images(folder: Path, root: str = "images", classes: int = 10, each: int = 80) -> None:
    """Write a folder of JPEG files, one folder a class, for training and validation."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in (("train", each), ("val", max(8, each // 10))):
        for index in range(classes):
            target = folder / root / split / f"class{index}"
            target.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                small = rng.integers(0, 256, (16, 16, 3), np.uint8)
                Image.fromarray(small).resize((256, 256)).save(target / f"{number}.jpg")


def write_two_styles(folder: Path, root: str = "../../data/monet2photo", each: int = 24) -> None:
    """Write JPEG files of two kinds, A and B, without pairs, for training and testing."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for kind in ("A", "B"):
            target = folder / root / split / kind
            target.mkdir(parents=True, exist_ok=True)
            for number in range(each):
                small = rng.integers(0, 256, (16, 16, 3), np.uint8)
                Image.fromarray(small).resize((256, 256)).save(target / f"{number}.jpg")


WORD_SHARE = 0.0127
"""Share of the vocabulary that a paper of Cora has."""


def write_citations(folder: Path, root: str = "cora", papers: int = 2708, words: int = 1433) -> None:
    """Write a graph with the shape of Cora: papers with words and a class, and who cites whom."""
    target = folder / root
    target.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    has_word = rng.random((papers, words)) < WORD_SHARE
    classes = rng.integers(0, 7, papers)
    rows = [
        "\t".join([str(1000 + index), *map(str, has_word[index].astype(int)), f"class{classes[index]}"])
        for index in range(papers)
    ]
    write_text(target, "cora.content", rows)
    links = rng.integers(0, papers, (5429, 2)) + 1000
    write_text(target, "cora.cites", [f"{first}\t{second}" for first, second in links])


def make_tokenizer(vocabulary: int, special: list[str]) -> Any:
    """Return a byte-level BPE tokenizer, trained on random words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(make_sentences(3000, 8, 16), trainer)
    return tokenizer


def write_decoder(folder: Path, name: str, kind: str, dtype: str = "float32", **shape: Any) -> None:
    """Write a causal language model with random weights, and its tokenizer, as a Hugging Face folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(2000, special),
        bos_token=special[0],
        eos_token=special[0],
        pad_token=special[3],
        model_max_length=1024,
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **shape, bos_token_id=0, eos_token_id=0, pad_token_id=3)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)


def write_gpt2(folder: Path, name: str = "gpt2") -> None:
    """Write GPT-2 small."""
    write_decoder(folder, name, "gpt2")


def write_llama(folder: Path, name: str = "llama-1b") -> None:
    """Write a model with the shape of Llama 3.2 1B, in bf16."""
    write_decoder(
        folder,
        name,
        "llama",
        "bfloat16",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
    )


def write_bert(folder: Path, name: str = "bert-base-cased") -> None:
    """Write BERT base with a WordPiece tokenizer."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: index for index, word in enumerate([*special, *sorted(set(WORDS))])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106 - not a password
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",  # noqa: S106
        unk_token="[UNK]",  # noqa: S106
        cls_token="[CLS]",  # noqa: S106
        sep_token="[SEP]",  # noqa: S106
        mask_token="[MASK]",  # noqa: S106
        model_max_length=512,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(vocab_size=28996)).save_pretrained(folder / name)
    fast.save_pretrained(folder / name)


def write_metric(folder: Path, name: str) -> None:
    """Write a metric of the `evaluate` library under a name that it would fetch otherwise."""
    write_text(folder, f"{name}/{name}.py", [METRIC])


def write_pairs(folder: Path) -> None:
    """Write pairs of sentences with labels: as the data set nyu-mll/glue, mrpc."""
    target = folder / "nyu-mll" / "glue"
    for split, count in (("train", 640), ("validation", 64), ("test", 64)):
        firsts, seconds = make_sentences(count, 12, 36, 1), make_sentences(count, 12, 36, 2)
        rows = [
            {"sentence1": first, "sentence2": second, "label": index % 2, "idx": index}
            for index, (first, second) in enumerate(zip(firsts, seconds, strict=True))
        ]
        write_text(target, f"{split}.jsonl", [json.dumps(row) for row in rows])
    files = "".join(
        f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "validation", "test")
    )
    features = "".join(
        f"  - name: {name}\n    dtype: {kind}\n"
        for name, kind in (("sentence1", "string"), ("sentence2", "string"), ("idx", "int64"))
    )
    names = "          '0': other\n          '1': same\n"
    label = f"  - name: label\n    dtype:\n      class_label:\n        names:\n{names}"
    info = f"dataset_info:\n- config_name: mrpc\n  features:\n{features}{label}"
    configs = f"configs:\n- config_name: mrpc\n  data_files:\n{files}"
    write_text(target, "README.md", [f"---\n{info}{configs}---"])


def write_chats(folder: Path, name: str = "chats") -> None:
    """Write conversations, as TRL's supervised fine-tuning takes them."""
    questions, answers = make_sentences(400, 10, 60, 3), make_sentences(400, 60, 300, 4)
    rows = [
        json.dumps(
            {"messages": [{"role": "user", "content": first}, {"role": "assistant", "content": second}]}
        )
        for first, second in zip(questions, answers, strict=True)
    ]
    write_text(folder, f"{name}/train.jsonl", rows)


def write_corpus(folder: Path) -> None:
    """Write a text file of sentences, to train and to validate."""
    write_text(folder, "train.txt", make_sentences(6000, 10, 30))
    write_text(folder, "validation.txt", make_sentences(600, 10, 30, 9))


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows of a data set as lines of JSON."""
    write_text(folder, name, [json.dumps(row) for row in rows])


def write_translations(folder: Path) -> None:
    """Write pairs of sentences in two languages, to train and to validate."""
    for name, count, seed in (("train.json", 800, 1), ("validation.json", 40, 5)):
        pairs = zip(make_sentences(count, 10, 60, seed), make_sentences(count, 10, 60, seed + 1), strict=True)
        write_rows(folder, name, [{"translation": {"en": first, "ro": second}} for first, second in pairs])


def write_tags(folder: Path) -> None:
    """Write sentences with a tag for each word, to train and to validate."""
    draw = random.Random(0)  # noqa: S311 - not a secret
    for name, count, seed in (("train.json", 600, 1), ("validation.json", 40, 2)):
        sentences = [text.split() for text in make_sentences(count, 20, 80, seed)]
        rows = [
            {"tokens": words, "ner_tags": [draw.choice(["O", "B-PER", "I-PER"]) for _ in words]}
            for words in sentences
        ]
        write_rows(folder, name, rows)


def write_preferences(folder: Path, name: str = "preferences") -> None:
    """Write questions with a better and a worse answer, as TRL's DPO takes them."""
    texts = zip(
        make_sentences(300, 10, 60, 3), make_sentences(300, 40, 200, 4), make_sentences(300, 40, 200, 5),
        strict=True,
    )  # fmt: skip
    rows = [
        {
            key: [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            for key, answer in (("chosen", better), ("rejected", worse))
        }
        for question, better, worse in texts
    ]
    write_rows(folder, f"{name}/train.jsonl", rows)


def write_questions(folder: Path, name: str = "questions") -> None:
    """Write questions for a model to answer, as TRL's GRPO takes them."""
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in make_sentences(300, 10, 60, 6)]
    write_rows(folder, f"{name}/train.jsonl", rows)


def write_qwen(folder: Path, name: str = "qwen-half-b") -> None:
    """Write a model with the shape of Qwen2.5 0.5B, in bf16."""
    write_decoder(
        folder,
        name,
        "qwen2",
        "bfloat16",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    )


def write_t5(folder: Path, name: str = "t5-base") -> None:
    """Write T5 base, and a tokenizer with its special tokens."""
    import torch
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    special = ["<pad>", "</s>", "<unk>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(2000, special),
        pad_token=special[0],
        eos_token=special[1],
        unk_token=special[2],
        model_max_length=512,
    )
    torch.manual_seed(0)
    config = T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12)
    config.decoder_start_token_id = 0
    T5ForConditionalGeneration(config).save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)


def write_pictures(folder: Path, name: str = "pictures", count: int = 60) -> None:
    """Write a folder of JPEG files with a text for each, as `imagefolder` of datasets takes them."""
    from PIL import Image

    rng = np.random.default_rng(0)
    (folder / name).mkdir(parents=True, exist_ok=True)
    texts = make_sentences(count, 5, 12)
    for number in range(count):
        small = rng.integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(small).resize((512, 512)).save(folder / name / f"{number}.jpg")
    rows = [{"file_name": f"{number}.jpg", "text": text} for number, text in enumerate(texts)]
    write_rows(folder, f"{name}/metadata.jsonl", rows)


def write_diffusion(folder: Path, name: str = "diffusion") -> None:
    """Write a latent diffusion pipeline of the kind of Stable Diffusion, with fewer channels."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel  # type: ignore[import-not-found]
    from transformers import CLIPTextConfig, CLIPTextModel

    target = folder / name
    torch.manual_seed(0)
    words = _write_clip_tokenizer(target / "tokenizer")
    ends: dict[str, Any] = {"bos_token_id": words - 2, "eos_token_id": words - 1, "pad_token_id": words - 1}
    CLIPTextModel(CLIPTextConfig(vocab_size=words, **ends)).save_pretrained(target / "text_encoder")
    UNet2DConditionModel(
        sample_size=64,
        block_out_channels=(160, 320, 640, 640),
        cross_attention_dim=512,
    ).save_pretrained(target / "unet")
    AutoencoderKL(
        block_out_channels=(64, 128, 256, 256),
        layers_per_block=2,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    ).save_pretrained(target / "vae")
    DDPMScheduler(beta_schedule="scaled_linear").save_pretrained(target / "scheduler")
    classes = {
        "scheduler": ("diffusers", "DDPMScheduler"),
        "text_encoder": ("transformers", "CLIPTextModel"),
        "tokenizer": ("transformers", "CLIPTokenizer"),
        "unet": ("diffusers", "UNet2DConditionModel"),
        "vae": ("diffusers", "AutoencoderKL"),
    } | dict.fromkeys(("feature_extractor", "safety_checker", "image_encoder"), (None, None))
    index = {"_class_name": "StableDiffusionPipeline", "requires_safety_checker": False, **classes}
    write_text(target, "model_index.json", [json.dumps(index)])


def _write_clip_tokenizer(folder: Path) -> int:
    """Write the files of a tokenizer of single letters; return the size of its vocabulary."""
    letters = [chr(number) for number in range(33, 127)]
    special = ["<|startoftext|>", "<|endoftext|>"]
    words = [*letters, *(letter + "</w>" for letter in letters), *special]
    write_text(folder, "vocab.json", [json.dumps({word: index for index, word in enumerate(words)})])
    write_text(folder, "merges.txt", ["#version: 0.2"])
    names = {"bos_token": special[0]} | dict.fromkeys(("eos_token", "pad_token", "unk_token"), special[1])
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, **names}
    write_text(folder, "tokenizer_config.json", [json.dumps(settings)])
    return len(words)
