import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.errors import ConfigError
from megajax.ops import apply_rope, rope_attention_factor, rope_frequencies, section_axes

LLAMA3 = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_positions": 8192}
REFERENCES = json.loads((Path(__file__).parents[1] / "data_files" / "rope_frequencies.json").read_text())


def numpy_rope(x, positions, frequencies):
    """Pairs (i, i + R/2) as complex numbers, turned by exp(i · position · frequency)."""
    half = len(frequencies)
    angles = positions[:, :, None, None] * np.asarray(frequencies, np.float64)
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.smoke
@pytest.mark.parametrize(("head_dim", "fraction"), [(8, 1.0), (40, 1.0), (40, 0.4), (8, 0.25), (100, 0.58)])
def test_rotation_value_and_gradient(check_op, rng, head_dim, fraction):
    frequencies = rope_frequencies(head_dim, 10000.0, fraction, None)
    assert frequencies.shape == (round(head_dim * fraction) / 2,)
    # Packed documents: positions start anew within the sequence.
    positions = np.stack([np.arange(37), np.concatenate([np.arange(20), np.arange(17)])])
    check_op(
        lambda x: apply_rope(x, jnp.asarray(positions), frequencies),
        lambda x: numpy_rope(x, positions, frequencies),
        [rng.normal(size=(2, 37, 3, head_dim))],
    )


def test_the_rest_of_a_partly_rotated_head_passes_unchanged(rng):
    x = np.asarray(rng.normal(size=(1, 9, 2, 40)), jnp.bfloat16)
    run = jax.jit(lambda x: apply_rope(x, jnp.arange(9)[None], rope_frequencies(40, 1e4, 0.4, None)))
    out = np.asarray(run(x))
    np.testing.assert_array_equal(out[..., 16:], x[..., 16:])
    assert not np.array_equal(out[:, 1:, :, :16], x[:, 1:, :, :16])


def test_scores_depend_on_the_distance_alone(x64, rng):
    frequencies = rope_frequencies(16, 1e4, 1.0, None)
    q, k = rng.normal(size=(2, 1, 1, 1, 16))
    turned = jax.jit(lambda x, position: apply_rope(x, position, frequencies))

    def score(i, j):
        return float(np.vdot(turned(q, np.array([[i]])), turned(k, np.array([[j]]))))

    assert score(7, 3) == pytest.approx(score(1007, 1003), rel=1e-9)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-3)


def test_plain_frequencies_worked_by_hand():
    found = rope_frequencies(8, 10000.0, 1.0, None)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [1.0, 0.1, 0.01, 0.001], rtol=1e-7)
    np.testing.assert_allclose(rope_frequencies(16, 10000.0, 0.25, None), [1.0, 0.01], rtol=1e-7)


def test_llama3_scaling_worked_by_hand():
    """Within 64 positions the three frequencies turn 10.2, 2.5 and 0.61 times: kept, blended, divided."""
    middle = 2.5 * 2 * np.pi / 64
    scaling = LLAMA3 | {"original_max_positions": 64}
    found = rope_frequencies(6, middle**-3, 1.0, scaling)
    np.testing.assert_allclose(found, [1.0, middle * (1 + 1 / 8) / 2, middle**2 / 8], rtol=1e-6)


def test_llama3_scaling_by_wavelengths_as_published():
    found = rope_frequencies(128, 500000.0, 1.0, LLAMA3)
    kinds = set()
    for i, frequency in enumerate(found):
        plain = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * np.pi / plain
        if wavelength < 8192 / 4:
            expected, kind = plain, "kept"
        elif wavelength > 8192 / 1:
            expected, kind = plain / 8, "divided"
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected, kind = (1 - smooth) * plain / 8 + smooth * plain, "blended"
        kinds.add(kind)
        assert frequency == pytest.approx(expected, rel=1e-6)
    assert kinds == {"kept", "divided", "blended"}


@pytest.mark.parametrize(("head_dim", "fraction"), [(10, 0.5), (8, 0.1), (8, 1.5), (8, 1e-9)])
def test_a_fraction_that_rotates_no_even_part_of_the_head_is_refused(head_dim, fraction):
    with pytest.raises(ConfigError, match=f"model.rope_fraction={fraction} .*even"):
        rope_frequencies(head_dim, 1e4, fraction, None)


@pytest.mark.smoke
@pytest.mark.parametrize("reference", REFERENCES, ids=lambda r: "-".join(map(str, r["arguments"][3].values())))
def test_scaled_frequencies_are_those_of_transformers(reference):
    scaling, kept = reference["arguments"][3], rope_frequencies(*reference["arguments"][:3], None)
    found = rope_frequencies(*reference["arguments"])
    np.testing.assert_allclose(found, reference["frequencies"], rtol=2e-6)
    assert rope_attention_factor(scaling) == pytest.approx(reference["attention_factor"], rel=1e-12)
    longer = scaling["kind"] != "dynamic" or reference["arguments"][4] > scaling["original_max_positions"]
    assert np.array_equal(found, kept) != longer, "scaling has no effect"


def test_the_factor_multiplies_the_rotated_part_and_its_gradient(check_op, rng):
    frequencies, positions = rope_frequencies(8, 100.0, 0.5, None), np.arange(5)[None]

    def scaled(x):
        out = numpy_rope(x, positions, frequencies)
        return np.concatenate([1.5 * out[..., :4], out[..., 4:]], axis=-1)

    x = rng.normal(size=(1, 5, 2, 8))
    check_op(lambda x: apply_rope(x, jnp.asarray(positions), frequencies, 1.5), scaled, [x])


@pytest.mark.parametrize("given", [{}, {"mscale": 0.7}, {"mscale_all_dim": 0.7}], ids=str)
def test_yarns_factor_without_both_settings_is_that_of_its_rule(given):
    """As transformers has it: 0.1 ln(factor) + 1."""
    scaling = {"kind": "yarn", "factor": 4.0, "attention_factor": None} | given
    assert rope_attention_factor(scaling) == pytest.approx(1 + 0.1 * np.log(4), rel=1e-12)


def test_yarn_may_end_its_ramp_beyond_the_last_frequency():
    """By the paper's rule, for a head of 8 and theta 100."""
    scaling = {"kind": "yarn", "factor": 4.0, "original_max_positions": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    first, last = (8 * np.log(4096 / (2 * np.pi * turns)) / (2 * np.log(100)) for turns in (32, 1))
    divided = np.clip((np.arange(4) - np.floor(first)) / (np.ceil(last) - np.floor(first)), 0, 1)
    assert last > 4 and 0 < divided[3] < 1
    expected = 100 ** (-np.arange(4) / 4) * (1 - divided + divided / 4)
    np.testing.assert_allclose(rope_frequencies(8, 100.0, scaling=scaling | {"truncate": True}), expected, rtol=1e-6)


def test_yarns_ramp_ends_at_the_last_of_the_rotated_numbers():
    """As transformers limits it: 10^6 positions turn once at index 10.4, and a head of 8 has no index beyond 7."""
    scaling = {"kind": "yarn", "factor": 4.0, "original_max_positions": 10**6, "beta_fast": 1e5, "beta_slow": 1.0}
    first, last = (8 * np.log(1e6 / (2 * np.pi * turns)) / (2 * np.log(100)) for turns in (1e5, 1))
    assert 0 < first < 1 and last > 10
    divided = np.arange(4) / 7  # from 0 to 7
    expected = 100 ** (-np.arange(4) / 4) * (1 - divided + divided / 4)
    np.testing.assert_allclose(rope_frequencies(8, 100.0, scaling=scaling | {"truncate": True}), expected, rtol=1e-6)


@pytest.mark.parametrize("sections", [(24, 20, 20), (16, 24, 24), (2, 1, 1)], ids=str)
def test_the_pairs_of_each_axis_are_those_of_qwen(sections):
    """Qwen2-VL's `torch.split`; Qwen3-VL writes the pairs of rows and columns over those of the time."""
    bounds = np.cumsum((0, *sections))
    by_section, interleaved = np.empty(bounds[-1], int), np.zeros(bounds[-1], int)
    for axis in range(3):
        by_section[bounds[axis] : bounds[axis + 1]] = axis
        interleaved[axis : 3 * sections[axis] : 3] = axis
    assert section_axes(sections) == tuple(by_section)
    assert section_axes(sections, interleaved=True) == tuple(interleaved)
