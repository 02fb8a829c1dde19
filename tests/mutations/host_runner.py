"""Deliberate mistakes in the dense batch of `HostRunner`, in its input preparation and in what guards its buffers."""

from __future__ import annotations

from jaxrunner.host_runner.row_fields import ROW_FIELDS
from tests.mutations.mutation import Mutation

PACKAGE = "host_runner/"
FIELDS = "tests/host_runner/test_row_fields.py::"
BATCH = "tests/host_runner/test_dense_batch.py::"
ARRAYS = "tests/host_runner/test_input_arrays.py::"
STAGING = "tests/host_runner/test_staging.py::"
CASES = "tests/host_runner/test_known_cases.py::"
GARBAGE = ARRAYS + "test_a_buffer_full_of_garbage_is_rewritten_whole[ragged]"
SMALLER = ARRAYS + "test_k003_k006_a_smaller_step_after_a_larger_one_leaves_neutral_padding"
PROMPTS = "tests/runner/test_prompt_logprobs.py::"
FOLLOWED = "tests/host_runner/test_array_rows.py::test_every_row_has_the_arrays_of_its_request"
RECORDS = BATCH + "test_records_alone_tell_who_is_where"

MOVED_FIELDS = tuple(
    Mutation(
        f"dense batch: {field.name} does not move with its row",
        PACKAGE + "row_fields.py",
        "            if field.used is None:\n                array[target] = array[source]",
        f'            if field.name == "{field.name}":\n                continue\n'
        "            if field.used is None:\n                array[target] = array[source]",
        (f"{FIELDS}test_a_field_moves_with_its_row[{field.name}]",),
    )
    for field in ROW_FIELDS
)

PADDED = (
    *(
        Mutation(
            f"host inputs: padding of {name} as the last step left it",
            PACKAGE + "input_arrays.py",
            f'_set(part["{name}"], {value})',
            f'part["{name}"][: len({value.rpartition(", ")[0]})] = {value.rpartition(", ")[0]}',
            (GARBAGE,),
        )
        for name, value in {
            "seq_lens": "computed + counts, 0",
            "total_len": "rows.known[:num_reqs], 0",
            "newest_row": "newest_row, NONE",
            "logits_indices": "starts[1 : num_reqs + 1] - 1, 0",
            "prompt_len": "metadata.prompt_len, 0",
            "number": "metadata.number, 0",
            "params": "metadata.params, 0",
            "positions": "positions, 0",
        }.items()
    ),
    Mutation(
        "host inputs: padding of input_ids as the last step left it",
        PACKAGE + "input_arrays.py",
        '_set(part["input_ids"], rows.token_ids[row, np.minimum(positions, rows.token_ids.shape[1] - 1)], 0)',
        'part["input_ids"][:num_tokens] = rows.token_ids[row, np.minimum(positions, rows.token_ids.shape[1] - 1)]',
        (GARBAGE,),
    ),
    Mutation(
        "host inputs: query_start_loc tail as the last step left it",
        PACKAGE + "input_arrays.py",
        "starts[num_reqs + 1 :] = num_tokens",
        "pass",
        (GARBAGE, SMALLER),
    ),
    Mutation(
        "host inputs: slots of padding are block 0",
        PACKAGE + "input_arrays.py",
        "* group.block_size + offset, PAD_SLOT_ID)",
        "* group.block_size + offset, 0)",
        (SMALLER, ARRAYS + "test_arrays_equal_the_loops[ragged]"),
    ),
    Mutation(
        "host inputs: block tables of padding as the last step left them",
        PACKAGE + "input_arrays.py",
        'part["block_table"][num_reqs : buffer.num_reqs] = NULL_BLOCK',
        "pass",
        (GARBAGE, SMALLER),
    ),
)

ROWS = (
    Mutation(
        "dense batch: the row that a move leaves keeps its content",
        PACKAGE + "row_fields.py",
        "self.clear(np.setdiff1d(source, target))",
        "pass",
        (CASES + "test_k010_the_row_that_a_move_leaves_is_empty", f"{FIELDS}test_a_field_moves_with_its_row[computed]"),
    ),
    Mutation(
        "dense batch: a swap through views",
        PACKAGE + "batch_updates.py",
        "array[[move.source, move.target]] = array[[move.target, move.source]]",
        "array[move.source], array[move.target] = array[move.target], array[move.source]",
        (CASES + "test_k009_a_swap_takes_the_restriction_of_each_row_along",),
    ),
    Mutation(
        "dense batch: the map does not follow a move",
        PACKAGE + "dense_batch.py",
        "self.row_of[self.rows.req_ids[row]] = row",
        "pass",
        (RECORDS, BATCH + "test_two_requests_change_rows"),
    ),
    Mutation(
        "dense batch: holes stay",
        PACKAGE + "dense_batch.py",
        "            self._relocate(source, holes)\n",
        "",
        (RECORDS, BATCH + "test_the_lowest_hole_is_filled_first_and_the_rest_from_the_end"),
    ),
    Mutation(
        "dense batch: moves are not recorded",
        PACKAGE + "dense_batch.py",
        "self._moved += swaps_of(source, target)",
        "pass",
        (RECORDS,),
    ),
    Mutation(
        "dense batch: requests that a step leaves out stay in front",
        PACKAGE + "dense_batch.py",
        "conditions = [scheduled == 0, ",
        "conditions = [scheduled < 0, ",
        (CASES + "test_k016_a_request_that_was_not_in_the_step_before_takes_nothing_from_it",),
    ),
    Mutation(
        "host runner: metadata of the batch before",
        PACKAGE + "runner.py",
        "            self._metadata = None\n",
        "",
        ("tests/runner/test_constraints.py::test_k061_the_order_of_requests_does_not_matter[host]",),
    ),
    Mutation(
        "host runner: a token of the step before from the row of today",
        PACKAGE + "runner.py",
        "rows.flight_row[: metadata.num_reqs, self._flights.column]",
        "np.where(rows.flight_row[: metadata.num_reqs, self._flights.column] == NONE, NONE, "
        "np.arange(metadata.num_reqs))",
        ("tests/host_runner/test_same_tokens.py::test_random_lives_of_sampled_requests[plain-async]",),
    ),
    Mutation(
        "host runner: a step without a token counts",
        PACKAGE + "flights.py",
        "self._undo(flown[np.asarray(failed)[places]])",
        "pass",
        (CASES + "test_a_request_without_an_id_left_is_as_before_although_a_later_step_was_launched",),
    ),
    Mutation(
        "host runner: a structured decode is fused",
        PACKAGE + "runner.py",
        "has_grammar=bool(metadata.is_structured.any())",
        "has_grammar=False",
        ("tests/runner/test_grammar.py::test_k070_a_mask_finds_its_row_by_its_request[host]",),
    ),
    Mutation(
        "host runner: a one-token chunk of a prompt that is scored runs as a decode",
        PACKAGE + "runner.py",
        " == num_tokens and not keeps_tokens else None",
        " == num_tokens else None",
        (PROMPTS + "test_every_chunking_gives_the_scores_of_the_whole_prompt[chunks1-host]",),
    ),
    Mutation(
        "host runner: scores of an evicted prompt stay",
        PACKAGE + "runner.py",
        "            self._prompts.drop(req_id)\n",
        "",
        (PROMPTS + "test_an_id_that_comes_back_in_one_step_begins_anew[host]",),
    ),
    Mutation(
        "host runner: prompts are scored against the lists of other rows",
        PACKAGE + "second_half.py",
        'lists[part["row"], ',
        'lists[0 * part["row"], ',
        (PROMPTS + "test_requests_in_one_step_get_what_each_asked_for[host]",),
    ),
    Mutation(
        "host runner: a row whose last step failed is sampled",
        PACKAGE + "first_half.py",
        "(self.seq_lens >= self.total_len) & ~self.stuck",
        "(self.seq_lens >= self.total_len)",
        (CASES + "test_a_mask_without_an_id_is_reported_with_both_steps_that_were_launched_before_anybody_knew",),
    ),
    Mutation(
        "host runner: a row whose last step failed does not say so",
        PACKAGE + "second_half.py",
        "no_id_left=output.no_id_left | rows.stuck",
        "no_id_left=output.no_id_left",
        (CASES + "test_a_mask_without_an_id_is_reported_with_both_steps_that_were_launched_before_anybody_knew",),
    ),
    Mutation(
        "host runner: arrays of a row without a token are updated",
        PACKAGE + "second_half.py",
        "jnp.where(output.num_sampled > 0, jnp.arange(num_reqs), carry.num_rows)",
        "jnp.arange(num_reqs)",
        ("tests/runner/test_custom.py::test_a_sampler_that_takes_no_id_fails_its_request_alone[host]",),
    ),
    Mutation(
        "dense batch: two requests have one number",
        PACKAGE + "dense_batch.py",
        "self._numbers.pop()",
        "1",
        (CASES + "test_a_request_has_one_number_of_its_own_for_its_life",),
    ),
    Mutation(
        "array rows: the device does not hear of moves",
        PACKAGE + "array_rows.py",
        "follow(self._source, update.moved, NONE)",
        "pass",
        (
            FOLLOWED,
            "tests/runner/test_custom.py::test_requests_that_are_preempted_again_and_again_lose_no_count[0-host]",
        ),
    ),
    Mutation(
        "array rows: every call moves the rows again",
        PACKAGE + "array_rows.py",
        "            source = np.arange(self._num_rows)\n",
        "",
        ("tests/host_runner/test_array_rows.py::test_many_new_requests_go_up_in_calls_of_bounded_size[4095-2]",),
    ),
    Mutation(
        "arrange: rows that were left keep their arrays",
        PACKAGE + "device_carry.py",
        "is_there = (source != NONE)",
        "is_there = (source >= NONE)",
        (FOLLOWED,),
    ),
    Mutation(
        "arrange: unused places of an upload write",
        PACKAGE + "device_carry.py",
        'jnp.where(jnp.arange(len(new)) < part["num_new"], new, out_of_range)',
        "new + 0 * out_of_range",
        (FOLLOWED,),
    ),
    Mutation(
        "staging: a buffer is handed out while it is read",
        PACKAGE + "staging.py",
        "jax.block_until_ready(buffer.reader)",
        "pass",
        (STAGING + "test_a_buffer_in_use_is_waited_for",),
        fast=True,
    ),
    Mutation(
        "staging: one buffer for every step",
        PACKAGE + "staging.py",
        "def __init__(self, depth: int = 2):",
        "def __init__(self, depth: int = 1):",
        (STAGING + "test_with_one_step_in_flight_nobody_waits",),
    ),
    Mutation(
        "staging: nobody says who reads a buffer",
        PACKAGE + "runner.py",
        "        buffer.reader = result\n",
        "",
        (STAGING + "test_a_runner_waits_for_the_reader_of_its_buffer",),
    ),
)

HOST_RUNNER: tuple[Mutation, ...] = MOVED_FIELDS + PADDED + ROWS
