"""Commit as one Mosaic GPU kernel: in place, one CTA a request, scalar loads and stores alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat
from jaxrunner.state.fields import LAST_SAMPLED, NUM_COMPUTED, TOTAL_LEN
from jaxrunner.state.requests import PARKING_ROW


def commit_rows_mosaic(
    counters: jax.Array,
    token_ids: jax.Array,
    rows: jax.Array,
    num_computed: jax.Array,
    sampled_token_ids: jax.Array,
    num_sampled: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `commit_rows`. Raises ImplementationError where Mosaic GPU kernels cannot run."""
    max_len, most = token_ids.shape[1], sampled_token_ids.shape[1]

    def commit_rows(rows_ref, computed_ref, sampled_ref, count_ref, counters_ref, tokens_ref):
        b = lax.axis_index("cta")
        row, count = rows_ref[b], count_ref[b]
        total, computed = counters_ref[row, TOTAL_LEN], counters_ref[row, NUM_COMPUTED]
        # All threads do the same: each must have read the old numbers before the first writes the new ones.
        compat.commit()

        @compat.when(row != PARKING_ROW)
        def _():
            counters_ref[row, NUM_COMPUTED] = computed + computed_ref[b]
            counters_ref[row, TOTAL_LEN] = total + count
            for i in range(most):
                place = total + i

                @compat.when((i < count) & (place < max_len))
                def _(i=i, place=place):
                    tokens_ref[row, place] = sampled_ref[b, i]

            @compat.when(count > 0)
            def _():
                counters_ref[row, LAST_SAMPLED] = sampled_ref[b, jnp.minimum(count, most) - 1]

    targets = [compat.in_place(counters), compat.in_place(token_ids)]
    compat.kernel(
        commit_rows,
        out_type=[],
        grid=(rows.shape[0],),
        grid_names=("cta",),
        auto_barriers=False,
    )(rows, num_computed, sampled_token_ids, num_sampled, *targets)
    return targets[0][...], targets[1][...]
