"""Names of our keys and values in torchtitan, Megatron-LM, DeepSpeed, accelerate, Hugging Face's Trainer and litgpt.

Only data: `config.translate` looks names up. Names are compared without case, hyphens, underscores and spaces. A name
with a section, such as compile.enable, is one whose last part alone could mean several keys. Families list the names
of their own keys (`Family.foreign_names`).
"""

from __future__ import annotations

from collections.abc import Mapping

KEYS: Mapping[str, str] = {
    "mesh.pp": "pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_stages "
    "pipeline_model_parallel_size num_stages",
    "mesh.dp_replicate": "ddp data_parallel_replicate_degree dp_replicate_size num_replicas hsdp "
    "num_distributed_optimizer_instances",
    "mesh.dp_shard": "dp dp_size dp_degree data_parallel data_parallel_size data_parallel_degree "
    "data_parallel_shard_degree dp_shard_size fsdp_size sharding_degree world_size num_processes nproc_per_node "
    "num_gpus n_gpus gpus devices",
    "mesh.cp": "cp_size cp_degree context_parallel context_parallel_size context_parallel_degree ulysses_degree "
    "sequence_parallel_size",
    "mesh.cp_method": "cp_comm_type context_parallel_rotate_method",
    "mesh.tp": "tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree "
    "tensor_model_parallel_size tensor_model_parallel model_parallel_size",
    "mesh.ep": "ep_size ep_degree expert_parallel expert_parallel_size expert_parallel_degree "
    "expert_model_parallel_size",
    "mesh.sequence_parallel": "enable_sequence_parallel",
    "train.steps": "max_steps train_steps training_steps total_steps num_steps num_train_steps train_iters max_iters "
    "num_iterations iterations total_num_steps",
    "train.global_batch": "global_batch_size train_batch_size batch_size total_batch_size batch",
    "train.num_microbatches": "gradient_accumulation_steps gradient_accumulation grad_accum_steps grad_accum "
    "accumulate_grad_batches accumulation_steps num_micro_batches",
    "train.seq_len": "seq_length sequence_length sequence_len max_seq_length max_seq_len max_length block_size "
    "context_length context_size max_position_embeddings n_ctx n_positions encoder_seq_length",
    "train.seed": "random_seed data_seed manual_seed seed_everything",
    "train.optimizer": "optim optimizer_type optimizer_name optimizer.name",
    "train.momentum": "muon_momentum sgd_momentum",
    "train.lr": "learning_rate peak_lr max_lr base_lr",
    "train.lr_schedule": "lr_scheduler_type lr_decay_style decay_type scheduler",
    "train.warmup_steps": "warmup lr_warmup_iters lr_warmup_steps num_warmup_steps warmup_num_steps warmup_iters "
    "warmup.steps",
    "train.decay_steps": "lr_wsd_decay_iters num_decay_steps wsd_decay_steps",
    "train.min_lr_ratio": "min_lr_factor min_lr_rate lr_min_ratio",
    "train.beta1": "adam_beta1",
    "train.beta2": "adam_beta2",
    "train.eps": "adam_eps adam_epsilon epsilon",
    "train.weight_decay": "wd adam_weight_decay",
    "train.dropout": "hidden_dropout resid_dropout resid_pdrop dropout_rate hidden_dropout_prob",
    "train.max_grad_norm": "clip_grad grad_clip grad_clip_norm gradient_clipping gradient_clip_val max_norm "
    "clip_grad_norm",
    "train.precision": "dtype torch_dtype mixed_precision mixed_precision_param params_dtype compute_dtype",
    "train.compile": "torch_compile use_torch_compile compile_model compile.enable",
    "train.device": "device_type accelerator",
    "train.threads": "num_threads omp_num_threads num_cpu_threads_per_process",
    "train.timeout_s": "ddp_timeout timeout timeout_seconds train_timeout_seconds",
    "train.log_every": "logging_steps log_interval log_freq log_steps steps_per_print log_every_n_steps print_interval",
    "train.validate_every": "eval_steps eval_interval eval_freq eval_every val_check_interval eval.steps eval.interval "
    "validation.freq",
    "train.validation_samples": "eval_samples num_eval_samples max_eval_samples",
    "train.sample_prompt": "prompt",
    "train.trace": "enable_profiling profiling",
    "train.trackers": "loggers logger log_with tracker experiment_tracker",
    "model.num_layers": "num_hidden_layers n_layers n_layer layers depth encoder_num_layers",
    "model.dim": "hidden_size n_embd d_model hidden_dim embed_dim embedding_dim model_dim width",
    "model.num_heads": "num_attention_heads n_heads n_head heads",
    "model.head_dim": "kv_channels head_size attention_head_dim",
    "model.ffn_dim": "intermediate_size ffn_hidden_size ffn_hidden_dim d_ff n_inner mlp_dim",
    "model.num_kv_heads": "num_key_value_heads num_query_groups n_kv_heads n_query_groups",
    "model.vocab_size": "padded_vocab_size n_vocab vocabulary_size",
    "model.tie_embeddings": "tie_word_embeddings weight_tying enable_weight_tying",
    "model.rope_theta": "rotary_base rope_base",
    "model.norm_eps": "rms_norm_eps norm_epsilon layernorm_epsilon layer_norm_eps",
    "model.window": "sliding_window window_size sliding_window_size",
    "data.source": "data_path train_data_path dataset dataset_path dataset_name dataset_dir data_dir train_file "
    "train_data",
    "data.validation_source": "valid_data_path val_data_path validation_file eval_file validation_data",
    "data.tokenizer": "tokenizer_path tokenizer_model tokenizer_file tokenizer_name tokenizer_name_or_path "
    "hf_assets_path",
    "data.cache_dir": "data_cache_path data_cache_dir",
    "data.text_field": "text_column json_keys dataset_text_field text_key field_name",
    "data.chat_field": "field_messages messages_field messages_key conversation_column chat_key",
    "data.prefetch": "num_workers dataloader_num_workers prefetch_factor dataloader_prefetch_factor",
    "pipeline.schedule": "pipeline_parallel_schedule pp_schedule schedule_name",
    "pipeline.chunks": "virtual_pipeline_size virtual_pipeline_model_parallel_size num_virtual_stages_per_rank "
    "num_model_chunks virtual_stages",
    "recompute.policy": "activation_checkpoint.mode activation_checkpoint_mode recompute_granularity "
    "activation_checkpointing_mode",
    "checkpoint.every": "save_steps save_interval save_every save_freq checkpoint_interval checkpoint.interval "
    "checkpoint.steps checkpoint.freq checkpoint_every",
    "checkpoint.minutes": "train_time_interval checkpoint_interval_minutes save_minutes save_interval_minutes",
    "checkpoint.keep": "save_total_limit keep_latest_k max_checkpoints",
    "float8.recipe": "fp8_recipe float8_recipe recipe_name fp8 enable_float8",
    "comm.weights": "zero_quantized_weights",
    "comm.gradients": "zero_quantized_gradients grad_reduce_dtype",
    "comm.secondary_shards": "zero_hpz_partition_size",
}
"""Names by our key, with values that carry over, or that `VALUES` translates."""

CHOICES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "bf16": ("train.precision", {"true": "bfloat16", "false": "float32"}),
    "fp16": ("train.precision", {"true": "bfloat16", "false": "float32"}),
    "fp32": ("train.precision", {"true": "float32"}),
    "use_cpu": ("train.device", {"true": "cpu", "false": "auto"}),
    "no_cuda": ("train.device", {"true": "cpu", "false": "auto"}),
    "gradient_checkpointing": ("recompute.policy", {"true": "full", "false": "none"}),
    "activation_checkpointing": ("recompute.policy", {"true": "full", "false": "none"}),
    "activation_checkpoint": ("recompute.policy", {"true": "full", "false": "none"}),
    "fsdp_activation_checkpointing": ("recompute.policy", {"true": "full", "false": "none"}),
    "recompute_activations": ("recompute.policy", {"true": "selective", "false": "none"}),
    "zero_stage": ("mesh.reshard_after_forward", {"1": "false", "2": "false", "3": "true"}),
    "zero_optimization.stage": ("mesh.reshard_after_forward", {"1": "false", "2": "false", "3": "true"}),
    "zero3": ("mesh.reshard_after_forward", {"true": "true"}),
    "fsdp_reshard_after_forward": ("mesh.reshard_after_forward", {"always": "true", "never": "false"}),
    "fsdp": ("mesh.dp_shard", {"true": "2", "fullshard": "2"}),
    "use_fsdp": ("mesh.dp_shard", {"true": "2"}),
    "use_distributed_optimizer": ("mesh.dp_shard", {"true": "2"}),
    "packing": ("data.packing", {"true": "documents", "false": "none"}),
    "sample_packing": ("data.packing", {"true": "documents", "false": "none"}),
    **{
        f"{prefix}{name}": ("train.trackers", {"true": name, "false": "[]"})
        for name in ("tensorboard", "wandb", "trackio")
        for prefix in ("", "enable_", "use_")
    },
    "report_to": ("train.trackers", {**{name: name for name in ("tensorboard", "wandb", "trackio")}, "none": "[]"}),
    "untie_embeddings_and_output_weights": ("model.tie_embeddings", {"true": "false"}),
    "do_eval": ("train.validation_samples", {"false": "0"}),
}
"""Key, and our value by theirs, for settings that other frameworks express in another way."""

DERIVED: Mapping[str, str] = {
    "micro_batch_size": "train.num_microbatches",
    "per_device_train_batch_size": "train.num_microbatches",
    "train_micro_batch_size_per_gpu": "train.num_microbatches",
    "local_batch_size": "train.num_microbatches",
    "pipeline_parallel_microbatch_size": "train.num_microbatches",
    "num_train_epochs": "train.steps",
    "num_epochs": "train.steps",
    "epochs": "train.steps",
    "max_epochs": "train.steps",
    "warmup_ratio": "train.warmup_steps",
    "lr_warmup_fraction": "train.warmup_steps",
    "min_lr": "train.min_lr_ratio",
    "num_layers_per_virtual_pipeline_stage": "pipeline.chunks",
    "validation.steps": "train.validation_samples",
    "eval_iters": "train.validation_samples",
}
"""Keys by name, for numbers with another meaning: `foreign_keys` computes ours, or keeps the present value."""

DIFFERENCES: Mapping[str, str] = {
    "train.num_microbatches": "micro-batches per step of each rank: its share of train.global_batch / their size",
    "train.steps": "the length of a run is in optimizer steps of train.global_batch samples, not in epochs",
    "train.warmup_steps": "in steps, not as a fraction of them",
    "train.min_lr_ratio": "the ratio of the final to the peak learning rate train.lr",
    "train.validation_samples": "samples of a validation, not batches of train.global_batch",
    "pipeline.chunks": "stages of each rank: model.num_layers / (mesh.pp × layers of a stage)",
}
"""The meaning of our number for each of these keys."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "train.precision": {
        "bf16": "bfloat16", "bf16mixed": "bfloat16", "bf16true": "bfloat16", "torch.bfloat16": "bfloat16",
        "fp16": "bfloat16", "float16": "bfloat16", "half": "bfloat16", "16": "bfloat16", "16mixed": "bfloat16",
        "16true": "bfloat16", "fp8": "bfloat16", "fp32": "float32", "float": "float32", "32": "float32",
        "32true": "float32", "single": "float32", "no": "float32", "torch.float32": "float32", "fp64": "float64",
        "double": "float64", "64": "float64",
    },
    "train.lr_schedule": {"cosinewithminlr": "cosine", "warmupstabledecay": "wsd", "linear": "wsd", "constant": "wsd"},
    "train.optimizer": {
        "adam": "adamw", "adamwtorch": "adamw", "adamwtorchfused": "adamw", "fusedadam": "adamw", "adamw8bit": "adamw",
        "adamw": "adamw", "distmuon": "muon", "muonclip": "muon", "momentum": "sgd",
    },
    "train.max_grad_norm": {"0": "1e30", "0.0": "1e30", "none": "1e30", "inf": "1e30"},
    "train.device": {"gpu": "cuda", "cuda:0": "cuda"},
    "mesh.cp_method": {"p2p": "ring", "a2a": "heads", "ulysses": "heads", "alltoall": "heads", "allgather": "ring"},
    "mesh.reshard_after_forward": {"always": "true", "never": "false"},
    "recompute.policy": {
        "selectiveac": "selective", "op": "selective", "selectiveop": "selective", "uniform": "full", "block": "full",
        "off": "none", "false": "none", "no": "none", "all": "full", "true": "full", "fullac": "full", "on": "full",
        "memorybudget": "selective",
    },
    "pipeline.schedule": {
        "gpipe": "f-then-b", "afab": "f-then-b", "onefoneb": "1f1b", "interleaved1f1b": "interleaved",
        "loopedbfs": "interleaved", "zbvzerobubble": "zb-v", "interleavedzerobubble": "zb-v", "zerobubble": "zb-h1",
        "zb1p": "zb-h1", "dualpipe": "dualpipe-v",
    },
    "float8.recipe": {
        "tensorwise": "current", "true": "current", "hybrid": "current", "e4m3": "current", "torchao": "current",
    },
    "comm.gradients": {"true": "int4", "false": "exact", "bfloat16": "bf16", "fp32": "exact", "float32": "exact"},
    "comm.weights": {"true": "int8", "false": "exact"},
    "data.packing": {"true": "documents", "false": "none"},
}  # fmt: skip
"""Our value by theirs, for each key."""

UNAVAILABLE: Mapping[str, Mapping[str, str]] = {
    "train.precision": dict.fromkeys(
        ("fp16", "float16", "half", "16", "16mixed", "16true"),
        "float16 needs loss scaling, which Meshwright doesn't have",
    )
    | {"fp8": "float8 is for linear layers only, by float8.recipe"},
    "mesh.reshard_after_forward": {
        "0": "stage 0 is replication, over mesh.dp_replicate ranks",
        "1": "mesh.dp_shard always shards gradients too, as stage 2; with true, parameters as stage 3",
        "2": "false shards optimizer state and gradients over mesh.dp_shard ranks, as stage 2",
        "3": "true shards parameters too over mesh.dp_shard ranks, as stage 3",
    },
}
"""Why the nearest value differs from the one requested, or what it stands for, by key and value."""

OPTIONS: Mapping[str, str] = {
    "out": "output_dir out_dir save save_dir dump_folder job.dump_folder checkpoint_dir",
    "resume": "resume_from_checkpoint load load_checkpoint resume_from load_dir",
}
"""Names by option of `meshwright run`."""

SOURCE = "config config_file config_name preset model model_name model.name model_name_or_path flavor hf_path"
"""Names of what is our first word, a preset or a file."""

PRESETS: Mapping[str, str] = {
    "gpt": "llama-tiny", "nanogpt": "llama-tiny", "pythia": "llama-tiny", "qwen": "llama3-8b", "gemma": "llama3-8b",
    "switch": "moe-tiny", "experts": "moe-tiny", "olmoe": "moe-tiny", "diffusion": "dit-digits", "flux": "dit-xl-2",
    "sd": "dit-xl-2", "image": "dit-digits", "video": "dit-digits-video", "debugmodel": "llama-tiny",
}  # fmt: skip
"""Preset by the first word of a model's name, for models that no preset is named after."""
