"""Every recorded loss, advantage, KL and correction weight of twelve other projects, recomputed with ours.

The cases and their producers' versions are in data/golden_losses.json.xz. Where a producer is wrong (its case ends in _BUG, or
NaN stands in its padding) the published formula is expected, which the case holds as `paper_reference`.
"""

import json
import lzma
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from golden_adapter import _differentiate, _Inputs, run_case

from gspo_jax.losses import gspo

CASES = {
    c["name"]: c for c in json.loads(lzma.decompress((Path(__file__).parent / "data" / "golden_losses.json.xz").read_bytes()))
}
TOLERANCE = {"verl": 3e-9, "openrlhf": 3e-9, "nemo-rl": 3e-9, "areal": 3e-9, "google-tunix": 5e-6, "easydel": 5e-6}
"""Relative to the larger of 1 and the largest value: 1e-8 is added to their token counts, or they compute in float32."""
OUTPUTS = ("loss", "grad_logps", "advantages", "advantages_per_token", "weights", "mask", "kl", "importance_sampling_ratio")
NOT_THE_PAPER = [
    name
    for name in CASES
    if name.startswith(("areal_gspo", "trl_gspo_seq_bnpo", "trl_gspo_seq_d", "trl029_gspo_token_d"))
    or name in ("tunix_gspo_token_pretoken_clip_bias", "verl_gspo_extreme_ratio", "verl_gspo_ignored_clip_ratio")
]
"""Cases whose producer computes another sequence objective than eq. 5, by design or oversight; we reproduce both."""


def numbers(value) -> np.ndarray:
    return np.vectorize(float, otypes=[float])(np.array(value))


def assert_close(found, expected, tolerance: float) -> None:
    found, expected = numbers(found), numbers(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max(initial=0)))


@pytest.mark.parametrize("name", CASES)
def test_recorded_case(name: str):
    case = CASES[name]
    tolerance = TOLERANCE.get(case["producer"]["package"], 1e-12)
    if case["dtype"] == "float32" or name.startswith("slime_kl"):
        tolerance = 5e-6
    tolerance = {"verl_adv_grpo_singleton": 5e-8, "verl_gspo_extreme_ratio": 1e-8}.get(name, tolerance)
    wrong = name.endswith("_BUG") or name == "trl_nan_in_padding"
    expected = case["paper_reference"] if wrong else case["outputs"]
    found = run_case({key: case[key] for key in ("producer", "settings", "inputs")})
    compared = [key for key in OUTPUTS if key in expected]
    assert compared
    for key in compared:
        assert_close(found[key], expected[key], tolerance)


@pytest.mark.parametrize("name", NOT_THE_PAPER)
def test_the_papers_objective_where_the_producer_has_another(name: str):
    """`gspo` with the case's clip range is eq. 5 and 7, and visibly not what was recorded."""
    case = CASES[name]
    x, s = _Inputs(case), case["settings"]
    low = next(s[k] for k in ("eps_clip", "epsilon", "clip_ratio_low", "clip_ratio") if k in s)
    high = next(s[k] for k in ("eps_clip_higher", "epsilon_high", "clip_ratio_high", "clip_ratio") if k in s)
    high = 4e-4 if name == "verl_gspo_ignored_clip_ratio" else high
    rows = x.filled if case["producer"]["package"] in ("google-tunix", "verl") else None
    with jax.enable_x64(True):
        found = _differentiate(x, x.batch(rows=rows), partial(gspo, eps_low=low, eps_high=high, max_log_ratio=float("inf")))
    for key in ("loss", "grad_logps"):
        assert_close(found[key], case["paper_reference"][key], 1e-12)
    assert np.abs(numbers(case["outputs"]["grad_logps"]) - numbers(case["paper_reference"]["grad_logps"])).max() > 1e-4


def test_every_producer_and_case_is_there():
    packages = {case["producer"]["package"] for case in CASES.values()}
    assert (len(CASES), len(packages), len(NOT_THE_PAPER)) == (162, 12, 12)
