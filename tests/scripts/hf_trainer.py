"""python hf_trainer.py --output_dir out --per_device_train_batch_size 4 --max_steps 5"""
import json
import logging
from dataclasses import dataclass, field

import torch
import transformers
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "folder with weights"})
    model_type: str = field(default="llama")
    config_overrides: str = field(
        default='{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,'
        ' "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}'
    )
    num_labels: int = field(default=0, metadata={"help": "labels of a classifier; 0 for a language model"})
    lora_rank: int = field(default=0)


@dataclass
class DataArguments:
    block_size: int = field(default=32)
    samples: int = field(default=64)


class Tokens(Dataset):
    def __init__(self, count, length, vocab, labels):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, vocab, (count, length), generator=generator)
        self.labels = labels

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        label = index % self.labels if self.labels else tokens.clone()
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": label}


def compute_metrics(result):
    logits = result.predictions[0] if isinstance(result.predictions, tuple) else result.predictions
    return {"accuracy": float((logits.argmax(-1) == result.label_ids).mean())}


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(level=logging.INFO)
    transformers.utils.logging.set_verbosity_info()
    set_seed(training_args.seed)
    auto = AutoModelForSequenceClassification if model_args.num_labels else AutoModelForCausalLM
    if model_args.model_name_or_path:
        model = auto.from_pretrained(model_args.model_name_or_path)
    else:
        overrides = json.loads(model_args.config_overrides)
        if model_args.num_labels:
            overrides |= {"num_labels": model_args.num_labels, "pad_token_id": 0}
        model = auto.from_config(AutoConfig.for_model(model_args.model_type, **overrides))
    logger.info("parameters: %.2fM", sum(p.numel() for p in model.parameters()) / 1e6)
    if model_args.lora_rank:
        from peft import LoraConfig, get_peft_model

        task = "SEQ_CLS" if model_args.num_labels else "CAUSAL_LM"
        model = get_peft_model(
            model, LoraConfig(r=model_args.lora_rank, target_modules="all-linear", task_type=task)
        )
        model.print_trainable_parameters()
    vocab = model.config.get_text_config().vocab_size
    make = lambda count: Tokens(count, data_args.block_size, vocab, model_args.num_labels)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=make(data_args.samples) if training_args.do_train else None,
        eval_dataset=make(8) if training_args.do_eval else None,
        compute_metrics=compute_metrics if training_args.do_eval and model_args.num_labels else None,
    )
    if training_args.do_train:
        result = trainer.train()
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
