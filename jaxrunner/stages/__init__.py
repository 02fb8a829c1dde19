"""One step, a file a stage: apply_diffs, prepare_inputs, forward, sample, commit; `step` composes them."""
