"""Every option of the launchers' own parsers (torchrun of torch 2.13, accelerate 1.15 launch, deepspeed 0.19), and what
becomes of it where Flight Deck starts the ranks in the launcher's place."""

from __future__ import annotations

import re
from dataclasses import dataclass

PASSED, IDLE, REFUSED = "passed", "idle", "refused"
"""Given to each rank; accepted without an effect; a fault of the configuration."""


@dataclass(frozen=True)
class LauncherOption:
    name: str
    """Its long spelling, with underscores."""
    takes_value: bool
    effect: str = REFUSED
    reason: str = ""
    """Why it is refused, or has no effect."""


_RANKS = "Flight Deck starts a rank for each [[node]] and its processes itself"
_GPUS = f"{_RANKS}; CUDA_VISIBLE_DEVICES in [job] env chooses among a machine's GPUs"
_MEETING = "the ranks meet at the address of the first [[node]], on a port that is free there, chosen for each attempt"
_SSH = "a [[node]] names its machine by ssh, whose port may also be in ssh_config"
_RESTARTS = "max_restarts and restart_commands in [recovery] say how often a run is started again"
_STOP = "stop_grace_s and term_grace_s in [recovery] are the times of a stop"
_CORES = "ranks are not bound to cores: bind them in the program (numactl, taskset), with OMP_NUM_THREADS in [job] env"
_PROGRAM = "write the program alone, without the launcher: each rank gets the same variables"
_HELP = "it prints the launcher's help and ends: run that in a shell"
_TPU = "TPUs are not served"
_SAGEMAKER = "SageMaker is not served"
_LOGS = "Flight Deck keeps every rank's log, see flightdeck logs"
_OF_LAUNCHER = "it concerns the launcher's own process, and there is none"

_TABLE: dict[str, tuple[tuple[str, str, str], ...]] = {
    "torchrun": (
        (PASSED, "", "--module|-m --role="),
        (IDLE, _LOGS, "--log_dir= --redirects|-r= --tee|-t= --local_ranks_filter= --logs_specs="),
        (IDLE, _LOGS, "--duplicate_stdout_filters= --duplicate_stderr_filters="),
        (IDLE, _OF_LAUNCHER, "--monitor_interval= --start_method= --event_log_handler= --run_path"),
        (REFUSED, _RANKS, "--nnodes= --nproc_per_node= --node_rank= --standalone"),
        (REFUSED, _MEETING, "--rdzv_backend= --rdzv_endpoint= --rdzv_id= --rdzv_conf="),
        (REFUSED, _MEETING, "--master_addr= --master_port= --local_addr="),
        (REFUSED, _RESTARTS, "--max_restarts="),
        (REFUSED, _STOP, "--signals_to_handle= --shutdown_timeout="),
        (REFUSED, _CORES, "--numa_binding="),
        (REFUSED, "LOCAL_RANK is the GPU's number: each rank sees all GPUs of its machine", "--virtual_local_rank"),
        (REFUSED, _PROGRAM, "--no_python"),
        (REFUSED, _HELP, "--help|-h"),
    ),
    "accelerate": (
        (PASSED, "", "--config_file= --module|-m --cpu --multi_gpu --mixed_precision= --debug --role="),
        (PASSED, "", "--num_cpu_threads_per_process= --enable_cpu_affinity --use_parallelism_config"),
        (PASSED, "", "--dynamo_backend= --dynamo_mode= --dynamo_use_fullgraph --dynamo_use_dynamic"),
        (PASSED, "", "--dynamo_use_regional_compilation --use_deepspeed --use_fsdp --use_megatron_lm"),
        (PASSED, "", "--deepspeed_config_file= --zero_stage= --offload_optimizer_device= --offload_param_device="),
        (PASSED, "", "--offload_optimizer_nvme_path= --offload_param_nvme_path= --gradient_accumulation_steps="),
        (PASSED, "", "--gradient_clipping= --zero3_init_flag= --zero3_save_16bit_model="),
        (PASSED, "", "--deepspeed_moe_layer_cls_names= --fsdp_version= --fsdp_offload_params="),
        (PASSED, "", "--fsdp_min_num_params= --fsdp_sharding_strategy= --fsdp_reshard_after_forward="),
        (PASSED, "", "--fsdp_auto_wrap_policy= --fsdp_transformer_layer_cls_to_wrap= --fsdp_backward_prefetch="),
        (PASSED, "", "--fsdp_state_dict_type= --fsdp_forward_prefetch= --fsdp_use_orig_params="),
        (PASSED, "", "--fsdp_cpu_ram_efficient_loading= --fsdp_sync_module_states= --fsdp_activation_checkpointing="),
        (PASSED, "", "--fsdp_activation_checkpointing_offload= --megatron_lm_tp_degree= --megatron_lm_pp_degree="),
        (PASSED, "", "--megatron_lm_use_custom_fsdp= --megatron_lm_no_load_optim= --megatron_lm_eod_mask_loss="),
        (PASSED, "", "--megatron_lm_overlap_cpu_optimizer_d2h_h2d= --megatron_lm_no_save_optim="),
        (PASSED, "", "--megatron_lm_optimizer_cpu_offload= --megatron_lm_use_precision_aware_optimizer="),
        (PASSED, "", "--megatron_lm_decoder_last_pipeline_num_layers= --megatron_lm_num_micro_batches="),
        (PASSED, "", "--megatron_lm_sequence_parallelism= --megatron_lm_recompute_activations="),
        (PASSED, "", "--megatron_lm_use_distributed_optimizer= --megatron_lm_gradient_clipping="),
        (PASSED, "", "--megatron_lm_recompute_granularity= --megatron_lm_recompute_method="),
        (PASSED, "", "--megatron_lm_recompute_num_layers= --megatron_lm_attention_backend="),
        (PASSED, "", "--megatron_lm_expert_model_parallel_size= --megatron_lm_context_parallel_size="),
        (PASSED, "", "--megatron_lm_attention_dropout= --megatron_lm_hidden_dropout="),
        (PASSED, "", "--megatron_lm_attention_softmax_in_fp32= --megatron_lm_expert_tensor_parallel_size="),
        (PASSED, "", "--megatron_lm_calculate_per_token_loss= --megatron_lm_use_rotary_position_embeddings="),
        (PASSED, "", "--fp8_backend= --fp8_use_autocast_during_eval --fp8_margin= --fp8_interval= --fp8_format="),
        (PASSED, "", "--fp8_amax_history_len= --fp8_amax_compute_algo= --fp8_override_linear_precision="),
        (PASSED, "", "--fp8_opt_level= --fp8_enable_fsdp_float8_all_gather= --fp8_pad_inner_dim="),
        (PASSED, "", "--parallelism_config_dp_replicate_size= --parallelism_config_dp_shard_size="),
        (PASSED, "", "--parallelism_config_tp_size= --parallelism_config_cp_size= --parallelism_config_cp_backend="),
        (PASSED, "", "--parallelism_config_cp_comm_strategy= --parallelism_config_sp_size="),
        (PASSED, "", "--parallelism_config_sp_backend= --parallelism_config_sp_seq_length="),
        (PASSED, "", "--parallelism_config_sp_seq_length_is_variable= --parallelism_config_sp_attn_implementation="),
        (IDLE, _LOGS, "--tee|-t= --log_dir="),
        (IDLE, _OF_LAUNCHER, "--quiet|-q --monitor_interval="),
        (REFUSED, _RANKS, "--num_processes= --num_machines= --machine_rank= --same_network --mpirun_hostfile="),
        (REFUSED, _RANKS, "--deepspeed_hostfile= --deepspeed_multinode_launcher="),
        (REFUSED, _GPUS, "--gpu_ids= --deepspeed_exclusion_filter= --deepspeed_inclusion_filter="),
        (REFUSED, _MEETING, "--main_process_ip= --main_process_port= --rdzv_backend= --rdzv_conf="),
        (REFUSED, _RESTARTS, "--max_restarts="),
        (REFUSED, _PROGRAM, "--no_python"),
        (REFUSED, _HELP, "--help|-h"),
        (REFUSED, _TPU, "--tpu --tpu_cluster --no_tpu_cluster --tpu_use_sudo --vm= --env= --main_training_function="),
        (REFUSED, _TPU, "--downcast_bf16"),
        (REFUSED, _SAGEMAKER, "--aws_access_key_id= --aws_secret_access_key="),
    ),
    "deepspeed": (
        (PASSED, "", "--module --no_local_rank"),
        (IDLE, _LOGS, "--enable_each_rank_log="),
        (IDLE, _OF_LAUNCHER, "--log_level= --quiet|-q --save_pid"),
        (REFUSED, _RANKS, "--hostfile|-H= --num_nodes= --num_gpus|--num_accelerators= --node_rank="),
        (REFUSED, _RANKS, "--launcher= --launcher_args= --no_ssh --no_ssh_check --force_multi"),
        (REFUSED, _GPUS, "--include|-i= --exclude|-e="),
        (REFUSED, _MEETING, "--master_port= --master_addr="),
        (REFUSED, _SSH, "--ssh_port="),
        (REFUSED, _CORES, "--bind_cores_to_rank --bind_core_list="),
        (REFUSED, "it starts trainings of its own: tune by hand, then launch with what it found", "--autotuning="),
        (REFUSED, "python of each [[node]] is the environment", "--venv_script="),
        (REFUSED, _PROGRAM, "--no_python"),
        (REFUSED, _HELP, "--help|-h"),
    ),
}
"""Launcher -> rows of effect, reason and options: "--tee|-t=" has two spellings and takes a value."""

OPTIONS: dict[str, dict[str, LauncherOption]] = {
    launcher: {
        spelling: LauncherOption(names.rstrip("=").split("|")[0], names.endswith("="), effect, reason)
        for effect, reason, listed in rows
        for names in listed.split()
        for spelling in names.rstrip("=").split("|")
    }
    for launcher, rows in _TABLE.items()
}
"""Launcher -> each spelling, with underscores -> the option."""
_UNABBREVIATED = "accelerate"
"""Its parser takes no abbreviations of options (allow_abbrev=False); the other two take any that is unambiguous."""


def option_of(launcher: str, written: str) -> LauncherOption:
    """The option that a launcher's parser would take for `written`, without a value; one that it does not have is
    refused, and takes a value unless an option of this name of another launcher takes none."""
    name, own = re.sub(r"(?<=\w)-", "_", written), OPTIONS[launcher]
    if name in own:
        return own[name]
    whole = launcher == _UNABBREVIATED or not name.startswith("--")
    meant = {option.name: option for spelling, option in own.items() if spelling.startswith(name) and not whole}
    if len(meant) == 1:
        return next(iter(meant.values()))
    reason = f"it stands for {', '.join(meant)}: write one of them" if meant else f"{launcher} has no such option"
    if (launcher, name) == ("deepspeed", "-m"):
        reason = "write --module, as deepspeed has it"
    elsewhere = [options[name].takes_value for options in OPTIONS.values() if name in options]
    return LauncherOption(name, all(elsewhere), reason=reason)
