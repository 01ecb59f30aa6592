"""The faults that a run has to survive, each with the tests that show it, here or where they belong."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

ITEMS = {
    "1 a rank killed at random moments": {
        "faults/test_01_kill_trials.py": ["test_a_run_killed_at_random_moments_ends_as_one_that_never_was"],
    },
    "2 a rank killed in any phase of a save": {
        "faults/test_storage_kill.py": [
            "test_a_rank_killed_in_any_phase_of_a_save_leaves_the_newest_whole_step"
        ],
        "checkpoint/test_checkpoint_saving.py": ["test_a_save_killed_at_any_moment_leaves_a_whole_step"],
    },
    "3 launcher or store host killed": {
        "faults/test_17_fewer_workers.py": [
            "test_a_killed_launcher_leaves_no_rank_behind_and_a_job_of_one_goes_on_with_the_same_global_batch"
        ],
        "faults/test_03_launcher_killed.py": [
            "test_ranks_end_when_the_one_that_holds_the_store_is_killed",
        ],
    },
    "4 a rank stopped, a collective left out": {
        "faults/test_04_hang.py": [
            "test_a_stopped_rank_is_named_and_the_others_end",
            "test_ranks_that_wait_in_different_collectives_are_told_with_both",
        ],
    },
    "5 a save or evaluation beyond the time-out": {
        "faults/test_05_long_save.py": ["test_a_save_and_an_evaluation_longer_than_the_time_out_end_no_run"],
    },
    "6 shards damaged": {
        "faults/test_storage_damage.py": [
            "test_all_ranks_leave_a_damaged_step_for_the_one_before_and_name_the_file"
        ],
        "checkpoint/test_checkpoint_damage.py": [
            "test_damage_is_named_and_the_step_before_is_used",
            "test_a_file_of_another_step_is_found",
        ],
    },
    "7 disk full": {
        "faults/test_storage_disk.py": [
            "test_training_goes_on_when_the_disk_is_full_and_only_the_last_save_is_an_error",
            "test_when_one_rank_cannot_write_all_of_them_learn_which_and_why",
        ],
    },
    "8 weights changed behind a background save": {
        "checkpoint/test_checkpoint_background.py": [
            "test_weights_that_change_after_the_call_are_saved_as_they_were"
        ],
    },
    "9 resume is bitwise": {
        "test_resume.py": ["test_going_on_from_a_checkpoint_is_bitwise_going_straight_on"],
        "parity/test_resume_in_another_layout.py": ["test_tensors_to_the_bit_and_losses_as_if_never_stopped"],
    },
    "10 resharding": {
        "checkpoint/test_checkpoint_layouts.py": [
            "test_from_8_processes_to_4_to_6_to_1_to_8_weights_and_moments_stay_the_same_to_the_bit"
        ],
    },
    "11 each sample once": {
        "faults/test_11_exactly_once.py": [
            "test_each_sample_comes_once_and_in_the_same_order_over_20_restarts"
        ],
        "data/test_loader.py": ["test_restarts_and_changes_of_data_parallel_size_leave_one_stream"],
    },
    "12 resume at the edges": {
        "faults/test_12_resume_edges.py": [
            "test_at_and_around_the_end_of_an_epoch_the_run_goes_on_bitwise",
            "test_a_run_killed_before_its_first_save_starts_from_its_beginning",
        ],
    },
    "13 NaN on one rank": {
        "faults/test_13_lost_gradients.py": [
            "test_all_ranks_skip_the_step_and_the_log_names_the_rank_and_the_parameter",
            "test_the_run_ends_after_so_many_lost_steps_in_a_row",
        ],
    },
    "14 a loss spike": {
        "faults/test_14_loss_spike.py": [
            "test_the_run_goes_back_and_leaves_out_the_data_of_the_spike_and_of_the_step_before",
            "test_a_run_that_went_back_by_hand_returns_to_no_step_of_the_branch_it_left",
        ],
    },
    "15 a bit flipped in a replica": {
        "faults/test_15_flipped_bit.py": [
            "test_the_rank_with_other_weights_is_named_and_nothing_of_it_is_saved"
        ],
    },
    "16 stop signals": {
        "faults/test_16_stop_signals.py": [
            "test_a_signal_to_one_rank_saves_on_all_after_the_same_step_and_the_run_goes_on_bitwise",
            "test_a_second_sigterm_in_the_midst_of_a_save_ends_at_once_and_the_old_checkpoint_is_whole",
        ],
    },
    "17 fewer workers": {
        "faults/test_17_fewer_workers.py": [
            "test_a_killed_rank_is_started_again_from_the_newest_checkpoint_and_sigterm_reaches_the_ranks",
            "test_a_killed_launcher_leaves_no_rank_behind_and_a_job_of_one_goes_on_with_the_same_global_batch",
        ],
    },
    "18 a slow rank": {
        "faults/test_18_straggler.py": ["test_a_slow_rank_is_named_at_each_measurement"],
    },
    "19 a crash loop": {
        "faults/test_19_crash_loop.py": [
            "test_the_launcher_ends_after_so_many_restarts_and_tells_the_first_failure_too",
            "test_each_attempt_waits_and_leaves_its_traceback_and_a_folder_of_another_job_is_refused",
        ],
    },
    "20 damaged data": {
        "data/test_indexed.py": [
            "test_every_truncation_of_either_file_is_refused",
            "test_damage_is_named_with_its_place_and_value",
            "test_random_damage_is_refused_or_stays_inside_the_file",
            "test_a_file_cut_short_while_it_is_open_is_an_error_and_not_a_crash",
        ],
        "data/test_jsonl_reading.py": [
            "test_a_bad_line_is_named_by_file_line_byte_and_reason",
            "test_a_line_over_the_limit_is_refused_without_being_held_and_the_next_is_read",
        ],
        "test_bad_input.py": ["test_a_token_beyond_the_vocabulary"],
    },
    "21 pickles": {
        "faults/test_storage_damage.py": [
            "test_a_pickle_in_the_place_of_a_file_is_refused_and_does_not_run",
            "test_loading_unpickles_nothing_on_any_rank",
        ],
        "test_architecture.py": ["test_nothing_that_is_read_can_run"],
    },
    "22 safetensors headers": {
        "checkpoint/test_checkpoint_damage.py": ["test_safetensors_that_contradict_the_manifest_are_refused"],
    },
    "23 paths and links": {
        "checkpoint/test_checkpoint_damage.py": [
            "test_names_that_leave_the_folder_are_refused",
            "test_symbolic_links_are_refused",
        ],
    },
    "24 YAML": {
        "test_bad_input.py": ["test_a_run_file_that_runs_code_or_expands_is_refused"],
        "config/test_loading.py": [
            "test_what_is_wrong_is_refused_in_one_sentence_a_mistake",
            "test_a_file_that_expands_without_end_is_refused_at_once",
        ],
    },
    "25 two jobs in one folder": {
        "runtime/test_lock.py": ["test_second_job_is_refused_with_the_name_of_the_holder"],
        "test_bad_input.py": ["test_an_output_folder_that_another_job_is_using"],
        "faults/test_19_crash_loop.py": [
            "test_each_attempt_waits_and_leaves_its_traceback_and_a_folder_of_another_job_is_refused"
        ],
    },
    "26 many saves": {
        "faults/test_storage_flat.py": ["test_disk_descriptors_threads_and_memory_stay_flat_over_many_saves"],
    },
}


@pytest.mark.parametrize("item", ITEMS)
def test_the_tests_of_each_item_are_there(item):
    for path, names in ITEMS[item].items():
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert names and found.issuperset(names), path


def test_all_26_items_are_listed():
    assert [int(item.split()[0]) for item in ITEMS] == list(range(1, 27))
