"""Deliberate mistakes, one a rule, and the tests that must turn red for each.

A mutation replaces `old`, which occurs exactly once in `file`, by `new`. `tests.mutations.run` applies it to a copy of
the package and demands that every test named here fails.
"""

from __future__ import annotations

from jaxrunner.state.fields import REQUEST_FIELDS, SAMPLING_FIELDS
from tests.mutations.host_runner import HOST_RUNNER
from tests.mutations.mutation import Mutation

POISON_MIXED = "tests/stages/test_poison.py::test_poison_changes_no_live_bit[mixed-mistral]"
POISON_DECODE = "tests/stages/test_poison.py::test_poison_changes_no_live_bit[decode-mistral]"
POISON_BATCH = "tests/stages/test_poison.py::test_poison_changes_no_bit_of_the_batch[mixed]"
ORACLE_MIXED = "tests/stages/test_step.py::test_random_batches_equal_the_oracle[mistral-mixed-random]"
ORACLE_DECODE = "tests/stages/test_step.py::test_random_batches_equal_the_oracle[mistral-decode-random]"
BATCH = "tests/stages/test_batch_oracles.py::"
ADMISSION = "tests/state/test_admission.py::"
GARBAGE_ROW = ADMISSION + "test_a_row_full_of_garbage_is_rewritten_whole"
WRITES = "tests/state/test_block_writes.py::"
CODEC = "tests/state/test_codec.py::"
RANDOM = "tests/sampling/test_random.py::"
SAMPLER = "tests/sampling/test_sampler.py::"

PADDING = (
    Mutation(
        "batch: query_start_loc tail as uploaded",
        "stages/prepare_inputs.py",
        "jnp.where(jnp.arange(starts.shape[0]) <= num_reqs, starts, starts[num_reqs])",
        "starts",
        (POISON_BATCH,),  # the whole step would walk 2^31 tokens
    ),
    Mutation(
        "batch: padded rows keep their uploaded row",
        "stages/prepare_inputs.py",
        'rows = jnp.where(live, part["idx_mapping"], PARKING_ROW)',
        'rows = part["idx_mapping"]',
        (POISON_BATCH,),
    ),
    Mutation(
        "batch: draft counts of padding as uploaded",
        "stages/prepare_inputs.py",
        "num_draft_tokens=jnp.where(live, drafts, 0) if",
        "num_draft_tokens=drafts if",
        (POISON_BATCH,),
    ),
    Mutation(
        "input_prep: query_start_loc tail as uploaded",
        "pallas/input_prep.py",
        "bounds = jnp.where(jnp.arange(batch.size + 1) <= num_reqs, query_start_loc, query_start_loc[num_reqs])",
        "bounds = query_start_loc",
        (POISON_BATCH, POISON_MIXED),
    ),
    Mutation(
        "input_prep: seq_lens tail is 1",
        "pallas/input_prep.py",
        "seq_lens = jnp.where(live, computed + ends - starts, 0)",
        "seq_lens = jnp.where(live, computed + ends - starts, 1)",
        (BATCH + "test_k006_sizes_are_padded_before_the_metadata_is_built", POISON_BATCH),
    ),
    Mutation(
        "input_prep: positions of padding run on",
        "pallas/input_prep.py",
        "positions = jnp.where(live_token, computed[request] + tokens - starts[request], 0)",
        "positions = computed[request] + tokens - starts[request]",
        (BATCH + "test_worked_example_of_four_decodes", POISON_BATCH),
    ),
    Mutation(
        "input_prep: ids of padding are some request's",
        "pallas/input_prep.py",
        "input_ids=jnp.where(live_token, ids, 0)",
        "input_ids=ids",
        (BATCH + "test_padding_behind_a_full_batch_is_neutral",),
    ),
    Mutation(
        "input_prep: table columns that are not in use are gathered",
        "pallas/input_prep.py",
        "jnp.where(jnp.arange(t.shape[1])[None, :] < num_blocks[rows, g][:, None], t[rows], 0)",
        "t[rows]",
        (POISON_BATCH,),
    ),
    Mutation(
        "slot_mapping: padding gets the null block's slots",
        "pallas/slot_mapping.py",
        "return jnp.where(live & local, slots, PAD_SLOT_ID)",
        "return jnp.where(local, slots, PAD_SLOT_ID)",
        (POISON_MIXED, POISON_DECODE, BATCH + "test_worked_example_of_four_decodes"),
    ),
    Mutation(
        "kv_write: slot -1 wraps to the last block",
        "pallas/kv_write.py",
        "jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)",
        "slot_mapping // block_size",
        (BATCH + "test_k001_padding_does_not_write_the_last_slot", POISON_MIXED),
        fast=True,
    ),
    Mutation(
        "kv_write: slot -1 is clamped to the null block",
        "pallas/kv_write.py",
        "jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)",
        "jnp.maximum(slot_mapping, 0) // block_size",
        (BATCH + "test_k001_padding_does_not_write_the_last_slot", POISON_MIXED),
    ),
    Mutation(
        "attention, decode: dead values are multiplied by 0",
        "pallas/attention.py",
        "v = jnp.where(exists[..., None, None], v, 0.0)",
        "pass",
        (POISON_DECODE,),
    ),
    Mutation(
        "attention, ragged: dead values are multiplied by 0",
        "pallas/attention.py",
        "v = jnp.where(exists[:, None, None], v, 0.0)",
        "pass",
        (POISON_MIXED,),
    ),
    Mutation(
        "attention: masked scores are added to, so NaN stays",
        "pallas/attention.py",
        "scores = jnp.where(mask, scores, NEG_INF)",
        "scores = scores + jnp.where(mask, 0.0, NEG_INF)",
        (POISON_MIXED, POISON_DECODE),
    ),
    Mutation(
        "attention: a row without keys divides by 0",
        "pallas/attention.py",
        "return acc / jnp.where(total > 0, total, 1.0)[..., None]",
        "return acc / total[..., None]",
        (BATCH + "test_k003_a_padded_row_walks_no_keys[1]", POISON_DECODE),
    ),
    Mutation(
        "attention, decode: keys past the end enter",
        "pallas/attention.py",
        "mask = exists[:, None, None, :] & (key_position <= position[..., None])",
        "mask = exists[:, None, None, :] | (key_position >= 0)",
        (BATCH + "test_k007_keys_past_the_end_do_not_enter_the_mean[1]",),
    ),
    Mutation(
        "attention, ragged: not causal",
        "pallas/attention.py",
        "mask = exists & (key_position <= position[:, None])",
        "mask = exists & (key_position >= 0)",
        (ORACLE_MIXED,),
    ),
    Mutation(
        "attention, decode: window one key too long",
        "pallas/attention.py",
        "mask &= key_position > position[..., None] - window",
        "mask &= key_position >= position[..., None] - window",
        (BATCH + "test_k034_a_window_is_a_layers_own[1]", ORACLE_DECODE),
    ),
    Mutation(
        "attention, ragged: window one key too long",
        "pallas/attention.py",
        "mask &= key_position > position[:, None] - window",
        "mask &= key_position >= position[:, None] - window",
        (BATCH + "test_k034_a_window_is_a_layers_own[None]", ORACLE_MIXED),
    ),
    Mutation(
        "sample: padding gets a token",
        "stages/sample.py",
        "jnp.where(samples, sampled.token_ids, NO_TOKEN)",
        "sampled.token_ids",
        (ORACLE_MIXED, ORACLE_DECODE),
    ),
    Mutation(
        "batch: a request without tokens samples again",
        "stages/batch.py",
        "self.live & (self.query_lens > 0) & (self.seq_lens >= self.prefill_len)",
        "self.live & (self.seq_lens >= self.prefill_len)",
        ("tests/stages/test_step.py::test_a_request_without_tokens_is_left_alone",),
    ),
    Mutation(
        "batch: an unfinished prefill samples",
        "stages/batch.py",
        "self.live & (self.query_lens > 0) & (self.seq_lens >= self.prefill_len)",
        "self.live & (self.query_lens > 0)",
        (BATCH + "test_chunked_prefill_samples_only_at_its_end", ORACLE_MIXED),
    ),
    Mutation(
        "commit: padding is added to the parking row",
        "pallas/commit.py",
        "row = jnp.where(rows != PARKING_ROW, rows, out_of_range)",
        "row = rows",
        (BATCH + "test_commit_drops_padding_whatever_it_holds",),
        fast=True,
    ),
    Mutation(
        "commit: history without a sample is written",
        "pallas/commit.py",
        "history_row = jnp.where(entry < num_sampled[:, None], row[:, None], out_of_range)",
        "history_row = row[:, None] + 0 * entry",
        (BATCH + "test_post_update_with_rejected_drafts", ORACLE_MIXED),
    ),
    Mutation(
        "commit: last token without a sample is overwritten",
        "pallas/commit.py",
        "sampled_row = jnp.where(num_sampled > 0, row, out_of_range)",
        "sampled_row = row",
        (ORACLE_MIXED,),
    ),
    Mutation(
        "commit: rejected drafts count as computed",
        "stages/commit.py",
        "requests.query_lens if num_rejected is None else requests.query_lens - num_rejected",
        "requests.query_lens",
        (BATCH + "test_post_update_with_rejected_drafts",),
    ),
    Mutation(
        "apply_diffs: new blocks do not arrive",
        "stages/apply_diffs.py",
        "return state.replace(tables=tables)",
        "return state",
        (ORACLE_MIXED,),
    ),
    Mutation(
        "block writes: entries past the count are written",
        "state/block_writes.py",
        "live = jnp.arange(writes.shape[0]) < count",
        "live = jnp.arange(writes.shape[0]) < writes.shape[0]",
        (WRITES + "test_entries_past_the_count_are_ignored",),
        fast=True,
    ),
    Mutation(
        "block writes: the number of blocks is set, not raised",
        "state/block_writes.py",
        '.max(writes[:, COLUMN] + 1, mode="drop")',
        '.set(writes[:, COLUMN] + 1, mode="drop")',
        (WRITES + "test_the_number_of_blocks_never_falls",),
    ),
    Mutation(
        "block writes: doubles are not noticed",
        "state/block_writes.py",
        "writes[:, GROUP])), :BLOCK]",
        "writes[:, GROUP]))]",
        (WRITES + "test_two_writes_to_one_cell_are_refused",),
    ),
    Mutation(
        "codec: numbers past 32 bits are cut",
        "state/codec.py",
        "if array.min() < -(2**31) or array.max() >= 2**31:",
        "if False:",
        (CODEC + "test_a_scalar_past_32_bits_is_refused",),
        fast=True,
    ),
    Mutation(
        "codec: rows join the packed vector itself",
        "state/codec.py",
        "vector, words = base.copy(), rows.ravel()",
        "base.setflags(write=True)\n        vector, words = base, rows.ravel()",
        (CODEC + "test_rows_join_a_copy_of_a_packed_vector[3]",),
    ),
    Mutation(
        "codec: uploads stay writable",
        "state/codec.py",
        "vector.flags.writeable = False",
        "pass",
        (CODEC + "test_a_vector_is_fresh_and_read_only",),
    ),
    Mutation(
        "init_state: the tables share one buffer",
        "state/runner_state.py",
        "block_table=tuple(jnp.zeros((rows, w), jnp.int32) for w in widths)",
        "block_table=(jnp.zeros((rows, widths[0]), jnp.int32),) * len(widths)",
        ("tests/state/test_donation.py::test_k122_no_two_leaves_share_a_buffer",),
    ),
    Mutation(
        "init_state: slots past 32 bits are accepted",
        "state/runner_state.py",
        "if not 2 <= num_blocks <= limit:",
        "if not 2 <= num_blocks:",
        ("tests/state/test_kv_limits.py::test_a_cache_whose_slots_do_not_fit_32_bits_is_refused[16]",),
    ),
)

RANDOMNESS = (
    Mutation(
        "random: the low word of the seed is dropped",
        "sampling/random.py",
        "words = lax.bitcast_convert_type(seed, jnp.uint32)[:, ::-1]",
        "words = lax.bitcast_convert_type(seed.at[:, 0].set(0), jnp.uint32)[:, ::-1]",
        (RANDOM + "test_both_words_of_a_seed_count[8]", RANDOM + "test_draws_equal_threefry_in_numpy"),
    ),
    Mutation(
        "random: the high word of the seed is dropped",
        "sampling/random.py",
        "words = lax.bitcast_convert_type(seed, jnp.uint32)[:, ::-1]",
        "words = lax.bitcast_convert_type(seed.at[:, 1].set(0), jnp.uint32)[:, ::-1]",
        (RANDOM + f"test_both_words_of_a_seed_count[{2**32 + 7}]", RANDOM + "test_draws_equal_threefry_in_numpy"),
        fast=True,
    ),
    Mutation(
        "random: the words of the seed are swapped",
        "sampling/random.py",
        "words = lax.bitcast_convert_type(seed, jnp.uint32)[:, ::-1]",
        "words = lax.bitcast_convert_type(seed, jnp.uint32)",
        (RANDOM + "test_small_seeds_are_those_of_jax[5]", RANDOM + "test_draws_equal_threefry_in_numpy"),
    ),
    Mutation(
        "random: the words of the seed are mixed into one",
        "sampling/random.py",
        "words = lax.bitcast_convert_type(seed, jnp.uint32)[:, ::-1]",
        "words = jnp.stack([0 * seed[:, 0], seed[:, 0] ^ seed[:, 1]], 1).astype(jnp.uint32)",
        (RANDOM + "test_the_words_of_a_seed_are_not_interchangeable",),
    ),
    Mutation(
        "random: the position is not folded in",
        "sampling/random.py",
        "fold(fold(keys, position), jnp.full",
        "fold(fold(keys, 0 * position), jnp.full",
        (RANDOM + "test_every_position_has_its_own_draw", ORACLE_DECODE),
    ),
    Mutation(
        "random: the stream is not folded in",
        "sampling/random.py",
        "jnp.full(position.shape, stream, jnp.int32)",
        "jnp.zeros_like(position)",
        (RANDOM + "test_streams_are_independent", RANDOM + "test_positions_and_streams_do_not_run_into_each_other"),
    ),
    Mutation(
        "random: the stream is added to the position",
        "sampling/random.py",
        "fold(fold(keys, position), jnp.full(position.shape, stream, jnp.int32))",
        "fold(keys, position + stream)",
        (RANDOM + "test_positions_and_streams_do_not_run_into_each_other",),
    ),
    Mutation(
        "random: two streams are one",
        "sampling/random.py",
        "TARGET, DRAFT, ACCEPT, RESIDUAL, USER = range(5)",
        "TARGET, DRAFT, ACCEPT, RESIDUAL, USER = 0, 1, 2, 1, 4",
        (RANDOM + "test_streams_are_independent",),
    ),
    Mutation(
        "random: one draw for the whole batch, dealt out by row",
        "sampling/random.py",
        'return jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="low"))(keys)',
        "return jax.random.gumbel(keys[0], (keys.shape[0], vocab_size), jnp.float32)",
        (RANDOM + "test_rows_do_not_depend_on_their_neighbours", SAMPLER + "test_k042_neighbours_do_not_matter"),
    ),
    Mutation(
        "random: single ids have noise of their own",
        "sampling/random.py",
        "first, second = words[0], ids + words[1]",
        "first, second = words[1], ids + words[0]",
        (RANDOM + "test_noise_of_single_ids_is_that_of_the_row",),
    ),
    Mutation(
        "draw: what a lane cannot keep is lost",
        "pallas/draw_mosaic.py",
        "is_kept = most <= KEPT",
        "is_kept = most <= 2 * KEPT",
        ("tests/pallas/test_draw.py::test_a_lane_with_more_ids_than_it_keeps_interpreted",),
    ),
    Mutation(
        "draw: damaged rows take what the kernel draws",
        "sampling/filters.py",
        "return jnp.where(left.sound & ~is_greedy, drawn, best)",
        "return drawn",
        ("tests/pallas/test_draw.py::test_greedy_and_damaged_rows_take_their_best_id_interpreted",),
    ),
    Mutation(
        "filters: gathered ids forget what lies before them",
        "pallas/filters_mosaic.py",
        "weights = [before + weight for weight in weights]",
        "weights = list(weights)",
        ("tests/pallas/test_filters.py::test_what_is_gathered_late_of_a_wide_row_interpreted[normal]",),
    ),
    Mutation(
        "best ids: a NaN hides its chunk",
        "pallas/best_ids_mosaic.py",
        "jnp.where(jnp.isnan(maxima), MAX, order_of(maxima))",
        "order_of(maxima)",
        ("tests/pallas/test_best_ids.py::test_interpreted[1284-20]",),
    ),
    Mutation(
        "sample: the draw depends on the row, not on the position",
        "stages/sample.py",
        "sample_tokens(logits, params, requests.seq_lens, **options)",
        "sample_tokens(logits, params, requests.idx_mapping, **options)",
        (ORACLE_DECODE,),
    ),
    Mutation(
        "sample: parameters are taken by place in the batch",
        "stages/sample.py",
        "state.sampling.take(rows)",
        "state.sampling.take(jnp.arange(rows.shape[0]))",
        (ORACLE_DECODE, ORACLE_MIXED),
    ),
    Mutation(
        "sampler: greedy rows of a random batch are drawn",
        "sampling/sampler.py",
        "tokens = jnp.where(is_greedy, tokens, drawn)",
        "tokens = drawn",
        (SAMPLER + "test_greedy_rows_in_a_random_batch_are_exact",),
        fast=True,
    ),
    Mutation(
        "sampler: the maximum is not subtracted",
        "sampling/temperature.py",
        "divide(logits - offset(highest), temperature)",
        "divide(logits, temperature)",
        (SAMPLER + "test_k050_tiny_temperatures_take_the_best[1.1e-05]",),
    ),
    Mutation(
        "sampler: the temperature multiplies",
        "sampling/temperature.py",
        "return 1.0 / jnp.where(temperature < GREEDY_BELOW, 1.0, temperature)",
        "return jnp.where(temperature < GREEDY_BELOW, 1.0, temperature)",
        (SAMPLER + "test_draws_have_the_softmax_distribution[0.4]", ORACLE_DECODE),
    ),
)

SET_COUNTERS = 'requests.counters.at[rewritten].set(part["record"][:, :width], mode="drop")'
SET_PARAMS = 'sampling.params.at[rewritten].set(part["record"][:, width:], mode="drop")'


def _omit(column: int, setter: str, target: str, words: str) -> str:
    """`setter` with one column left as it was."""
    kept = f"[c for c in range({words}.shape[1]) if c != {column}]"
    rows = f"{target}.at[rewritten[:, None], jnp.array({kept})]"
    return f'{rows}.set({words}[:, jnp.array({kept})], mode="drop")'


ROW_FIELDS = (
    *(
        Mutation(
            f"admit: {field.name} of the last owner stays",
            "state/admission.py",
            SET_COUNTERS,
            _omit(column, SET_COUNTERS, "requests.counters", 'part["record"][:, :width]'),
            (f"{ADMISSION}test_each_field_of_the_record_arrives[{field.name}]", GARBAGE_ROW),
        )
        for column, field in enumerate(REQUEST_FIELDS)
    ),
    *(
        Mutation(
            f"admit: {field.name} of the last owner stays",
            "state/admission.py",
            SET_PARAMS,
            _omit(column, SET_PARAMS, "sampling.params", 'part["record"][:, width:]'),
            (f"{ADMISSION}test_each_field_of_the_record_arrives[{field.name}]", GARBAGE_ROW),
        )
        for column, field in enumerate(SAMPLING_FIELDS)
    ),
    Mutation(
        "admit: blocks of the last owner stay",
        "state/admission.py",
        'tables.replace(num_blocks=tables.num_blocks.at[rewritten].set(0, mode="drop"))',
        "tables",
        (GARBAGE_ROW, ADMISSION + "test_releasing_a_row_zeroes_it"),
        fast=True,
    ),
    Mutation(
        "admit: drafts of the last owner stay",
        "state/admission.py",
        'requests.draft_tokens.at[rewritten].set(0, mode="drop")',
        "requests.draft_tokens",
        (GARBAGE_ROW, ADMISSION + "test_releasing_a_row_zeroes_it"),
    ),
    Mutation(
        "admit: lists of the last owner stay",
        "state/admission.py",
        'lists = sampling.lists.at[rewritten].set(0, mode="drop")',
        "lists = sampling.lists",
        (GARBAGE_ROW, ADMISSION + "test_releasing_a_row_zeroes_it"),
    ),
    Mutation(
        "admit: extras of the last owner stay",
        "state/admission.py",
        'name: value.at[rewritten].set(jnp.zeros((), value.dtype), mode="drop") for',
        "name: value for",
        (GARBAGE_ROW, ADMISSION + "test_releasing_a_row_zeroes_it"),
    ),
    Mutation(
        "admit: entries past their number are applied",
        "state/admission.py",
        'rewritten = jnp.where(live & (part["write_record"] == 1), part["row"], out_of_range)',
        'rewritten = jnp.where(part["write_record"] == 1, part["row"], out_of_range)',
        (ADMISSION + "test_ragged_prompts_equal_a_loop[0]",),
    ),
    Mutation(
        "admit: entries without a record rewrite the row",
        "state/admission.py",
        'rewritten = jnp.where(live & (part["write_record"] == 1), part["row"], out_of_range)',
        'rewritten = jnp.where(live, part["row"], out_of_range)',
        (ADMISSION + "test_an_entry_without_a_record_leaves_the_row",),
    ),
    Mutation(
        "admit: tokens past their number are written",
        "state/admission.py",
        'row = jnp.where((index < total) & (part["num_entries"] > 0), part["row"][entry], out_of_range)',
        'row = part["row"][entry]',
        (ADMISSION + "test_ragged_prompts_equal_a_loop[0]",),
    ),
)

CUSTOM_OPS, CUSTOM_STEP = "tests/sampling/test_custom.py::", "tests/stages/test_custom.py::"
CUSTOM_RUNNER = "tests/runner/test_custom.py::"
CUSTOM = (
    Mutation(
        "custom: keys of a processor are those of the draw",
        "sampling/random.py",
        "TARGET, DRAFT, ACCEPT, RESIDUAL, USER = range(5)",
        "TARGET, DRAFT, ACCEPT, RESIDUAL, USER = 0, 1, 2, 3, 0",
        (RANDOM + "test_streams_are_independent",),
    ),
    Mutation(
        "custom: a processor brings back what was forbidden",
        "sampling/custom.py",
        "changes, asks = logits != -jnp.inf, self.asks(values)",
        "changes, asks = jnp.ones(logits.shape, bool), self.asks(values)",
        (CUSTOM_OPS + "test_a_processor_stands_between_bad_words_and_the_thinking_budget",),
    ),
    Mutation(
        "custom: rows that do not ask are processed",
        "sampling/custom.py",
        "            changes &= asks[:, None]",
        "            pass",
        (
            CUSTOM_OPS + "test_rows_that_do_not_ask_keep_every_bit",
            CUSTOM_RUNNER + "test_neighbours_do_not_notice[device]",
        ),
    ),
    Mutation(
        "custom: rows that do not ask are updated",
        "sampling/custom.py",
        "new = jnp.where(asks.reshape(-1, *[1] * (new.ndim - 1)), new, old)",
        "pass",
        (CUSTOM_STEP + "test_a_request_stops_where_the_running_mean_of_its_entropy_says",),
    ),
    Mutation(
        "custom: a sampler may take a dropped id",
        "sampling/custom.py",
        "is_lost = ~is_id | (score == -jnp.inf)",
        "is_lost = ~is_id",
        (CUSTOM_OPS + "test_a_sampler_replaces_the_draw_of_those_who_ask",),
    ),
    Mutation(
        "custom: arrays of rows that sampled nothing are updated",
        "stages/commit.py",
        "rows = jnp.where(num_sampled > 0, requests.idx_mapping, state.requests.num_rows)",
        "rows = requests.idx_mapping",
        (
            CUSTOM_RUNNER + "test_k012_a_stateful_processor_counts_tokens_and_survives_a_preemption[device]",
            CUSTOM_RUNNER + "test_a_sampler_that_takes_no_id_fails_its_request_alone[device]",
        ),
    ),
    Mutation(
        "custom: only the newest value is kept",
        "state/request_arrays.py",
        "name: extras[name].at[rows, num_tokens % GENERATIONS].set(value",
        "name: extras[name].at[rows].set(value[:, None]",
        (
            CUSTOM_OPS + "test_updates_reach_rows_that_sampled_and_the_value_before_stays",
            CUSTOM_RUNNER + "test_a_token_that_was_on_its_way_at_a_preemption_counts_once[device]",
        ),
    ),
    Mutation(
        "custom: a request comes back with the arrays of a new one",
        "runner/device_runner.py",
        "len(tokens), self._kept.values(request))",
        "len(tokens))",
        (
            CUSTOM_RUNNER + "test_k012_a_stateful_processor_counts_tokens_and_survives_a_preemption[device]",
            CUSTOM_RUNNER + "test_requests_that_are_preempted_again_and_again_lose_no_count[1-device]",
        ),
    ),
    Mutation(
        "custom: arrays of padding entries are admitted",
        "state/admission.py",
        'row = jnp.where(part["array_row"] > 0, part["array_row"], out_of_range)',
        'row = part["array_row"]',
        (CUSTOM_OPS + "test_unused_places_of_an_upload_write_no_array",),
    ),
)

OPS = "tests/sampling/test_constraints.py::"
BY_HAND = "tests/stages/test_constraints.py::"
MIXTURE = OPS + "test_any_mixture_equals_the_oracle"
CONSTRAINTS = (
    Mutation(
        "admit: list words past their number are written",
        "state/admission.py",
        'jnp.where(jnp.arange(len(writes)) < part["num_list_writes"], writes[:, 0], out_of_range)',
        "writes[:, 0]",
        (ADMISSION + "test_list_words_equal_a_loop",),
    ),
    Mutation(
        "allowed ids: an unused entry allows the last id",
        "sampling/allowed_ids.py",
        "column = jnp.where(is_id, allowed_ids - 1, vocab_size)",
        "column = allowed_ids - 1",
        (MIXTURE,),
    ),
    Mutation(
        "allowed ids: rows that ask for nothing are emptied",
        "sampling/allowed_ids.py",
        "jnp.where(is_id.any(axis=1, keepdims=True), -jnp.inf, penalised)",
        "jnp.full_like(penalised, -jnp.inf)",
        (MIXTURE,),
    ),
    Mutation(
        "logit bias: an unused entry is that of the last id",
        "sampling/logit_bias.py",
        "column = jnp.where(bias_ids > 0, bias_ids - 1, vocab_size)",
        "column = jnp.minimum(bias_ids - 1, vocab_size - 1)",
        (OPS + "test_k054_a_bias_past_the_vocabulary_changes_no_row",),
    ),
    Mutation(
        "penalties: junk behind a row's tokens counts",
        "sampling/penalties.py",
        "is_known, is_output = index < length[:, None],",
        "is_known, is_output = index >= 0 * length[:, None],",
        (MIXTURE,),
    ),
    Mutation(
        "penalties: the prompt counts as output",
        "sampling/penalties.py",
        "index >= history.prompt_len[:, None]",
        "index >= 0 * history.prompt_len[:, None]",
        (MIXTURE, BY_HAND + "test_k063_prompt_and_output_are_told_apart"),
    ),
    Mutation(
        "penalties: the sign of a logit is ignored",
        "sampling/penalties.py",
        "jnp.where(logits > 0, logits / factor, logits * factor)",
        "logits / factor",
        (MIXTURE, OPS + "test_k060_a_penalty_above_1_never_makes_a_repeat_more_likely"),
    ),
    Mutation(
        "bad words: the prompt counts",
        "sampling/bad_words.py",
        "is_there = (index >= history.prompt_len[:, None]) & (history.at(index) + 1 == word_ids)",
        "is_there = history.at(index) + 1 == word_ids",
        (MIXTURE, BY_HAND + "test_k057_a_word_is_banned_in_each_of_its_spellings"),
    ),
    Mutation(
        "bad words: misses of an earlier word count",
        "sampling/bad_words.py",
        "misses = so_far - jnp.take_along_axis(so_far, jnp.minimum(first, word_ids.shape[1] - 1), axis=1)",
        "misses = so_far",
        (MIXTURE,),
    ),
    Mutation(
        "thinking: an end before the start is not told from one behind it",
        "sampling/thinking.py",
        "(start >= 0) & (start > end)",
        "(start >= 0) & (end < 0)",
        (MIXTURE,),
    ),
    Mutation(
        "replay: the trace begins at the beginning of the prompt",
        "sampling/replay.py",
        "number = position - prompt_len",
        "number = position - 1 + 0 * prompt_len",
        ("tests/runner/test_constraints.py::test_a_trace_is_replayed_and_then_the_request_goes_on_by_itself[device]",),
    ),
    Mutation(
        "sample: a row without an id left gets one",
        "stages/sample.py",
        "samples &= ~no_id_left",
        "pass",
        (BY_HAND + "test_rows_that_nothing_is_left_for_stop_alone",),
    ),
    Mutation(
        "step: a row without an id left has computed its tokens",
        "stages/step.py",
        "undone = None if output.failed is None else jnp.where(output.failed, requests.query_lens, 0)",
        "undone = None",
        (BY_HAND + "test_rows_that_nothing_is_left_for_stop_alone",),
    ),
    Mutation(
        "threshold: ties past the limit are kept",
        "sampling/threshold.py",
        "is_tie & (jnp.arange(scaled.shape[1]) < end[:, None])",
        "is_tie",
        ("tests/sampling/test_filters.py::test_k047_ties_are_cut_alike_at_every_batch_size[2]",),
    ),
)

FLOAT8_SPECS = "tests/pallas/test_float8.py::test_attention[xla-None-fp8 {}]"
FLOAT8 = (
    Mutation(
        "kv_write: float8 overflows to NaN",
        "pallas/kv_write.py",
        "jnp.clip(scaled, -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8)",
        "scaled.astype(FLOAT8)",
        ("tests/pallas/test_float8.py::test_written_values_saturate_and_the_rest_keeps_its_bits[bfloat16-heads0]",),
    ),
    Mutation(
        "kv_write: float8 is stored times its scale",
        "pallas/kv_write.py",
        "rows.astype(jnp.float32) * (1.0 / scale)",
        "rows.astype(jnp.float32) * scale",
        ("tests/pallas/test_float8.py::test_written_values_saturate_and_the_rest_keeps_its_bits[bfloat16-heads0]",),
    ),
    Mutation(
        "attention: values in float8 keep their scale",
        "pallas/attention.py",
        "scale * kv_scales[layer, KEY], kv_scales[layer, VALUE]",
        "scale * kv_scales[layer, KEY], 1.0",
        (FLOAT8_SPECS.format("decode"), FLOAT8_SPECS.format("ragged")),
    ),
    Mutation(
        "attention: keys in float8 keep their scale",
        "pallas/attention.py",
        "scale * kv_scales[layer, KEY], kv_scales[layer, VALUE]",
        "scale, kv_scales[layer, VALUE]",
        (FLOAT8_SPECS.format("decode"), FLOAT8_SPECS.format("ragged")),
    ),
)

GRAPHS = "tests/ladder/test_dispatch.py::"
LADDERS = (
    Mutation(
        "ladder: the older look-up of graphs is the newer one",
        "ladder/dispatch.py",
        'if self.release == "0.28":',
        'if self.release == "none":',
        (GRAPHS + "test_a_mixed_batch_of_five_tokens_is_eager_at_one_release_and_not_at_the_next",),
    ),
    Mutation(
        "ladder: a prompt of one token counts as a decode",
        "ladder/dispatch.py",
        "max_query_len if not num_prefills and max_query_len * num_reqs == num_tokens else None",
        "max_query_len if max_query_len * num_reqs == num_tokens else None",
        (GRAPHS + "test_a_prompt_of_one_token_is_no_uniform_decode[0.28]",),
    ),
    Mutation(
        "ladder: graphs of decodes ignore their number of requests",
        "ladder/dispatch.py",
        "(self.num_reqs is None or self.num_reqs >= num_reqs)",
        "True",
        (GRAPHS + "test_full_graphs_of_other_steps_bound_the_requests",),
    ),
    Mutation(
        "ladder: the best split is looked for below too few candidates",
        "ladder/optimal.py",
        "high = np.minimum(np.where(above <= last, choice[np.minimum(above, last)], last), j - 1)",
        "high = np.minimum(choice[np.minimum(above, last)], j - 1)",
        ("tests/ladder/test_optimal.py::test_long_axes_equal_the_plain_recurrence",),
    ),
    Mutation(
        "ladder: chunks of prompts take the budget before decodes",
        "ladder/serving.py",
        'order = np.argsort(counts > 1, kind="stable")',
        'order = np.argsort(counts <= 1, kind="stable")',
        ("tests/ladder/test_serving.py::test_steps_are_those_of_the_scheduler",),
    ),
    Mutation(
        "ladder: keys are paid for twice",
        "ladder/costs.py",
        'row["value"] * 1e-3 - per_key * keys',
        'row["value"] * 1e-3',
        ("tests/ladder/test_costs.py::test_keys_are_taken_out_of_the_measured_steps_and_counted_in_others",),
    ),
)


CACHE_TESTS = "tests/compile/test_executable_cache.py::"
CACHE = (
    Mutation(
        "cache: signatures are not compared",
        "compile/executable_cache.py",
        "if not hmac.compare_digest(data[len(MAGIC) : start], self._mac(body)):",
        "if False:",
        (CACHE_TESTS + "test_an_entry_signed_elsewhere_is_not_used",),
    ),
    Mutation(
        "cache: an entry is used for whatever its name says",
        "compile/executable_cache.py",
        'if header["program"] != key.program or header["parts"] != key.parts:',
        "if False:",
        (CACHE_TESTS + "test_an_entry_under_another_name_is_not_used",),
    ),
    Mutation(
        "cache: another user's file is read",
        "compile/private_files.py",
        "if found.st_uid != os.geteuid():",
        "if False:",
        (CACHE_TESTS + "test_another_users_entry_is_not_used",),
    ),
    Mutation(
        "cache: what JAX's own cache gave is kept",
        "compile/compiler.py",
        "if persistent_hits() == hits and self.cache",
        "if self.cache",
        ("tests/compile/test_compiler.py::test_what_comes_from_jaxs_own_cache_is_not_kept",),
    ),
    Mutation(
        "warm-up: a program that is waited for keeps its place",
        "compile/warm_up.py",
        "self._urgent.append(program)",
        "pass",
        ("tests/compile/test_warm_up.py::test_a_program_that_nothing_can_replace_is_made_next",),
    ),
)

GRAMMAR = "tests/runner/test_grammar.py::"
STRUCTURED = "tests/engine/test_structured_outputs.py::"
GRAMMARS = (
    Mutation(
        "grammar: rows without a mask may take nothing",
        "runner/grammar.py",
        "np.full((num_rows, num_words(vocab_size)), ~np.uint32(0), np.uint32)",
        "np.zeros((num_rows, num_words(vocab_size)), np.uint32)",
        (GRAMMAR + "test_k072_a_plain_request_beside_a_structured_one_is_free[device]",),
    ),
    Mutation(
        "grammar: masks are those of the first rows",
        "runner/grammar.py",
        "rows = [place[req_id] for req_id in grammar_output.structured_output_request_ids]",
        "rows = [i for i, _ in enumerate(grammar_output.structured_output_request_ids)]",
        (GRAMMAR + "test_k070_a_mask_finds_its_row_by_its_request[device]",),
    ),
    Mutation(
        "grammar: ids past a narrow mask may be taken",
        "runner/grammar.py",
        "bitmask[rows] = 0",
        "bitmask[rows] = ~np.uint32(0)",
        (GRAMMAR + "test_k071_a_wider_mask_is_cut_and_a_narrower_one_forbids_the_rest[device]",),
    ),
    Mutation(
        "grammar: a structured decode is fused",
        "compile/programs.py",
        "bucket.num_reqs <= FUSED_REQS and not has_grammar and not",
        "bucket.num_reqs <= FUSED_REQS and not",
        (GRAMMAR + "test_k070_a_mask_finds_its_row_by_its_request[device]",),
    ),
    Mutation(
        "grammar: a mask without an id gives the first id",
        "stages/sample.py",
        "no_id_left = ~is_allowed(grammar_bitmask, sampled.token_ids)",
        "no_id_left = jnp.zeros_like(samples)",
        (GRAMMAR + "test_a_request_whose_mask_leaves_no_id_fails_alone[params0-device]",),
    ),
    Mutation(
        "host rows: a row stays structured",
        "runner/host_rows.py",
        "self.is_structured[row] = params.structured_outputs is not None",
        "self.is_structured[row] |= params.structured_outputs is not None",
        (GRAMMAR + "test_a_plain_request_in_the_row_of_a_structured_one_needs_no_mask[device]",),
    ),
    Mutation(
        "columns: a slot stays structured",
        "engine/scheduler.py",
        "columns.structured[slot] = request.grammar is not None",
        "columns.structured[slot] |= request.grammar is not None",
        (STRUCTURED + "test_masks_are_filled_while_the_forward_pass_runs",),
    ),
    Mutation(
        "engine: a mask does not wait for the token before it",
        "engine/llm.py",
        "while plan.pending_structured_output_tokens and self._in_flight:",
        "while False:",
        (STRUCTURED + "test_masks_are_filled_while_the_forward_pass_runs",),
    ),
    Mutation(
        "grammar: a request that no id ends may end",
        "engine/grammar.py",
        "elif not self._may_end:",
        "elif False:",
        ("tests/engine/test_grammar.py::test_without_an_end_id_the_grammar_is_over_when_nothing_may_follow",),
    ),
)

NAN = "tests/stages/test_nan_logits.py::"
SORTED = "tests/sampling/test_best_ids.py::"
MODES = "tests/sampling/test_logprobs_modes.py::test_a_batch_reports_what_each_row_asks_for"
RAW = "tests/sampling/test_logprobs_modes.py::test_raw_numbers_are_of_the_models_own_logits"
PLANS = "tests/runner/test_plan_columns.py::"
STEADY = "tests/runner/test_steady_steps.py::"
PROMPTS = "tests/runner/test_prompt_logprobs.py::"
CHUNKED = PROMPTS + "test_every_chunking_gives_the_scores_of_the_whole_prompt[chunks1-device]"
LOGPROBS = (
    Mutation(
        "nans: those of padding are counted",
        "sampling/nans.py",
        "jnp.where(is_live, jnp.sum(jnp.isnan(logits), axis=1, dtype=jnp.int32), 0)",
        "jnp.sum(jnp.isnan(logits), axis=1, dtype=jnp.int32) + 0 * is_live",
        (NAN + "test_counting_changes_no_token",),
    ),
    Mutation(
        "sample: a row with NaN gets a token although it fails",
        "stages/sample.py",
        "samples &= ~failed_by_nan",
        "pass",
        (NAN + "test_a_failing_row_is_as_it_was_before_the_step",),
    ),
    Mutation(
        "best_ids: what is past the end of the row has a score",
        "sampling/best_ids.py",
        'kept = jnp.take_along_axis(kept, place, axis=1, mode="fill", fill_value=-jnp.inf)',
        'kept = jnp.take_along_axis(kept, place, axis=1, mode="fill", fill_value=0)',
        (SORTED + "test_the_best_at_the_ends_of_chunks_and_of_the_row[10241]",),
    ),
    Mutation(
        "best_ids: among equals the higher id is better",
        "sampling/best_ids.py",
        "(other == own) & (place < place[:, None])",
        "(other == own) & (place > place[:, None])",
        (SORTED + "test_equal_to_a_stable_sort", SORTED + "test_the_best_at_the_ends_of_chunks_and_of_the_row[641]"),
    ),
    Mutation(
        "logprobs: raw modes show processed logits",
        "sampling/sampler.py",
        "if params.reports.is_processed else narrow",
        "if params.reports.is_processed else scores",
        (RAW + "[raw_logprobs]", RAW + "[raw_logits]"),
    ),
    Mutation(
        "logprobs: an unused place of a list has a number",
        "sampling/logprobs.py",
        "jnp.where(listed > 0, of_listed, -jnp.inf)",
        "of_listed + 0 * listed",
        ("tests/sampling/test_logprobs.py::test_places_of_a_list_that_are_not_used_have_no_number",),
    ),
    Mutation(
        "columns: listed ids stay behind the best that nobody asked for",
        "runner/logprob_columns.py",
        "place - asked[:, None] - 1 + have",
        "place",
        (MODES + "[raw_logprobs]",),
    ),
    Mutation(
        "prompts: a token is scored by its own logits",
        "runner/prompt_reports.py",
        "computed[owner] + offset + 1",
        "computed[owner] + offset",
        (CHUNKED, PROMPTS + "test_requests_in_one_step_get_what_each_asked_for[device]"),
    ),
    Mutation(
        "prompts: all tokens are taken for the batch's first",
        "runner/prompt_reports.py",
        "AskedTokens(starts[owner] + offset,",
        "AskedTokens(offset,",
        (PROMPTS + "test_requests_in_one_step_get_what_each_asked_for[device]",),
    ),
    Mutation(
        "prompts: a resumed request is scored again",
        "runner/prompt_reports.py",
        "if params.scores_prompt and num_tokens == prompt_len else 0",
        "if params.scores_prompt else 0",
        (PROMPTS + "test_k068_a_prompt_that_is_evicted_between_chunks_is_scored_whole[device]",),
    ),
    Mutation(
        "prompts: a one-token chunk runs as a decode, which keeps no tokens",
        "compile/ladder.py",
        "uniform = None if inputs.keeps_tokens else inputs.uniform_query_len",
        "uniform = inputs.uniform_query_len",
        (CHUNKED,),
    ),
    Mutation(
        "plain plans: rows are kept although the map has changed",
        "runner/plan_columns.py",
        " or requests.version != self._version:",
        ":",
        (PLANS + "test_rows_that_were_given_anew_are_looked_up_again",),
    ),
    Mutation(
        "plain plans: what is equal to a number of tokens counts as that number",
        "runner/plan_columns.py",
        "all(map(is_, num_tokens.values(), values))",
        "[*num_tokens.values()] == values",
        (
            PLANS + "test_a_plan_that_is_refused_is_not_plain[a truth value]",
            PLANS + "test_a_runner_refuses_strange_plans_after_steady_ones[3-device]",
        ),
    ),
    Mutation(
        "plain plans: what is equal to an id counts as that id",
        "runner/plan_columns.py",
        "if not all(map(is_, req_ids, known)):",
        "if req_ids != known:",
        (
            PLANS + "test_a_plan_that_is_refused_is_not_plain[a cached id of another type]",
            PLANS + "test_a_runner_refuses_strange_plans_after_steady_ones[1-device]",
        ),
    ),
    Mutation(
        "plain plans: news are overlooked",
        "runner/plan_columns.py",
        " or any(news) or",
        " or",
        (PLANS + "test_a_plan_with_news_is_none_that_was_there_before[a request ends]",),
    ),
    Mutation(
        "plain plans: an empty field of another type is accepted",
        "runner/plan_columns.py",
        "if [*map(type, news)] != self._types or",
        "if",
        (
            PLANS + "test_a_plan_that_is_refused_is_not_plain[preempted is an array]",
            PLANS + "test_a_plan_with_news_is_none_that_was_there_before[a field of another type]",
        ),
    ),
    Mutation(
        "steady steps: room is looked at for the first one alone",
        "runner/steady_steps.py",
        "> self.count)",
        "> 0)",
        (
            STEADY + "test_a_block_that_ends_stops_the_run_and_a_new_one_carries_it_on",
            STEADY + "test_a_steady_decode_past_its_blocks_is_refused_and_goes_on_with_another[device]",
        ),
    ),
    Mutation(
        "steady steps: a block of a plan that was refused counts",
        "runner/steady_steps.py",
        "self._next_left = left\n",
        "self._left = self._next_left = left\n",
        (STEADY + "test_a_block_that_ends_stops_the_run_and_a_new_one_carries_it_on",),
    ),
    Mutation(
        "steady steps: the tokens that they sampled are not entered",
        "runner/host_rows.py",
        "self._known[steady.rows] += steady.count",
        "pass",
        (STEADY + "test_steady_steps_come_to_what_single_steps_do[1]",),
    ),
    Mutation(
        "steady steps: the length of the model is no limit",
        "runner/host_rows.py",
        "axis=1), self.max_model_len)",
        "axis=1), 2**30)",
        (STEADY + "test_max_model_len_ends_the_run_whatever_blocks_there_are",),
    ),
    Mutation(
        "rows: listed ids of the last owner are counted",
        "runner/host_rows.py",
        "self.num_listed[row] = self.num_prompt_scores[row] = 0",
        "self.num_prompt_scores[row] = 0",
        (PROMPTS + "test_a_row_forgets_what_its_last_owner_asked_for[device]",),
    ),
    Mutation(
        "scheduler: numbers of tokens stay when a request comes",
        "engine/scheduler.py",
        "self._ids, self._decodes = [r.request_id for r in ordered], None",
        "self._ids = [r.request_id for r in ordered]",
        ("tests/engine/test_scheduler.py::test_decodes_of_the_same_requests_share_their_numbers_of_tokens",),
    ),
    Mutation(
        "scheduler: a prompt that is to be scored takes cached blocks",
        "engine/scheduler.py",
        "usable = 0 if request.runs_whole_prompt else len(tokens) - 1",
        "usable = len(tokens) - 1",
        ("tests/engine/test_prompt_logprobs.py::test_k067_a_cached_prompt_is_scored_like_a_new_one",),
    ),
)

WITH_ROPE = "tests/pallas/test_attention_with_rope.py::test_interpreted[{}]"
COLUMNS = "pallas/attention_decode_columns_mosaic.py"
DECODE_KERNELS = (
    Mutation(
        "decode kernel: keys past the end enter",
        "pallas/attention_mosaic.py",
        "mask = key <= first_position - first_key",
        "mask = key <= first_position + 1 - first_key",
        (WITH_ROPE.format("1-one tile, a padded row"), WITH_ROPE.format("2-the new token begins a tile")),
    ),
    Mutation(
        "decode kernel: window one key too long",
        "pallas/attention_mosaic.py",
        "mask & (key > first_position - window - first_key)",
        "mask & (key >= first_position - window - first_key)",
        (WITH_ROPE.format("1-a window"),),
    ),
    Mutation(
        "decode kernel: the new token is written after its tile is copied",
        COLUMNS,
        "compat.when(is_last & at_once)(lambda: _write_new",
        "compat.when(is_last & (share.tiles < 0))(lambda: _write_new",
        (WITH_ROPE.format("1-one tile, a padded row"),),
    ),
    Mutation(
        "decode kernel: the new key is rotated by the angles of another token",
        COLUMNS,
        "rotated_halves(key_ref, _rope_of(fresh, token), fresh.k_norm, fresh.eps)",
        "rotated_halves(key_ref, _rope_of(fresh, jnp.int32(0)), fresh.k_norm, fresh.eps)",
        (WITH_ROPE.format("1-the new token begins a tile"),),
    ),
    Mutation(
        "decode kernel: shares that do not exist have weight",
        "pallas/attention_combine_mosaic.py",
        "log + jnp.where(share < shares, 0.0, NEG_INF)",
        "log",
        ("tests/pallas/test_attention_with_rope.py::test_more_shares_are_allowed_than_there_are",),
    ),
    Mutation(
        "decode kernel: counters are not left at zero",
        "pallas/attention_combine_mosaic.py",
        "arrays.counters[number] = 0  # for the next layer",
        "pass",
        ("tests/pallas/test_attention_with_rope.py::test_layers_share_their_counters",),
    ),
)

MUTATIONS: tuple[Mutation, ...] = (
    *PADDING,
    *RANDOMNESS,
    *ROW_FIELDS,
    *CUSTOM,
    *CONSTRAINTS,
    *FLOAT8,
    *LADDERS,
    *CACHE,
    *GRAMMARS,
    *LOGPROBS,
    *DECODE_KERNELS,
    *HOST_RUNNER,
)
