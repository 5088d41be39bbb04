"""What ``make test`` leaves for another day: the cases of parametrised tests by turns, and slow tests once a week.

Every test runs every day, one that has cases with at least one of them, unless `SPREAD` or `WEEKLY` names it; a week of
runs covers everything. ``CROSSPACK_TEST_ALL`` (``make test-all``) turns this off, and so does choosing tests on
the command line: a file, a test, ``-k`` or ``-m``.
"""

from __future__ import annotations

import datetime
import os
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

WEEK = 7
# Folder or file -> in how many turns the cases of each of its tests are taken, at least one of them every day.
CASES = {
    "tests/conformance": 7,
    "tests/house/test_readme.py": 7,
    "tests/cli": 3,
}
# Folder or file -> on one day in how many its tests without cases run; a file's own number counts before its folder's.
# They are the dear ones. Each case of a test that has cases runs once a week, so there are days without one.
SPREAD = {
    "tests/cli/test_any_input.py": 3,
    "tests/cli/test_audit.py": 3,
    "tests/cli/test_bench.py": 3,
    "tests/cli/test_commands.py": 7,
    "tests/conformance/test_conform.py": 7,
    "tests/conformance/test_run.py": 7,
    "tests/house/test_picture.py": 7,
    "tests/jax_backend": 7,
    "tests/packing_core": 2,
    "tests/packing_core/test_conventions.py": 7,
    "tests/packing_core/test_dataset.py": 7,
    "tests/torch_backend": 7,
}
# File -> tests that take seconds; none for a whole file, whose tests share what takes them. What they prove is proved
# every day by quicker ones; these add whole runs: a process, a console command, ranks, a compiled step, a page of docs.
WEEKLY: dict[str, tuple[str, ...]] = {
    "tests/cli/test_commands.py": ("test_the_built_in_default_trains", "test_a_hub_name_is_found_in_the_hub_cache"),
    "tests/cli/test_examples.py": (
        "test_ranks_share_weights_and_steps",
        "test_deepspeed_trains_packed_rows",
        "test_a_plain_loop_learns_on_packed_rows",
        "test_accelerate_counts_tokens_over_its_ranks",
        "test_a_trainer_packs_its_data_set_by_one_line",
        "test_sft_trainer_is_exact_by_one_line",
        "test_a_classifier_learns_on_packed_rows",
        "test_dpo_learns_on_packed_pairs_what_is_exact",
        "test_a_reward_model_learns_on_packed_answers",
        "test_grpo_learns_on_packed_completions",
        "test_a_jax_loop_learns_on_packed_rows",
        "test_an_nnx_model_of_ones_own_is_exact_and_learns",
        "test_grain_deals_rows_to_hosts_and_resumes_a_stream",
        "test_a_stream_and_its_losses_go_on_after_a_stop",
        "test_ray_writes_the_bytes_of_one_machine",
        "test_the_gate_rejects_a_causal_mask_and_passes_the_document_mask",
        "test_other_stacks_are_audited_as_they_are",
    ),
    "tests/cli/test_launch.py": ("test_torchrun_trains_as_one_process_does_and_one_process_goes_on",),
    "tests/cli/test_notebooks.py": ("test_a_notebook_runs",),
    "tests/cli/test_pack_runs.py": ("test_workers_end_with_their_parent",),
    "tests/cli/test_records.py": ("test_the_standard_library_has_about_four_thousand_documents",),
    "tests/conformance/test_docs.py": (
        "test_the_plugin_is_right_at_first",
        "test_a_hugging_face_stack_is_judged_as_the_page_says",
        "test_the_short_adapters_pass",
        "test_a_flax_model_is_judged_as_the_page_says",
    ),
    "tests/house/test_release.py": (
        "test_wheel_and_sdist_hold_the_packages_and_nothing_else",
        "test_a_wheel_with_a_test_or_without_the_licence_is_refused",
        "test_every_command_without_extras_says_what_to_install",
        "test_an_extra_alone_is_enough_for_its_part",
        "test_an_environment_lacks_what_was_not_asked_for",
    ),
    "tests/jax_backend/test_attention_lowering.py": ("test_the_compiled_kernels_fit_into_shared_memory",),
    "tests/jax_backend/test_benchmarks.py": (
        "test_the_gate_sees_a_wrong_number_and_one_that_is_none",
        "test_rows_of_one_shape_share_a_program_only_under_the_same_cap",
    ),
    "tests/jax_backend/test_conformance.py": ("test_ranks_are_devices_and_each_has_its_own_microbatch",),
    "tests/jax_backend/test_docs.py": (
        "test_the_suite_finds_the_leak_of_the_page_and_passes_its_cure",
        "test_without_segment_ids_maxtexts_rows_are_one_document_each",
        "test_the_flax_model_gives_what_its_dense_mask_gave",
    ),
    "tests/jax_backend/test_moe.py": (
        "test_rows_spread_over_devices_train_as_on_one",
        "test_no_document_moves_another_through_the_experts",
    ),
    "tests/jax_backend/test_placement.py": (
        "test_two_processes_train_on_rows_of_their_own_as_one_process_on_all_rows",
    ),
    "tests/jax_backend/test_train.py": (
        "test_the_console_command_compares_packed_with_padded",
        "test_a_resumed_run_repeats_to_the_bit",
        "test_each_run_has_the_losses_of_torchs_packed_run",
    ),
    "tests/jax_backend/test_train_options.py": (
        "test_bfloat16_weights_are_trained_and_written_as_such",
        "test_adapters_alone_are_trained_and_peft_reads_them",
        "test_a_run_goes_on_over_other_devices",
        "test_the_console_command_takes_them_and_its_file_repeats_the_run",
    ),
    "tests/jax_backend/test_train_step.py": ("test_fifty_steps_follow_torch_on_each_document_alone",),
    "tests/torch_backend/test_captured.py": ("test_compiled_layers_share_a_graph_over_layers_and_segmentations",),
    "tests/torch_backend/test_causal_lm_loss.py": ("test_a_compiled_model_is_compiled_once",),
    "tests/torch_backend/test_composition.py": ("test_a_saved_model_loads_in_another_process",),
    "tests/torch_backend/test_conditions.py": ("test_compiled_once_for_eight_segmentations",),
    "tests/torch_backend/test_distributed_job.py": (),
    "tests/torch_backend/test_distributed_logprobs.py": (),
    "tests/torch_backend/test_distributed_loss.py": (),
    "tests/torch_backend/test_distributed_post_training.py": (),
    "tests/torch_backend/test_distributed_step.py": (),
    "tests/torch_backend/test_packed_calls.py": (
        "test_rows_of_any_length_share_graphs",
        "test_a_pooler_reads_its_documents_after_compiled_layers_dropped_their_lengths",
    ),
    "tests/torch_backend/test_rotary.py": ("test_a_patched_layer_compiles_into_one_graph",),
    "tests/torch_backend/test_rows.py": ("test_two_ranks_hold_every_document_once_and_train_as_the_documents_alone",),
    "tests/torch_backend/test_sharded.py": (),
    "tests/torch_backend/test_torchrun.py": (),
    "tests/torch_backend/test_triton_attention.py": ("test_compiles_into_one_graph_whatever_the_segmentation",),
}

# The weekly ones in order, which spreads them evenly over the days.
SLOTS = [(file, name) for file, names in WEEKLY.items() for name in names or ("",)]


def everything(arguments: Iterable[str]) -> bool:
    """Whether a run with these command-line arguments takes every test: all were asked for, or a file by name."""
    return "CROSSPACK_TEST_ALL" in os.environ or any(not Path(x.partition("::")[0]).is_dir() for x in arguments)


def today() -> int:
    """The number of the day, the same in every process of a run that goes on past midnight."""
    return int(os.environ.setdefault("CROSSPACK_TEST_DAY", str(datetime.date.today().toordinal())))


def waiting(ids: Sequence[str], day: int) -> set[str]:
    """Which of these tests, by their ids ``file::test[case]``, wait for another day.

    Args:
        ids: all ids that were collected, the cases of a test in order.
        day: a number that grows by one a day.
    """
    cases: dict[Hashable, list[str]] = defaultdict(list)
    for name in ids:
        cases[name.partition("[")[0]].append(name)
    return {name for test, named in cases.items() for name in _waiting_of(str(test), named, day)}


def _waiting_of(test: str, cases: list[str], day: int) -> list[str]:
    file, _, name = test.partition("::")
    if WEEKLY.get(file) == ():
        return cases if (day + SLOTS.index((file, ""))) % WEEK else []
    if (file, name) in SLOTS:
        return [case for number, case in enumerate(cases) if (day + SLOTS.index((file, name)) + number) % WEEK]
    days = SPREAD.get(file) or SPREAD.get(file.rpartition("/")[0])
    if len(cases) == 1:
        turns = days or 1
    elif days:
        turns = WEEK
    else:
        several = next((n for path, n in CASES.items() if f"{file}/".startswith(path + "/")), 1)
        turns = min(several, len(cases))
    return [case for number, case in enumerate(cases) if (day + zlib.crc32(test.encode()) + number) % turns]
