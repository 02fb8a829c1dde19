import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.models.config import model_from_config
from jaxrunner.models.model import LayerSpec, Model
from jaxrunner.models.weights import abstract_weights, build_weights, parameter_bytes, random_weights, weight_table

from .checkpoints import GOLDEN, TINY, config_of, read_bf16_as_float32

SMALL = Model("Qwen3ForCausalLM", 50, 24, 40, 6, 2, 8, (LayerSpec(),) * 3, qkv_bias=True, qk_norm=True)


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


def test_names_and_shapes():
    table = abstract_weights(SMALL.replace(o_bias=True, mlp_bias=True, dtype="bfloat16"))
    layer = {name: leaf.shape for name, leaf in table["layers"][0].items()}
    assert layer == {
        "input_norm": (24,),
        "qkv": ((6 + 2 * 2) * 8, 24),
        "qkv_bias": (80,),
        "q_norm": (8,),
        "k_norm": (8,),
        "o": (24, 48),
        "o_bias": (24,),
        "post_norm": (24,),
        "gate_up": (80, 24),
        "gate_up_bias": (80,),
        "down": (24, 40),
        "down_bias": (24,),
    }
    assert {name: table[name].shape for name in ("embed_tokens", "norm", "lm_head")} == {
        "embed_tokens": (50, 24),
        "norm": (24,),
        "lm_head": (50, 24),
    }
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(table))


def test_tied_model_has_no_second_matrix():
    assert "lm_head" not in weight_table(SMALL.replace(tie_word_embeddings=True))


@pytest.mark.parametrize("layout", ["layers", "stacked"])
def test_axes_name_every_dimension(layout):
    for spec in jax.tree.leaves(weight_table(SMALL.replace(layout=layout))):
        assert len(spec.axes) == len(spec.shape)
        assert (spec.axes[0] == "layers") == (layout == "stacked" and "layers." in spec.hf_names[0])


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("layout", ["layers", "stacked"])
def test_plan_names_each_checkpoint_tensor_once_and_covers_each_array(name, layout):
    model = model_from_config(config_of(name), layout=layout)
    names = []
    for spec in jax.tree.leaves(weight_table(model)):
        filled = np.zeros(spec.shape, int)
        for part in spec.parts():
            assert filled[part.place].shape == part.shape
            filled[part.place] += 1
            names.append(part.hf_name)
        assert (filled == 1).all()
    assert sorted(names) == sorted(read_bf16_as_float32(GOLDEN / "tiny" / name / "model.safetensors"))


def test_random_weights_have_a_sane_scale():
    model = SMALL.replace(hidden_size=256, intermediate_size=300, dtype="bfloat16")
    weights = random_weights(model, seed=3)
    assert shapes(weights) == shapes(abstract_weights(model))
    layer = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), weights["layers"][1])
    assert layer["gate_up"].std() == pytest.approx(256**-0.5, rel=0.05)
    assert layer["down"].std() == pytest.approx(300**-0.5, rel=0.05)
    assert abs(layer["input_norm"].mean() - 1) < 0.05
    assert 0 < layer["input_norm"].std() < 0.2
    assert (layer["qkv"] == np.asarray(weights["layers"][0]["qkv"], np.float32)).mean() < 0.02


def test_random_weights_depend_on_the_seed_and_not_on_the_layout():
    weights, again, other = random_weights(SMALL), random_weights(SMALL, 0), random_weights(SMALL, 1)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), weights, again))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).mean() < 0.02), weights, other))
    stacked = random_weights(SMALL.replace(layout="stacked"))
    for name, leaf in stacked["layers"].items():
        np.testing.assert_array_equal(leaf, np.stack([layer[name] for layer in weights["layers"]]))
    np.testing.assert_array_equal(stacked["embed_tokens"], weights["embed_tokens"])


def test_built_arrays_keep_their_values_when_the_sources_are_overwritten():
    sources = []

    def read(name):
        source = np.full(shape_of[name], float(len(sources) + 1), np.float32)
        sources.append(source)
        return source

    shape_of = {part.hf_name: part.shape for s in jax.tree.leaves(weight_table(SMALL)) for part in s.parts()}
    weights = build_weights(SMALL, read)
    before = jax.tree.map(np.array, weights)
    for source in sources:
        source[...] = np.nan
    jax.tree.map(np.testing.assert_array_equal, weights, before)
    qkv = np.asarray(weights["layers"][0]["qkv"])
    assert len({*qkv[:48].ravel()}) == len({*qkv[48:64].ravel()}) == len({*qkv[64:].ravel()}) == 1


def test_parameter_bytes():
    model = model_from_config(config_of("llama"), dtype="bfloat16")
    assert parameter_bytes(model) == 2 * 125376
