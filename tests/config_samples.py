"""Configs in the layouts of the frameworks, written for these tests."""

from __future__ import annotations

HYDRA = """\
# the whole training
defaults:
  - _self_
  - curriculum: 01_stage

experiment_name: codes   # shown in the log
seed: 42
data_loader:
  batch_size: 4          # anchors
  num_workers: 2
model:
  base_model_name: all-MiniLM-L6-v2
  lora: {r: 8, alpha: 16, dropout: 0.1}
  moe:
    num_experts: 4
    top_k: 2
    hidden_dim: 1024
training:
  learning_rate: 2e-4
  trainer:
    max_epochs: 5
    devices: 1
    precision: "16-mixed"
    accumulate_grad_batches: 16
"""

STAGE = """\
# stage {number}
name: {number:02}_stage
anchor_level: {number}
n_positives: {positives}
n_negatives: {negatives}  # the costly ones
"""

SLM = '''\
"""Settings of the small model."""

slm_config = {
    "max_length": 1024,
    "batch_size": 18,  # per GPU
    "enable_tf32": True,
    "enable_amp": True,
    "amp_dtype": "bf16",
    "enable_compile": False,
    "learning_rate": 3e-4,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
}

gpu_config = {"auto_detect": True, "max_gpus": 2}
'''

ARGUMENTS_PY = """\
from transformers import TrainingArguments

args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,  # fits a 3090
    gradient_accumulation_steps=8,
    bf16=True,
    learning_rate=2e-5,
)
"""

ARGUMENTS_YAML = """\
output_dir: out
per_device_train_batch_size: 4
gradient_accumulation_steps: 8   # 32 in all
fp16: true
optim: adamw_torch
dataloader_num_workers: 2
"""

ARGUMENTS_JSON = """\
{
  "output_dir": "out",
  "per_device_train_batch_size": 16,
  "tf32": false
}
"""

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
machine_rank: 0
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: false
"""

ACCELERATE_FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""

DEEPSPEED = """\
{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "bf16": {"enabled": false},
  "fp16": {"enabled": true, "loss_scale": 0},
  "zero_optimization": {"stage": 2, "overlap_comm": true}
}
"""

DEEPSPEED_AUTO = """\
{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "bf16": {"enabled": "auto"},
  "fp16": {"enabled": "auto"},
  "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}
}
"""

LIGHTNING = """\
seed_everything: 1
trainer:
  accelerator: gpu
  devices: [0, 1]
  strategy: ddp
  precision: 32
  accumulate_grad_batches: 1
model:
  class_path: ours.Model
data:
  class_path: ours.Data
  init_args:
    batch_size: 16
    num_workers: 4
"""

TORCHTITAN = """\
[model]
name = "llama3"

[training]
local_batch_size = 8
seq_len = 2048      # tokens
steps = 1000

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2

[activation_checkpoint]
mode = "selective"  # none, selective, full

[compile]
enable = false
"""

AXOLOTL = """\
base_model: ./model
datasets:
  - path: ours.jsonl
    type: alpaca
sequence_len: 2048
adapter: lora
lora_r: 16
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
bf16: true
tf32: false
gradient_checkpointing: true
"""

LLAMA_FACTORY = """\
### model
model_name_or_path: ./model

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8

### dataset
template: llama3
cutoff_len: 2048

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
bf16: true
"""

SBATCH = """\
#!/bin/bash
#SBATCH --job-name=ours
#SBATCH --nodes=1
#SBATCH --gres=gpu:a100:2
srun python train.py
"""

ENV = """\
# how to start it
export NPROC_PER_NODE=2
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False
"""

SAMPLES = {
    "hydra-lightning": [("config.yaml", HYDRA)],
    "slm-config": [("config.py", SLM)],
    "transformers": [
        ("train.py", ARGUMENTS_PY),
        ("args.yaml", ARGUMENTS_YAML),
        ("args.json", ARGUMENTS_JSON),
    ],
    "accelerate": [("accelerate.yaml", ACCELERATE), ("fsdp.yaml", ACCELERATE_FSDP)],
    "deepspeed": [("ds.json", DEEPSPEED), ("auto.json", DEEPSPEED_AUTO)],
    "lightning": [("cli.yaml", LIGHTNING)],
    "torchtitan": [("titan.toml", TORCHTITAN)],
    "axolotl": [("axolotl.yaml", AXOLOTL)],
    "llama-factory": [("sft.yaml", LLAMA_FACTORY)],
    "slurm": [("train.sbatch", SBATCH)],
    "environment": [("train.env", ENV)],
}
