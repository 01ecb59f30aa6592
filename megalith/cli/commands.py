"""The commands of `megalith`, with help texts and the functions that add their options and run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Command:
    """A command. Functions are named as "module:function" with a module of megalith.cli, and are imported when they are
    needed.

    Attributes:
        help: line in the list of commands.
        run: takes the parsed arguments and returns the exit code. Without `options`, it takes the words of the command
            line, beginning with the command's name, and parses them itself.
        options: adds the command's options to its parser, or "" if it has none.
    """

    help: str
    run: str
    options: str | None = None


# fmt: off
COMMANDS: dict[str, Command] = {
    "train": Command("train a model from a run file; `megalith train --help` lists every setting", "training:train"),
    "sft": Command("fine-tune on conversations", "training:train"),
    "dpo": Command("train on preference pairs (DPO)", "training:train"),
    "kto": Command("train on answers marked as desirable or not (KTO)", "training:train"),
    "reward": Command("train a reward model", "training:train"),
    "distill": Command("train on a teacher's predictions", "training:train"),
    "teacher-logits": Command("store a teacher's predictions for `distill`", "training:train"),
    "grpo": Command("train with rewards (GRPO), on sampled completions or on rollout files", "training:train"),
    "pretrain-gpt": Command("train with Megatron-LM's flags", "dialects:megatron"),
    "pretrain-bert": Command("train an encoder with Megatron-LM's flags", "dialects:megatron"),
    "pretrain-t5": Command("train an encoder-decoder with Megatron-LM's flags", "dialects:megatron"),
    "megatron": Command("run Megatron-LM's scripts, install stand-ins for its programs, list its "
"flags", "dialects:megatron"),
    "plan": Command("layouts, memory, time and cost of a job, without its devices", "planning:plan"),
    "accelerate": Command("run Accelerate's scripts on Megalith, and configure its launcher", "dialects:accelerate"),
    "oumi": Command("train with Oumi's configurations, and migrate them", "dialects:oumi"),
    "bench": Command("benchmark training, generation, saving and reading on this machine", "dialects:bench"),
    "corpus": Command("write Python's standard library as JSONL, a first corpus",
                      "datasets:run_corpus", "datasets:add_corpus_arguments"),
    "tokenizer train": Command("train a byte-pair tokenizer",
                               "datasets:run_tokenizer_train", "datasets:add_tokenizer_train_arguments"),
    "preprocess": Command("tokenize JSONL into an indexed dataset",
                          "datasets:run_preprocess", "datasets:add_preprocess_arguments"),
    "data stats": Command("lengths, packing and sources of data, with histograms",
                          "datasets:run_data_stats", "datasets:add_data_stats_arguments"),
    "data plan": Command("tokens and epochs of each source over a run",
                         "datasets:run_data_plan", "datasets:add_data_plan_arguments"),
    "data show": Command("print samples as training would read them",
                         "datasets:run_data_show", "datasets:add_data_show_arguments"),
    "import-hf": Command("write a Hugging Face model as a checkpoint",
                         "conversion:run_import", "conversion:add_import_arguments"),
    "import-megatron": Command("write a Megatron-LM checkpoint as a checkpoint of Megalith",
                               "conversion:run_megatron", "conversion:add_megatron_arguments"),
    "export-hf": Command("write a checkpoint as a Hugging Face model",
                         "conversion:run_export", "conversion:add_export_arguments"),
    "export-megatron": Command("write a checkpoint as one that Megatron-LM loads",
                               "conversion:run_megatron_export", "conversion:add_megatron_export_arguments"),
    "convert": Command("convert between the formats of Hugging Face, Megatron-LM and Megalith",
                       "conversion:run_convert", "conversion:add_convert_arguments"),
    "lora export": Command("write a run's adapters in PEFT's format",
                           "conversion:run_lora_export", "conversion:add_lora_export_arguments"),
    "lora merge": Command("write base + adapters as a checkpoint",
                          "conversion:run_lora_merge", "conversion:add_lora_merge_arguments"),
    "pipeline show": Command("draw the timeline of a schedule, with its bubble",
                             "pipeline_command:run_pipeline_show", "pipeline_command:add_pipeline_show"),
    "parity": Command("compare a small run in many layouts with one process",
                      "parity_command:run_parity", "training:add_parity_arguments"),
    "audit": Command("rerun recorded steps of any system's job in fp32, and print which "
"gradients differ",
                     "audit_command:run_audit", "audit_command:add_arguments"),
    "generate": Command("generate text with a trained model",
                        "generation:run_generate", "generation:add_generate_arguments"),
    "chat": Command("chat with a trained model in the terminal",
                    "chat_command:run_chat", "chat_command:add_chat_arguments"),
    "serve": Command("serve a trained model with OpenAI's API",
                     "serve_command:run_serve", "serve_command:add_serve_arguments"),
    "rollout": Command("sample completions, score them and print pass@k",
                       "rollout_command:run_rollout", "generation:add_rollout_arguments"),
    "evaluate": Command("evaluate a checkpoint: loss and perplexity, or tasks",
                        "evaluate_command:run_evaluate", "training:add_evaluate_arguments"),
    "checkpoint list": Command("list a run's steps", "checkpoints:run_list", "checkpoints:add_list_arguments"),
    "checkpoint verify": Command("check every file of every step; exit code 4 if one is damaged",
                                 "checkpoints:run_verify", "checkpoints:add_verify_arguments"),
    "checkpoint hash": Command("print a digest of each global tensor, the same in every layout",
                               "checkpoints:run_hash", "checkpoints:add_hash_arguments"),
    "checkpoint diff": Command("list the tensors that differ; exit code 1 if there are any",
                               "checkpoints:run_diff", "checkpoints:add_diff_arguments"),
    "checkpoint reshard": Command("rewrite a step in another number of files",
                                  "checkpoints:run_reshard", "checkpoints:add_reshard_arguments"),
    "checkpoint average": Command("write the mean of the weights of several checkpoints",
                                  "checkpoints:run_average", "checkpoints:add_average_arguments"),
    "checkpoint merge": Command("write a step's tensors into one file",
                                "checkpoints:run_merge", "checkpoints:add_merge_arguments"),
    "doctor": Command("check this machine for training", "clusters:run_doctor", "clusters:add_doctor_arguments"),
    "launch slurm": Command("write a Slurm batch file for a run, and submit it",
                            "clusters:launch_job", "clusters:add_slurm_arguments"),
    "launch kubernetes": Command("write Kubernetes manifests for a run, and submit them",
                                 "clusters:launch_job", "clusters:add_kubernetes_arguments"),
    "recipes list": Command("list planned run files by task, model and number of GPUs",
                            "recipe_commands:run_list", "recipe_commands:add_list_arguments"),
    "recipes show": Command("print a recipe", "recipe_commands:run_show", "recipe_commands:add_show_arguments"),
    "recipes copy": Command("write a recipe as a run file",
                            "recipe_commands:run_copy", "recipe_commands:add_copy_arguments"),
    "init": Command("write a run file for a task, a model and this machine", "recipe_commands:run_init",
                    "recipe_commands:add_init_arguments"),
    "plot": Command("draw the curves of one or several runs", "reports:run_plot", "reports:add_plot_arguments"),
    "watch": Command("follow one or several runs in the terminal",
                     "reports:run_watch", "reports:add_watch_arguments"),
    "report": Command("write an HTML report of one or several runs",
                      "reports:run_report", "reports:add_report_arguments"),
    "config schema": Command("print the JSON Schema of run files, for editors",
                             "reports:config_schema", ""),
    "config reference": Command("print the reference page of all settings",
                                "reports:config_reference", ""),
    "config presets": Command("list the published model shapes",
                              "reports:config_presets", "reports:add_presets_arguments"),
    "completion": Command("print the completion script of bash, zsh or fish",
                          "completion:run_completion", "completion:add_completion_arguments"),
}
GROUPS: dict[str, str] = {
    "tokenizer": "make a tokenizer",
    "data": "look at data",
    "lora": "adapters: write them for PEFT, merge them",
    "pipeline": "inspect pipeline schedules",
    "checkpoint": "inspect and rewrite checkpoints",
    "recipes": "planned run files",
    "launch": "write the job files of a cluster, or submit them",
    "config": "describe the configuration",
}
"""Help text of each command group: the first word of commands that consist of two words."""
# fmt: on


def load(target: str) -> Callable[..., Any]:
    """Import the function that an entry of the table gives as `module:function`, from megalith.cli."""
    module, _, name = target.partition(":")
    return getattr(import_module(f"megalith.cli.{module}"), name)
