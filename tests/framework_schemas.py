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
    "activation_checkpoint.memory_budget": (float, 0.5),
    "compile.enable": (bool, False),
    "compile.components": (list, ["model", "loss"]),
    "compile.backend": (str, "inductor"),
    "optimizer.name": (str, "AdamW"),
    "optimizer.implementation": (("for-loop", "foreach", "fused"), "fused"),
    "optimizer.early_step_in_backward": (bool, False),
    "model.converters": (list, []),
    "quantize.linear.float8.recipe_name": (("tensorwise", "rowwise", "rowwise_with_gw_hp"), "tensorwise"),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": (bool, False),
    "model.hf_assets_path": (str, "./tests/assets/tokenizer"),
    "model.tokenizer_path": (str, None),
}
TORCHTITAN_OLDER = {
    "training.batch_size",
    "training.compile",
    "float8.enable_float8_linear",
    "float8.recipe_name",
    "float8.enable_fsdp_float8_all_gather",
}
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
    "fsdp_config.cpu_ram_efficient_loading": (bool, None),
    "fsdp_config.cpu_offload_pin_memory": (bool, None),
    "fsdp_config.state_dict_type": (("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"), None),
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
    "quantize_moe_experts": (bool, False),
    # Of a dict that is merged into what src/axolotl/loaders/model.py gives BitsAndBytesConfig.
    "bnb_config_kwargs.bnb_4bit_quant_type": (("nf4", "fp4"), "nf4"),
    "bnb_config_kwargs.bnb_4bit_use_double_quant": (bool, True),
    "chunked_cross_entropy": (bool, None),
    # src/axolotl/integrations: liger/args.py and cut_cross_entropy/args.py.
    "liger_fused_linear_cross_entropy": (bool, None),
    "liger_cross_entropy": (bool, None),
    "liger_rope": (bool, None),
    "liger_rms_norm": (bool, None),
    "liger_layer_norm": (bool, None),
    "liger_glu_activation": (bool, None),
    "liger_swiglu": (bool, None),
    "cut_cross_entropy": (bool, True),
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
    *("fsdp_config.fsdp_activation_checkpointing", "fsdp_config.fsdp_state_dict_type"),
    *("fsdp_config.fsdp_cpu_ram_efficient_loading",),
}

LLAMA_FACTORY = {
    # LLaMA-Factory ff6d4d1 (18 August 2026), src/llamafactory/hparams; the rest are TrainingArguments.
    "model_name_or_path": (str, None),
    "cutoff_len": (int, 2048),
    "packing": (bool, None),
    "neat_packing": (bool, False),
    "quantization_bit": (int, None),
    "quantization_method": (("bnb", "gptq", "awq", "aqlm", "quanto", "eetq", "hqq", "mxfp4", "fp8"), "bnb"),
    "quantization_type": (("fp4", "nf4"), "nf4"),
    "double_quantization": (bool, True),
    "fp8": (bool, False),
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

TORCHTUNE = {
    # torchtune bd2a0fc (23 April 2026), recipes/*_finetune_*.py and their configs.
    "batch_size": (int, None),
    "gradient_accumulation_steps": (int, None),
    "tokenizer.max_seq_len": (int, None),
    "dtype": (("fp32", "bf16"), None),
    "enable_activation_checkpointing": (bool, False),
    "enable_activation_offloading": (bool, False),
    "ac_mode": (str, None),
    "compile": (bool, False),
    "data_parallel_replicate_dim": (int, 1),
    "data_parallel_shard_dim": (int, -1),
    "tensor_parallel_dim": (int, 1),
    "context_parallel_dim": (int, 1),
    "fsdp_cpu_offload": (bool, False),
    "fsdp_reshard_after_forward": (bool, True),
    "enable_fp8_training": (bool, False),
    "fp8_recipe_name": (str, None),
    "optimizer._component_": (str, None),
    "optimizer.fused": (bool, None),
    "optimizer.foreach": (bool, None),
    # torchao, torchao/optim/cpu_offload.py.
    "optimizer.offload_gradients": (bool, False),
    "optimizer.optimizer_class": (str, None),
    "optimizer_in_bwd": (bool, False),
    "clip_grad_norm": (float, None),
    "loss._component_": (str, None),
    "model._component_": (str, None),
    "model.quantize_base": (bool, None),
    "model.apply_lora_to_mlp": (bool, False),
    "model.use_dora": (bool, False),
    "model.lora_rank": (int, 8),
    "dataset.packed": (bool, False),
    "dataloader.num_workers": (int, None),
    "checkpointer.checkpoint_dir": (str, None),
    "device": (str, None),
}

MEGATRON_MODEL = {
    # Megatron-LM d98e8a6 (22 August 2026), megatron/core/model_parallel_config.py and
    # megatron/core/transformer/transformer_config.py.
    "tensor_model_parallel_size": (int, 1),
    "pipeline_model_parallel_size": (int, 1),
    "context_parallel_size": (int, 1),
    "expert_model_parallel_size": (int, 1),
    "virtual_pipeline_model_parallel_size": (int, None),
    "recompute_granularity": (("full", "selective"), None),
    "recompute_method": (("uniform", "block"), None),
    "recompute_num_layers": (int, None),
}

MEGATRON_BRIDGE = {
    # Megatron-Bridge 067f987 (22 August 2026), src/megatron/bridge/training: config.py, mixed_precision.py.
    **{f"model.{key}": row for key, row in MEGATRON_MODEL.items()},
    "model.seq_length": (int, None),
    "dataset.seq_length": (int, None),
    "train.micro_batch_size": (int, None),
    "train.global_batch_size": (int, None),
    "mixed_precision": (("bf16_mixed", "fp16_mixed", "bf16-mixed", "fp16-mixed"), None),
}

NEMO = {
    # NeMo 1, examples/nlp/language_modeling/conf/megatron_gpt_config.yaml.
    **{f"model.{key}": row for key, row in MEGATRON_MODEL.items()},
    "model.micro_batch_size": (int, None),
    "model.global_batch_size": (int, None),
    "model.encoder_seq_length": (int, None),
    "trainer.precision": (("bf16", "bf16-mixed", 16, 32), None),
    "trainer.devices": (int, None),
    "trainer.num_nodes": (int, 1),
}

MEGATRON_LM = {
    # Megatron-LM d98e8a6 (22 August 2026): its options have the names of the fields of its configs.
    **{f"args.{key.replace('_', '-')}": row for key, row in MEGATRON_MODEL.items()},
    "args.num-virtual-stages-per-pipeline-rank": (int, None),
    "args.micro-batch-size": (int, None),
    "args.global-batch-size": (int, None),
    "args.seq-length": (int, None),
    "args.bf16": (bool, False),
    "args.fp16": (bool, False),
}
MEGATRON_LM_SHELL = {
    "GPUS_PER_NODE",
    "NPROC_PER_NODE",
    "NNODES",
    "NUM_NODES",
    "gpus-per-node",
    "gpus-per-node.count",
    "gres.gpu",
    "nodes",
}
"""Variables of its example scripts, and headers of Slurm."""

NANOTRON = {
    # nanotron 2411b02 (7 April 2026), src/nanotron/config: parallelism_config.py, config.py.
    "parallelism.dp": (int, None),
    "parallelism.tp": (int, None),
    "parallelism.pp": (int, None),
    "parallelism.context_parallel_size": (int, 1),
    "parallelism.expert_parallel_size": (int, 1),
    "parallelism.recompute_layer": (bool, False),
    "tokens.micro_batch_size": (int, None),
    "tokens.batch_accumulation_per_replica": (int, None),
    "tokens.sequence_length": (int, None),
    "model.dtype": (("bfloat16", "float16", "float32"), None),
}

SCHEMAS: dict[str, tuple[dict[str, tuple[Any, Any]], set[str]]] = {
    "torchtitan": (TORCHTITAN, TORCHTITAN_OLDER),
    "torchtune": (TORCHTUNE, set()),
    "axolotl": (AXOLOTL, AXOLOTL_OLDER),
    "llama-factory": (LLAMA_FACTORY, set()),
    "megatron-bridge": (MEGATRON_BRIDGE, set()),
    "nemo": (NEMO, set()),
    "megatron-lm": (MEGATRON_LM, MEGATRON_LM_SHELL),
    "nanotron": (NANOTRON, set()),
}
