"""Tests of the options that are no part of what identifies a run."""

from __future__ import annotations

EFFECTS = {
    "name": "tests/cli/test_cli.py::test_run_prints_the_table_and_where_everything_is_and_runs_again_at_once",
    "storage_path": "tests/cli/test_cli.py::test_run_prints_the_table_and_where_everything_is_and_runs_again_at_once",
    "max_failures": "tests/cluster/rounds/test_recovery.py::"
    "test_too_many_failures_end_the_run_and_the_same_command_continues_it",
    "engine.width": "tests/cluster/planning/test_measured_plan.py::"
    "test_as_many_clients_are_stacked_as_fit_but_no_more_than_there_are",
    "engine.capture": "tests/engine/stacks/test_capture.py",
    "engine.rows_per_step": "tests/engine/stacks/test_folded.py::test_a_stack_is_as_wide_as_its_rows",
    "clients.on_error": "tests/cluster/rounds/test_client_policy.py::"
    "test_retries_give_the_bits_of_a_run_without_the_failure_and_end",
    "clients.retries": "tests/cluster/rounds/test_client_policy.py::"
    "test_retries_give_the_bits_of_a_run_without_the_failure_and_end",
    "clients.after_retries": "tests/cluster/rounds/test_client_policy.py::"
    "test_retries_give_the_bits_of_a_run_without_the_failure_and_end",
    "clients.deadline_s": "tests/cluster/rounds/test_client_policy.py::test_an_actor_that_hangs_counts_as_dead",
    "storage.commit_every": "tests/cluster/rounds/test_client_policy.py::"
    "test_a_client_that_fails_after_it_has_contributed_takes_no_part_either",
    "storage.keep_commits": "tests/config/test_options_of_runs.py::test_keep_commits_and_commit_every",
    "storage.copies": "tests/cluster/rounds/test_copies.py::test_every_file_is_there_twice_and_shares_no_bits",
    "storage.copies_path": "tests/cluster/rounds/test_copies.py::test_a_lost_disk_costs_nothing",
    **dict.fromkeys(
        ("init.from", "init.round", "init.sha256"),
        "tests/cluster/rounds/test_forking.py::"
        "test_what_a_run_begins_from_is_part_of_what_it_is_and_a_moved_folder_is_not",
    ),
    "init.what": "tests/cluster/rounds/test_forking.py::test_a_fork_that_was_cut_short_is_no_new_run_and_is_completed",
    "storage.lease_timeout_s": "tests/cluster/rounds/test_two_drivers.py::"
    "test_a_driver_on_another_machine_has_until_its_lease_expires",
    "tracking.tensorboard": "tests/config/test_options_of_runs.py::test_tensorboard",
    "tracking.tensorboard_scalars": "tests/tracking/test_tensorboard.py::test_by_default_there_are_few_curves",
    "tracking.wandb.enabled": "tests/tracking/test_trackers.py::test_wandb_gets_the_summaries_of_every_evaluation",
    "tracking.wandb.project": "tests/tracking/test_trackers.py::test_wandb_gets_the_summaries_of_every_evaluation",
    "tracking.wandb.entity": "tests/tracking/test_trackers.py::test_wandb_gets_the_summaries_of_every_evaluation",
    "tracking.wandb.mode": "tests/tracking/test_trackers.py::test_wandb_gets_the_summaries_of_every_evaluation",
    "tracking.mlflow.enabled": "tests/tracking/test_trackers.py::test_mlflow_gets_parameters_once_and_summaries",
    "tracking.mlflow.tracking_uri": "tests/tracking/test_trackers.py::test_mlflow_gets_parameters_once_and_summaries",
    "tracking.mlflow.experiment": "tests/tracking/test_trackers.py::test_mlflow_gets_parameters_once_and_summaries",
    "tracking.flops": "tests/report/test_harm_and_costs.py::test_costs_that_were_not_counted_are_no_numbers",
    "cluster.backend": "tests/cluster/processes/test_same_bits.py",
    "cluster.address": "tests/cluster/rounds/test_session.py",
    "cluster.num_actors": "tests/cluster/planning/test_resources.py",
    "cluster.label_selector": "tests/actors/processes/test_labels.py::test_only_nodes_that_are_meant_are_planned_with",
    "cluster.balance": "tests/actors/federation/test_pace.py::"
    "test_hosts_share_clients_by_what_they_took_if_it_was_measured",
    "cluster.clients_per_actor": "tests/cluster/planning/test_resources.py",
    "cluster.cpus_per_actor": "tests/cluster/planning/test_resources.py",
    "cluster.actors_per_gpu": "tests/cluster/planning/test_measured_plan.py::"
    "test_several_actors_share_a_gpu_if_clients_are_trained_one_by_one",
    "cluster.probe": "tests/cluster/planning/test_probe_actor.py::"
    "test_the_width_that_was_measured_is_used_and_noted_and_measuring_changes_no_bit",
    "cluster.threads_per_actor": "tests/config/test_options_of_runs.py::test_threads_per_actor",
    "cluster.device": "tests/config/test_options_of_runs.py::test_device",
    "cluster.state_memory": "tests/config/test_options_of_runs.py::test_state_memory_and_spill_dir",
    "cluster.spill_dir": "tests/config/test_options_of_runs.py::test_state_memory_and_spill_dir",
    "cluster.device_state_memory": "tests/devices/test_resident_states.py::test_the_budget_is_an_option",
    "cluster.data_memory": "tests/config/test_options_of_runs.py::test_data_memory",
    "cluster.read_ahead": "tests/actors/hosting/test_ahead.py::test_runs_have_the_same_bits_with_and_without",
    "cluster.shared_memory": "tests/cluster/processes/test_shared_memory.py::"
    "test_large_trees_go_through_shared_memory_where_there_is_room",
    "cluster.startup_timeout_s": "tests/cluster/rounds/test_reliability.py::test_actors_that_do_not_start_in_time",
    "cluster.resources_timeout_s": "tests/cluster/planning/test_resources.py",
    "cluster.stop_grace_s": "tests/config/test_options_of_runs.py::test_stop_grace",
}
"""Options that are no part of what identifies a run, each with the test, or the file of tests, of its effect."""
