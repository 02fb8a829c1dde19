"""Stacked weights: scanned over, or, as on a GPU, cut into layers. Both are the model of the other layout."""

from __future__ import annotations

import jax
import numpy as np

from jaxrunner.models.model import LayerSpec, Model
from jaxrunner.models.transformer import _cut
from jaxrunner.models.weights import random_weights
from jaxrunner.scoring import score

MODEL = Model("LlamaForCausalLM", 128, 32, 64, 4, 2, 16, (LayerSpec(),) * 3, max_position_embeddings=64)
STACKED = MODEL.replace(layout="stacked")


def test_cut_layers_are_those_of_the_other_layout():
    cut = _cut(random_weights(STACKED)["layers"], MODEL.num_layers)
    jax.tree.map(np.testing.assert_array_equal, cut, list(random_weights(MODEL)["layers"]))


def test_logits_are_equal_however_the_layers_are_walked(monkeypatch):
    ids = [list(range(3, 40))]
    (unrolled,), (scanned,) = score(MODEL, random_weights(MODEL), ids), score(STACKED, random_weights(STACKED), ids)
    jax.clear_caches()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        (cut,) = score(STACKED, random_weights(STACKED), ids)
    jax.clear_caches()
    np.testing.assert_allclose(cut, unrolled, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-5, atol=1e-5)
