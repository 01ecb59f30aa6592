"""The suite's order and marks; its fixtures are in shared_fixtures.py, which the process that only hands out tests and
hears how they ended does not load: its workers start 2 s earlier."""

import gc
from collections import Counter

import pytest
from fault_items import FaultItems

COMPILING = "test_compiled_layers.py", "test_fused.py", "test_inductor.py"
LONG = {  # tests of one process that take seconds, all their cases together
    "test_a_base_that_was_trained_on_since_is_refused_and_one_of_its_steps_is_not",
    "test_a_completion_ends_with_its_stop_id_and_tells_otherwise_that_it_is_cut",
    "test_a_key_that_config_json_leaves_out_has_the_default_of_transformers",
    "test_a_layer_of_each_kind_has_as_many_parameters_in_transformers",
    "test_a_layout_that_differs_is_named_and_the_exit_code_is_5",
    "test_a_run_killed_in_any_phase_goes_on_with_the_same_rollouts",
    "test_a_run_stands_in_the_legend_whatever_its_folder_is_called",
    "test_a_script_runs_as_it_is",
    "test_a_small_real_dataset_is_learnt_and_the_validation_loss_falls_with_it",
    "test_adapters_go_from_peft_to_a_run_and_back_bitwise_and_compute_the_same",
    "test_an_expert_layer_without_tokens_and_a_loss_that_is_nan_are_drawn",
    "test_both_load_as_the_same_function_and_generate_the_same_text",
    "test_every_argument_of_a_megatron_folder",
    "test_every_script_of_the_notes_trains_two_steps_shrunk",
    "test_every_size_is_complete_in_order_and_free_of_deadlock",
    "test_every_value_of_a_config_json",
    "test_every_value_of_a_saved_tokenizer_and_of_a_list_of_ranks",
    "test_from_corpus_to_dataset",
    "test_going_on_from_a_checkpoint_is_bitwise_going_straight_on",
    "test_gradients_are_bitwise_those_without_offloading",
    "test_gradients_are_finite_differences",
    "test_greedy_is_that_of_transformers_on_the_same_weights",
    "test_groups_without_spread_are_asked_again_and_the_position_is_kept",
    "test_half_precision_learns_as_fp32_does_and_keeps_fp32_weights",
    "test_help_takes_little_more_than_the_packages_that_it_needs",
    "test_in_bf16_a_frozen_base_is_stored_as_it_is_used_and_trains_bitwise_the_same",
    "test_killed_process_loses_no_line",
    "test_logits_and_loss_equal_those_of_transformers",
    "test_logprobs_are_those_that_the_model_scores",
    "test_nothing_that_is_read_can_run",
    "test_one_process_is_plain_pytorch",
    "test_one_run_gives_a_png_with_its_curve",
    "test_order_equals_the_plain_loop_for_any_block_and_guess",
    "test_packed_is_padded",
    "test_random_datasets_give_megatrons_samples_token_for_token",
    "test_run_prints_its_layout_then_what_a_step_took_on_each_rank",
    "test_runs_of_one_name_are_told_apart_and_equal_ones_are_all_seen",
    "test_several_micro_batches_are_one_large_one",
    "test_several_runs_are_drawn_over_each_other_in_their_own_colours",
    "test_the_cache_is_released_and_made_anew",
    "test_the_file_that_is_written_is_the_layout_that_was_planned",
    "test_the_kernel_made_of_the_capped_formula_is_the_plain_path",
    "test_the_model_overfits_one_batch",
    "test_the_operator_keeps_the_rules_of_torchs_operators",
    "test_the_resolved_configuration_loads_to_itself",
    "test_the_reward_rises_by_half_of_its_range",
    "test_the_schema_refuses_what_loading_refuses",
    "test_there_and_back_is_bitwise_with_the_same_names_and_configuration",
    "test_time_is_linear_in_the_text",
    "test_tokens_depend_on_the_prompts_keys_and_on_nothing_else",
    "test_what_is_exported_comes_back_bitwise",
    "test_what_is_found_is_what_the_trainer_accepts_in_order_and_in_memory",
    "test_where_nothing_fits_the_plan_says_what_it_would_take",
    "test_workers_and_compression_do_not_change_a_byte",
    "test_zero_bubble_is_never_slower_than_1f1b",
    "test_zero_bubble_waits_for_forward_and_input_less_weights",
}
# These come first, those with the most processes before all, and short files last: no worker ends long before another.
LONGEST = "faults", "optim", "parallel", "parity", "tests", "dialects", "generation", "rl", "training"


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # what is imported is no garbage: a tenth of the time of collecting went into looking
    config.pluginmanager.register(FaultItems(config), "fault_items")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # nor is it in the tests: a sixth of their time
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {folder: number for number, folder in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.parent.name, len(rank)))
    cases = Counter()
    for item in items:
        if (name := item.originalname) in LONG:
            cases[name] += 1
            if cases[name] % 10:  # of ten cases one is quick
                item.add_marker("long")
        if item.path.parent.name in ("faults", "launch") or {"pool", "pool_of_eight"} & set(
            item.fixturenames
        ):
            item.add_marker("processes")
        if item.path.name in COMPILING or any(
            word in item.name for word in ("compiled", "traced", "one_graph")
        ):
            item.add_marker("compiled")
