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

TORCHTUNE = """\
model:
  _component_: torchtune.models.llama3_1.qlora_llama3_1_8b
  apply_lora_to_mlp: True
  lora_rank: 16   # of the adapters
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 2048
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: ./model
batch_size: 2
gradient_accumulation_steps: 8
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 3e-4
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
enable_activation_checkpointing: True
enable_activation_offloading: False
compile: False
device: cuda
dtype: bf16
"""

QLORA_PY = """\
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained("./model", quantization_config=bnb_config)
tokenizer = AutoTokenizer.from_pretrained("./model", use_fast=True)
args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    gradient_checkpointing=True,
    optim="paged_adamw_8bit",  # states move to the host
    bf16=True,
)
trainer = SFTTrainer(model=model, args=args, peft_config=LoraConfig(r=32, lora_alpha=64))
"""

TRL_YAML = """\
model_name_or_path: ./model
use_peft: true
lora_r: 8
load_in_4bit: true
use_bnb_nested_quant: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
optim: adamw_bnb_8bit
loss_type: chunked_nll
activation_offloading: true
bf16: true
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

MEGATRON_BRIDGE = """\
# overrides of a recipe
model:
  seq_length: 4096
  num_layers: 80
  hidden_size: 8192
  ffn_hidden_size: 28672
  num_attention_heads: 64
  num_query_groups: 8
  tensor_model_parallel_size: 8  # one node
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 5
  context_parallel_size: 1
  sequence_parallel: true
train:
  global_batch_size: 128
  micro_batch_size: 1
mixed_precision: bf16_mixed
"""
NEMO = """\
trainer:
  devices: 8  # GPUs of a node
  num_nodes: 2
  precision: bf16
model:
  micro_batch_size: 4
  global_batch_size: 64
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  encoder_seq_length: 2048
  num_layers: 24
  hidden_size: 2048
  ffn_hidden_size: 8192
  num_attention_heads: 16
  sequence_parallel: false
"""
MEGATRON_LM = """\
#!/bin/bash
# Mixture of experts
GPUS_PER_NODE=8
NNODES=4
SEQ_LENGTH=4096
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length $SEQ_LENGTH
    --num-experts 8
    --moe-router-topk 2
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4  # --context-parallel-size 2
    --expert-model-parallel-size 8
    --sequence-parallel
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \\
    ${MODEL_ARGS[@]} ${PARALLEL_ARGS[@]} --micro-batch-size 1 --global-batch-size 256 --bf16
"""
NANOTRON = """\
model:
  dtype: bfloat16
  model_config:
    hidden_size: 2048
    intermediate_size: 11008
    num_attention_heads: 16
    num_hidden_layers: 28
    num_key_value_heads: 2
    vocab_size: 128256
parallelism:
  dp: 4
  pp: 1
  tp: 2  # within a node
  tp_mode: REDUCE_SCATTER
tokens:
  batch_accumulation_per_replica: 1
  micro_batch_size: 3
  sequence_length: 4096
"""
SAMPLES = {
    "hydra-lightning": [("config.yaml", HYDRA)],
    "slm-config": [("config.py", SLM)],
    "transformers": [
        ("train.py", ARGUMENTS_PY),
        ("args.yaml", ARGUMENTS_YAML),
        ("args.json", ARGUMENTS_JSON),
        ("qlora.py", QLORA_PY),
        ("sft.yaml", TRL_YAML),
    ],
    "accelerate": [("accelerate.yaml", ACCELERATE), ("fsdp.yaml", ACCELERATE_FSDP)],
    "deepspeed": [("ds.json", DEEPSPEED), ("auto.json", DEEPSPEED_AUTO)],
    "lightning": [("cli.yaml", LIGHTNING)],
    "torchtitan": [("titan.toml", TORCHTITAN)],
    "torchtune": [("recipe.yaml", TORCHTUNE)],
    "axolotl": [("axolotl.yaml", AXOLOTL)],
    "llama-factory": [("sft.yaml", LLAMA_FACTORY)],
    "megatron-bridge": [("bridge.yaml", MEGATRON_BRIDGE)],
    "nemo": [("nemo.yaml", NEMO)],
    "megatron-lm": [("pretrain.sh", MEGATRON_LM)],
    "nanotron": [("nanotron.yaml", NANOTRON)],
    "slurm": [("train.sbatch", SBATCH)],
    "environment": [("train.env", ENV)],
}

# --- files that say least, and files that say what no plan has ---

MINIMAL = {
    "hydra-lightning": (
        "config.yaml",
        "data_loader:\n  batch_size: 1\ntraining:\n  trainer:\n    max_epochs: 1\n",
    ),
    "slm-config": ("config.py", 'slm_config = {"batch_size": 1, "max_length": 64, "enable_amp": True}\n'),
    "transformers": ("args.yaml", "per_device_train_batch_size: 1\n"),
    "accelerate": ("accelerate.yaml", "compute_environment: LOCAL_MACHINE\nnum_processes: 1\n"),
    "deepspeed": ("ds.json", '{"train_batch_size": 1}\n'),
    "lightning": ("cli.yaml", "trainer:\n  devices: 1\n"),
    "torchtitan": ("titan.toml", "[training]\nlocal_batch_size = 1\nseq_len = 64\n"),
    "torchtune": (
        "recipe.yaml",
        """\
model: {_component_: torchtune.models.llama3.llama3_8b}
optimizer: {_component_: torch.optim.AdamW}
batch_size: 1
""",
    ),
    "axolotl": ("axolotl.yaml", "base_model: ./model\nmicro_batch_size: 1\n"),
    "llama-factory": ("sft.yaml", "model_name_or_path: ./model\nstage: sft\n"),
    "megatron-bridge": (
        "bridge.yaml",
        "model:\n  tensor_model_parallel_size: 1\ntrain:\n  micro_batch_size: 1\n",
    ),
    "nemo": ("nemo.yaml", "trainer:\n  devices: 1\nmodel:\n  tensor_model_parallel_size: 1\n"),
    "megatron-lm": ("run.sh", "torchrun pretrain_gpt.py --tensor-model-parallel-size 1\n"),
    "nanotron": (
        "nanotron.yaml",
        "parallelism: {dp: 1, tp: 1, pp: 1}\ntokens:\n  micro_batch_size: 1\n",
    ),
    "slurm": (
        "train.sbatch",
        "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=1\nsrun python train.py\n",
    ),
    "environment": ("train.env", "export NPROC_PER_NODE=1\n"),
}

CONTRADICTING = {
    "hydra-lightning": (
        "config.yaml",
        """\
data_loader: {batch_size: 3, num_workers: 7}
training:
  trainer:
    accelerator: cpu
    devices: auto
    num_nodes: 4
    strategy: deepspeed_stage_2
    precision: transformer-engine
    accumulate_grad_batches: 5
""",
    ),
    "slm-config": (
        "config.py",
        """\
slm_config = {
    "batch_size": 3,
    "max_length": 77,
    "gradient_accumulation_steps": 5,
    "enable_amp": False,
    "amp_dtype": "fp16",
    "enable_tf32": True,
    "enable_compile": True,
}
""",
    ),
    "transformers": (
        "args.yaml",
        """\
model_name_or_path: ./model
block_size: 77
per_device_train_batch_size: 3
gradient_accumulation_steps: 5
bf16: true
tf32: true
torch_dtype: bfloat16
gradient_checkpointing: true
torch_compile: true
torch_compile_mode: reduce-overhead
fsdp: "shard_grad_op auto_wrap offload"
fsdp_config:
  version: 1
  cpu_offload: true
  auto_wrap_policy: SIZE_BASED_WRAP
  activation_checkpointing: true
  reshard_after_forward: false
deepspeed: ds.json
optim: paged_adamw_8bit
auto_find_batch_size: true
use_liger_kernel: true
load_in_4bit: true
use_peft: true
lora_r: 4
packing: true
dataloader_num_workers: 7
""",
    ),
    "accelerate": (
        "accelerate.yaml",
        """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: fp8
num_machines: 3
num_processes: 6
gpu_ids: '0,1'
fsdp_config:
  fsdp_version: 1
  fsdp_offload_params: true
  fsdp_auto_wrap_policy: NO_WRAP
  fsdp_activation_checkpointing: true
  fsdp_reshard_after_forward: SHARD_GRAD_OP
  fsdp_state_dict_type: LOCAL_STATE_DICT
parallelism_config:
  parallelism_config_dp_replicate_size: 3
  parallelism_config_dp_shard_size: 1
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 1
dynamo_config:
  dynamo_backend: CUDAGRAPHS
  dynamo_mode: max-autotune
""",
    ),
    "deepspeed": (
        "ds.json",
        """\
{
  "train_batch_size": 45,
  "train_micro_batch_size_per_gpu": 3,
  "gradient_accumulation_steps": 5,
  "fp16": {"enabled": true},
  "bf16": {"enabled": false},
  "torch_autocast": {"enabled": true, "dtype": "bfloat16"},
  "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.001}},
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "nvme", "nvme_path": "/local"},
    "zero_hpz_partition_size": 8,
    "zero_quantized_weights": true
  },
  "activation_checkpointing": {"cpu_checkpointing": true, "partition_activations": true},
  "tensor_parallel": {"autotp_size": 2},
  "compile": {"deepcompile": true}
}
""",
    ),
    "lightning": (
        "cli.yaml",
        """\
trainer:
  accelerator: cpu
  devices: -1
  num_nodes: 4
  strategy: deepspeed_stage_3_offload
  precision: 64-true
  accumulate_grad_batches: 5
data:
  class_path: ours.Data
  init_args:
    batch_size: 3
    max_length: 77
    num_workers: 7
""",
    ),
    "torchtitan": (
        "titan.toml",
        """\
[model]
name = "llama3"
converters = ["float8"]

[optimizer]
name = "Adafactor"
implementation = "for-loop"
early_step_in_backward = true

[training]
local_batch_size = 3
global_batch_size = 45
seq_len = 8192
enable_cpu_offload = true
dtype = "bfloat16"
mixed_precision_param = "float32"

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
context_parallel_degree = 2
pipeline_parallel_degree = 2
expert_parallel_degree = 4
fsdp_reshard_after_forward = "never"

[activation_checkpoint]
mode = "memory_budget"
selective_ac_option = "2"

[compile]
enable = true
components = ["loss"]
""",
    ),
    "torchtune": (
        "recipe.yaml",
        """\
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_rank: 4
  quantize_base: True
tokenizer: {max_seq_len: 77}
dataset: {packed: True}
batch_size: 3
gradient_accumulation_steps: 5
optimizer:
  _component_: bitsandbytes.optim.PagedAdamW8bit
  lr: 3e-4
optimizer_in_bwd: True
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
enable_activation_checkpointing: False
enable_activation_offloading: True
fsdp_cpu_offload: True
fsdp_reshard_after_forward: False
enable_fp8_training: True
tensor_parallel_dim: 2
ac_mode: selective
compile: True
device: cpu
dtype: fp32
""",
    ),
    "axolotl": (
        "axolotl.yaml",
        """\
base_model: ./model
load_in_8bit: false
load_in_4bit: true
adapter: qlora
lora_r: 4
sequence_len: 77
sample_packing: true
micro_batch_size: 3
gradient_accumulation_steps: 5
optimizer: paged_adamw_8bit
bf16: auto
tf32: auto
gradient_checkpointing: offload
activation_offloading: true
torch_compile: auto
torch_compile_backend: eager
tensor_parallel_size: 2
context_parallel_size: 2
deepspeed: zero3.json
fsdp:
  - full_shard
  - auto_wrap
fsdp_config:
  fsdp_offload_params: true
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_activation_checkpointing: true
rl: dpo
""",
    ),
    "llama-factory": (
        "sft.yaml",
        """\
model_name_or_path: ./model
stage: dpo
finetuning_type: freeze
quantization_bit: 4
cutoff_len: 77
packing: true
per_device_train_batch_size: 3
gradient_accumulation_steps: 5
fp16: true
pure_bf16: true
disable_gradient_checkpointing: true
use_unsloth: true
use_galore: true
deepspeed: zero2.json
torch_compile: true
torch_compile_mode: max-autotune
optim: adafactor
""",
    ),
    "megatron-bridge": (
        "bridge.yaml",
        """\
model:
  tensor_model_parallel_size: 3
  pipeline_model_parallel_size: 5
  context_parallel_size: 2
  expert_model_parallel_size: 7
  virtual_pipeline_model_parallel_size: 3
  seq_length: 77
train:
  micro_batch_size: 3
  global_batch_size: 45
mixed_precision: 16-mixed
""",
    ),
    "nemo": (
        "nemo.yaml",
        """\
trainer:
  devices: 3
  num_nodes: 3
  precision: 16
model:
  micro_batch_size: 3
  global_batch_size: 45
  tensor_model_parallel_size: 3
  pipeline_model_parallel_size: 3
  encoder_seq_length: 77
""",
    ),
    "megatron-lm": (
        "run.sh",
        """\
GPUS_PER_NODE=3
NNODES=3
torchrun pretrain_gpt.py --tensor-model-parallel-size 3 --pipeline-model-parallel-size 3 \\
    --micro-batch-size 3 --global-batch-size 45 --seq-length 77 --fp16
""",
    ),
    "nanotron": (
        "nanotron.yaml",
        """\
model:
  dtype: float16
parallelism:
  dp: 3
  tp: 3
  pp: 3
  expert_parallel_size: 3
  context_parallel_size: 3
  recompute_layer: true
tokens:
  micro_batch_size: 3
  batch_accumulation_per_replica: 5
  sequence_length: 77
""",
    ),
    "slurm": (
        "train.sbatch",
        """\
#!/bin/bash
#SBATCH --nodes=3
#SBATCH --gres=gpu:a100:3
export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64
srun python train.py
""",
    ),
    "environment": (
        "train.env",
        "NPROC_PER_NODE=3\nNNODES=3\nPYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64\n",
    ),
}
