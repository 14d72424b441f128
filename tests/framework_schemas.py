"""Keys of frameworks that are not installed for the tests: names, kinds and defaults from their sources.

A default of None stands for no value. `...` stands for a default that is worked out.
"""

from __future__ import annotations

from typing import Any

TORCHTITAN = {
    # torchtitan v0.2.2 (20 February 2026), torchtitan/config/job_config.py: the last release with TOML files.
    "training.local_batch_size": (int, 8),
    "training.global_batch_size": (int, -1),
    "training.seq_len": (int, 2048),
    "training.enable_cpu_offload": (bool, False),
    "training.dtype": (("bfloat16", "float32"), "float32"),
    "training.mixed_precision_param": (("bfloat16", "float32"), "bfloat16"),
    "training.dataloader.num_workers": (int, 0),
    "parallelism.data_parallel_replicate_degree": (int, 1),
    "parallelism.data_parallel_shard_degree": (int, -1),
    "parallelism.fsdp_reshard_after_forward": (("default", "always", "never"), "default"),
    "parallelism.tensor_parallel_degree": (int, 1),
    "parallelism.context_parallel_degree": (int, 1),
    "parallelism.pipeline_parallel_degree": (int, 1),
    "parallelism.expert_parallel_degree": (int, 1),
    "parallelism.expert_tensor_parallel_degree": (int, 1),
    "activation_checkpoint.mode": (("selective", "full", "memory_budget", "none"), "selective"),
    "activation_checkpoint.selective_ac_option": (str, "2"),
    "compile.enable": (bool, False),
    "compile.components": (list, ["model", "loss"]),
    "compile.backend": (str, "inductor"),
    "optimizer.name": (str, "AdamW"),
    "optimizer.implementation": (("for-loop", "foreach", "fused"), "fused"),
    "optimizer.early_step_in_backward": (bool, False),
    "model.converters": (list, []),
    "model.hf_assets_path": (str, "./tests/assets/tokenizer"),
    "model.tokenizer_path": (str, None),
}
TORCHTITAN_OLDER = {"training.batch_size", "training.compile", "float8.enable_float8_linear"}
"""Keys of earlier releases, which are read where they are and never added."""

AXOLOTL = {
    # axolotl 067b021 (24 July 2026), src/axolotl/utils/schemas: config, training, peft, fsdp.
    "base_model": (str, None),
    "micro_batch_size": (int, 1),
    "gradient_accumulation_steps": (int, 1),
    "batch_size": (int, None),
    "sequence_len": (int, 512),
    "bf16": ((True, False, "auto"), "auto"),
    "fp16": (bool, None),
    "fp8": (bool, None),
    "tf32": ((True, False, "auto"), "auto"),
    "bfloat16": (bool, None),
    "float16": (bool, None),
    "gradient_checkpointing": ((True, False, "offload", "offload_disk"), False),
    "selective_checkpointing": (bool, None),
    "activation_offloading": ((True, False, "legacy", "disk", "hidden_states"), False),
    "layer_offloading": (bool, False),
    "torch_compile": ((True, False, "auto"), None),
    "torch_compile_backend": (str, None),
    "torch_compile_mode": (("default", "reduce-overhead", "max-autotune"), None),
    "optimizer": (str, "adamw_torch_fused"),
    "dataloader_num_workers": (int, None),
    "fsdp": (list, None),
    "fsdp_version": (int, None),
    "fsdp_config.fsdp_version": (int, None),
    "fsdp_config.auto_wrap_policy": (("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"), None),
    "fsdp_config.reshard_after_forward": (bool, None),
    "fsdp_config.offload_params": (bool, None),
    "fsdp_config.activation_checkpointing": (bool, None),
    "fsdp_config": (dict, None),
    "dp_shard_size": (int, None),
    "dp_replicate_size": (int, None),
    "tensor_parallel_size": (int, None),
    "context_parallel_size": (int, None),
    "deepspeed": (str, None),
    "adapter": (str, None),
    "load_in_4bit": (bool, False),
    "load_in_8bit": (bool, False),
    "gptq": (bool, None),
    "lora_r": (int, None),
    "sample_packing": (bool, None),
    "rl": (str, None),
    "reward_model": (bool, None),
    "process_reward_model": (bool, None),
    "unfrozen_parameters": (list, None),
    "auto_find_batch_size": (bool, None),
}
AXOLOTL_OLDER = {
    *("sequence_parallel_degree", "fsdp_config.version", "fsdp_config.fsdp_auto_wrap_policy"),
    *("fsdp_config.fsdp_reshard_after_forward", "fsdp_config.fsdp_offload_params"),
    *("fsdp_config.fsdp_activation_checkpointing",),
}

LLAMA_FACTORY = {
    # LLaMA-Factory ff6d4d1 (18 August 2026), src/llamafactory/hparams; the rest are TrainingArguments.
    "model_name_or_path": (str, None),
    "cutoff_len": (int, 2048),
    "packing": (bool, None),
    "neat_packing": (bool, False),
    "quantization_bit": (int, None),
    "disable_gradient_checkpointing": (bool, False),
    "use_unsloth": (bool, False),
    "use_unsloth_gc": (bool, False),
    "enable_liger_kernel": (bool, False),
    "pure_bf16": (bool, False),
    "stage": (("pt", "sft", "rm", "ppo", "dpo", "kto"), "sft"),
    "finetuning_type": (("lora", "oft", "freeze", "full"), "lora"),
    "lora_rank": (int, 8),
    "use_galore": (bool, False),
    "use_apollo": (bool, False),
    "use_badam": (bool, False),
    "use_adam_mini": (bool, False),
    "use_muon": (bool, False),
    "use_mca": (bool, False),
    "use_megatron_bridge": (bool, False),
    "use_hyper_parallel": (bool, False),
    "use_kt": (bool, False),
}

SCHEMAS: dict[str, tuple[dict[str, tuple[Any, Any]], set[str]]] = {
    "torchtitan": (TORCHTITAN, TORCHTITAN_OLDER),
    "axolotl": (AXOLOTL, AXOLOTL_OLDER),
    "llama-factory": (LLAMA_FACTORY, set()),
}
