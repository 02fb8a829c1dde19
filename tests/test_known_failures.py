"""Every known failure of this kind of software, and the tests that show that it does not happen here.

Numbers are those of the list of public reports that the project was written against; the tests name theirs. A case is
either covered by tests, or its feature is not built, with the reason; what is built later must move up.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from jaxrunner.runner.admission import NOT_BUILT_REQUEST_FIELDS, NOT_BUILT_STEP_FIELDS

TESTS = Path(__file__).parent
NUM_CASES = 129

ORACLES = "stages/test_batch_oracles.py"
SCHEDULER, PROPERTIES = "engine/test_scheduler.py", "runner/test_runner_properties.py::test_random_lives"
RUNNER, RUNNER_CONSTRAINTS = "runner/test_device_runner.py", "runner/test_constraints.py"
OPS, BY_HAND = "sampling/test_constraints.py", "stages/test_constraints.py"
FILTERS, SAFETENSORS = "sampling/test_filters.py", "models/test_safetensors_loader.py"
GRAPHS = "ladder/test_dispatch.py"
RUNNER_GRAMMAR, GRAMMAR = "runner/test_grammar.py", "engine/test_grammar.py"
STRUCTURED = "engine/test_structured_outputs.py"
HOST, HOST_INPUTS = "host_runner/test_known_cases.py", "host_runner/test_input_arrays.py"
NO_COMPILE = f"{RUNNER}::test_500_mixed_steps_compile_nothing"

COVERED: dict[int, tuple[str, ...]] = {
    # Padding and stale rows
    1: (
        f"{ORACLES}::test_k001_padding_does_not_write_the_last_slot",
        f"{HOST}::test_k001_k003_what_nobody_computed_has_no_influence",
    ),
    2: (f"{ORACLES}::test_k002_as_many_slots_are_written_as_there_are_tokens",),
    3: (
        f"{ORACLES}::test_k003_a_padded_row_walks_no_keys",
        "stages/test_poison.py::test_poison_changes_no_live_bit",
        f"{HOST}::test_k001_k003_what_nobody_computed_has_no_influence",
        f"{HOST_INPUTS}::test_k003_k006_a_smaller_step_after_a_larger_one_leaves_neutral_padding",
    ),
    6: (
        f"{ORACLES}::test_k006_sizes_are_padded_before_the_metadata_is_built",
        f"{HOST_INPUTS}::test_k003_k006_a_smaller_step_after_a_larger_one_leaves_neutral_padding",
    ),
    7: (f"{ORACLES}::test_k007_keys_past_the_end_do_not_enter_the_mean",),
    # Rows: those of a DeviceRunner never move, so they are reused, never swapped; those of a HostRunner do
    9: (
        "runner/test_rows.py::test_rows_start_after_the_parking_row_and_are_reused",
        f"{HOST}::test_k009_a_swap_takes_the_restriction_of_each_row_along",
    ),
    10: (
        f"{HOST}::test_k010_the_row_that_a_move_leaves_is_empty",
        "runner/test_sampling.py::test_a_row_forgets_the_stop_ids_of_its_last_owner",
        f"{RUNNER_CONSTRAINTS}::test_k010_a_row_forgets_every_list_of_its_last_owner",
    ),
    11: (f"{RUNNER}::test_the_result_does_not_depend_on_dict_order",),
    16: (f"{HOST}::test_k016_a_request_that_was_not_in_the_step_before_takes_nothing_from_it",),
    # Preemption, resumption, abort
    12: ("runner/test_custom.py::test_k012_a_stateful_processor_counts_tokens_and_survives_a_preemption",),
    13: (f"{SCHEDULER}::test_preemption_changes_no_token", PROPERTIES),
    14: (f"{SCHEDULER}::test_preemption_changes_no_token", PROPERTIES),
    15: (
        f"{RUNNER}::test_preemption_and_resumption_continue_the_same_tokens",
        "runner/test_runner_properties.py::test_a_small_pool_preempts_and_nothing_is_lost",
    ),
    17: (
        f"{RUNNER}::test_abort_and_resubmit_of_an_id_in_one_step",
        f"{SCHEDULER}::test_abort_and_resubmit_of_an_id_between_two_steps",
        PROPERTIES,
    ),
    # Chunked prefill
    18: ("runner/test_known_cases.py::test_k018_a_seed_gives_the_same_tokens_at_every_chunk_size",),
    19: (f"{ORACLES}::test_k019_logits_are_those_of_each_last_token",),
    21: (f"{ORACLES}::test_k021_a_chunk_sees_the_keys_up_to_its_end",),
    # Prefix cache
    22: (f"{SCHEDULER}::test_k022_an_identical_prompt_still_runs_its_last_token",),
    23: (f"{SCHEDULER}::test_k023_after_a_full_hit_the_chain_still_has_its_blocks",),
    24: (f"{SCHEDULER}::test_k024_a_salt_separates_prefixes",),
    26: (f"{SCHEDULER}::test_k026_new_weights_forget_all_prefixes",),
    # Block tables and index width
    27: ("state/test_kv_limits.py::test_large_caches_are_indexed_by_block_and_offset",),
    28: ("state/test_kv_limits.py::test_a_cache_whose_slots_do_not_fit_32_bits_is_refused",),
    29: ("state/test_kv_limits.py::test_k029_the_last_block_of_a_large_cache_keeps_what_is_written",),
    30: (
        "runner/test_known_cases.py::test_k030_a_table_has_room_for_the_context_and_the_lookahead",
        f"{HOST_INPUTS}::test_a_bucket_of_one_row_at_the_end_of_the_context",
    ),
    31: (f"{ORACLES}::test_k031_tables_hold_kernel_blocks",),
    32: ("pallas/test_attention.py::test_mosaic_refuses_what_it_cannot_take",),
    # Sliding windows and groups
    34: (
        f"{ORACLES}::test_k034_a_window_is_a_layers_own",
        f"{ORACLES}::test_k034_shared_and_split_groups_give_the_same",
    ),
    35: (f"{ORACLES}::test_k035_positions_come_from_the_request_not_from_a_window",),
    # Positions
    40: (
        f"{ORACLES}::test_k040_the_token_after_a_full_context_is_stored_nowhere",
        f"{RUNNER}::test_k040_a_prompt_that_fills_the_context_gives_one_token",
    ),
    41: ("models/test_rope.py::test_k041_frequencies_have_no_length_that_a_raised_limit_could_outgrow",),
    # Seeds
    42: (
        "sampling/test_sampler.py::test_k042_neighbours_do_not_matter",
        f"{RUNNER}::test_seeded_draws_do_not_depend_on_neighbours_rows_or_order",
    ),
    # Sampling filters and extremes
    47: (f"{FILTERS}::test_k047_ties_are_cut_alike_at_every_batch_size",),
    48: (f"{FILTERS}::test_k048_top_k_comes_before_top_p",),
    49: (f"{FILTERS}::test_k049_top_k_off_keeps_every_id",),
    50: (
        f"{FILTERS}::test_k050_tiny_temperatures_with_filters_take_the_best",
        "sampling/test_sampler.py::test_k050_tiny_temperatures_take_the_best",
    ),
    51: (f"{FILTERS}::test_k051_one_live_id_among_many_is_always_found",),
    52: (
        f"{FILTERS}::test_k052_damaged_rows_give_an_id_in_range",
        "sampling/test_sampler.py::test_k052_damaged_rows_give_an_id_in_range",
    ),
    53: (f"{FILTERS}::test_k053_rows_with_and_without_top_k_share_a_batch",),
    # Biases, words, stops and min_tokens
    54: (
        f"{RUNNER_CONSTRAINTS}::test_what_a_row_cannot_hold_is_refused_with_the_way_out",
        f"{OPS}::test_k054_a_bias_past_the_vocabulary_changes_no_row",
    ),
    55: ("sampling/test_min_tokens.py::test_k055_an_id_past_the_vocabulary_masks_no_other_row",),
    56: ("engine/test_constraints.py::test_k056_k057_words_are_banned_as_they_are_written",),
    57: (
        "engine/test_constraints.py::test_k056_k057_words_are_banned_as_they_are_written",
        f"{BY_HAND}::test_k057_a_word_is_banned_in_each_of_its_spellings",
    ),
    58: ("sampling/test_min_tokens.py::test_k058_every_end_id_is_masked_for_the_first_outputs",),
    59: (
        f"{SCHEDULER}::test_k059_ignore_eos_covers_all_end_ids_but_not_the_users",
        "sampling/test_min_tokens.py::test_k059_ignore_eos_frees_the_models_ids_but_not_the_users",
    ),
    # Penalties
    60: (f"{OPS}::test_k060_a_penalty_above_1_never_makes_a_repeat_more_likely",),
    61: (f"{RUNNER_CONSTRAINTS}::test_k061_the_order_of_requests_does_not_matter",),
    62: (f"{BY_HAND}::test_k062_penalties_count_tokens_that_the_host_has_not_seen",),
    63: (f"{BY_HAND}::test_k063_prompt_and_output_are_told_apart",),
    # Log-probabilities
    64: ("sampling/test_logprobs.py::test_k064_a_sampled_id_is_listed_once_and_keeps_its_rank",),
    65: ("sampling/test_logprobs.py::test_k065_zero_gives_the_sampled_token_alone_and_none_gives_nothing",),
    66: ("sampling/test_logprobs.py::test_k066_logarithms_not_probabilities",),
    67: ("engine/test_prompt_logprobs.py::test_k067_a_cached_prompt_is_scored_like_a_new_one",),
    68: (
        "runner/test_prompt_logprobs.py::test_k068_a_prompt_that_is_evicted_between_chunks_is_scored_whole",
        "engine/test_prompt_logprobs.py::test_k068_preemption_at_any_time_changes_no_score",
    ),
    # Structured output
    70: (f"{RUNNER_GRAMMAR}::test_k070_a_mask_finds_its_row_by_its_request",),
    71: (f"{RUNNER_GRAMMAR}::test_k071_a_wider_mask_is_cut_and_a_narrower_one_forbids_the_rest",),
    72: (f"{RUNNER_GRAMMAR}::test_k072_a_plain_request_beside_a_structured_one_is_free",),
    73: (f"{GRAMMAR}::test_k073_the_mask_has_a_bit_for_the_largest_id",),
    74: (f"{STRUCTURED}::test_k074_nothing_follows_the_end_of_the_grammar",),
    75: (f"{GRAMMAR}::test_k075_a_cleared_compiler_and_that_of_another_tokenizer_compile_anew",),
    # Results that arrive late
    84: ("state/test_host_arrays.py::test_k084_inputs_may_be_overwritten_while_the_step_runs",),
    85: (f"{RUNNER}::test_asynchronous_outputs_may_be_read_late",),
    86: (f"{RUNNER}::test_asynchronous_outputs_may_be_read_late", PROPERTIES),
    # Checkpoints and configurations
    93: (f"{SAFETENSORS}::test_k093_tied_without_output_matrix_and_nothing_left_unfilled",),
    94: (f"{SAFETENSORS}::test_k094_tied_with_output_matrix_in_the_file",),
    95: ("models/test_config.py::test_k095_explicit_head_dim_and_null",),
    96: ("models/test_config.py::test_k096_hidden_size_need_not_be_divisible_when_head_dim_is_given",),
    97: ("models/test_config.py::test_k097_type_and_rope_type",),
    98: ("models/test_rope.py::test_k098_a_request_that_grows_past_the_original_context_keeps_one_rotation",),
    99: ("models/test_config.py::test_k099_base_at_top_level_and_yarn_are_both_in_force",),
    100: (f"{SAFETENSORS}::test_k100_missing_shard_is_named_before_anything_is_read",),
    101: (f"{SAFETENSORS}::test_k101_bfloat16_is_bit_exact_including_nan_payloads",),
    102: (f"{SAFETENSORS}::test_k102_fp8_keeps_its_bytes_and_unknown_types_are_named",),
    103: (
        f"{SAFETENSORS}::test_k103_file_length_must_agree_with_the_header",
        "damage/test_checkpoints.py::test_damaged_directories",
    ),
    104: (f"{SAFETENSORS}::test_k104_no_tensors_and_zero_size_tensors",),
    105: (f"{SAFETENSORS}::test_k105_each_part_of_a_fused_matrix_has_its_own_scale",),
    106: ("models/test_generation.py::test_k106_an_override_is_merged_key_by_key",),
    107: (
        f"{SCHEDULER}::test_k107_every_end_id_of_the_model_stops",
        "models/test_loading.py::test_k107_end_ids_are_the_union_of_all_sources",
    ),
    108: (
        "models/test_loading.py::test_ids_without_a_token_are_counted",
        "sampling/test_sampler.py::test_ids_without_a_token_are_never_drawn",
    ),
    # Memory
    109: ("engine/test_memory.py::test_k109_the_most_expensive_sampler_path_is_measured",),
    110: ("engine/test_memory.py::test_k110_only_what_is_free_counts",),
    111: ("engine/test_memory.py::test_k111_scheduler_and_arrays_count_the_same_blocks",),
    # Compilation and buckets
    112: (
        "compile/test_ladder.py::test_k112_the_largest_decode_batch_is_in_the_ladder",
        "ladder/test_rules.py::test_k112_every_rule_ends_at_the_exact_maximum",
        f"{GRAPHS}::test_k112_an_explicit_maximum_off_the_grid_loses_the_largest_decode",
    ),
    113: (
        "compile/test_ladder.py::test_k113_every_step_that_fits_finds_a_bucket_it_can_be_packed_into",
        "ladder/test_engine.py::test_k113_the_padding_that_a_replay_predicts_is_what_the_engine_ran",
        f"{GRAPHS}::test_k113_every_captured_graph_is_found_by_a_step_of_its_own_size",
    ),
    114: (
        "compile/test_ladder.py::test_pick_takes_the_smallest_that_fits",
        f"{GRAPHS}::test_k114_the_older_release_takes_the_slow_graph_although_a_fast_one_is_a_little_larger",
    ),
    115: (
        "compile/test_table.py::test_a_default_engine_has_at_most_40_executables",
        "ladder/test_rules.py::test_k115_drafts_do_not_make_vllms_list_grow_without_bound",
    ),
    116: (NO_COMPILE, PROPERTIES),
    117: (NO_COMPILE, "runner/test_reports.py::test_k117_no_mode_compiles_after_warm_up"),
    119: (NO_COMPILE, "test_scoring.py::test_one_call_compiles_the_step_once"),
    # JAX and Pallas
    120: (
        f"{ORACLES}::test_commit_drops_padding_whatever_it_holds",
        f"{ORACLES}::test_k001_padding_does_not_write_the_last_slot",
    ),
    121: ("state/test_host_arrays.py::test_k121_prompts_may_be_overwritten_after_admission",),
    122: ("state/test_donation.py::test_k122_no_two_leaves_share_a_buffer",),
    123: ("runner/test_known_cases.py::test_k123_nan_debugging_finds_the_operation_and_keeps_the_state",),
    124: (
        "state/test_codec.py::test_a_number_past_32_bits_is_refused",
        "state/test_codec.py::test_seeds_travel_as_two_words",
    ),
    125: ("sampling/test_sampler.py::test_k125_nan_beside_a_number",),
    126: ("pallas/test_attention.py::test_xla", "pallas/test_attention.py::test_mosaic_interpreted"),
    127: ("pallas/test_kv_write.py::test_mosaic_lowers_to_one_kernel_in_place",),
    128: (f"{ORACLES}::test_k128_one_query_sees_all_keys_up_to_its_own",),
    129: (f"{ORACLES}::test_k129_tokens_are_the_same_with_64_bit_numbers_on",),
}

NOT_BUILT: dict[str, tuple[int, ...]] = {
    "speculative decoding": (4, 20, 43, 44, 69, *range(76, 84)),
    "shards, and the paddings of TPU kernels": (5, 8),
    "LoRA adapters": (25, 87, 88, 89, 118),
    "local attention in chunks, which splits a request": (33, 36),
    "groups with block sizes of their own: all groups of a model share one": (37,),
    "multimodal inputs and their positions": (38, 39),
    "a mode in which logits do not depend on the batch by a bit; shared-prefix attention": (45, 46),
    "pooling": (90, 91, 92),
}

REFUSED = {
    "speculative decoding": "scheduled_spec_decode_tokens" in NOT_BUILT_STEP_FIELDS,
    "LoRA adapters": "lora_request" in NOT_BUILT_REQUEST_FIELDS,
    "multimodal inputs and their positions": "mm_features" in NOT_BUILT_REQUEST_FIELDS,
    "pooling": "pooling_params" in NOT_BUILT_REQUEST_FIELDS,
}


@functools.cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_case_is_covered_or_said_not_to_be_built():
    missing = [number for numbers in NOT_BUILT.values() for number in numbers]
    assert sorted([*COVERED, *missing]) == list(range(1, NUM_CASES + 1))


@pytest.mark.parametrize("number", COVERED)
def test_the_named_tests_exist(number):
    for node in COVERED[number]:
        file, name = node.split("::")
        assert name in functions(file), f"K{number:03}: {node} does not exist"


@pytest.mark.parametrize("feature", REFUSED)
def test_what_is_not_built_is_still_refused(feature):
    """A feature that was built since must bring the tests of its cases."""
    assert feature in NOT_BUILT
    assert REFUSED[feature], f"{feature} is built: cover its cases {NOT_BUILT[feature]}"


def test_no_test_names_a_case_that_the_table_leaves_out():
    listed = {node for nodes in COVERED.values() for node in nodes}
    named = {
        f"{path.relative_to(TESTS).as_posix()}::{name}"
        for path in TESTS.rglob("test_*.py")
        for name in functions(path.relative_to(TESTS).as_posix())
        if name.startswith("test_k") and name[6:9].isdigit()
    }
    numbers = {int(node.partition("::test_k")[2][:3]) for node in named - listed}
    assert numbers <= COVERED.keys(), sorted(numbers - COVERED.keys())
