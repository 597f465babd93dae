"""Every architecture against reference logits: whole rows, packed rows, shared prompts, the trainer's log-probabilities."""

from pathlib import Path

import numpy as np
import pytest
from helpers_families import DATA, NAMES, SHARED, TOLERANCE, Family, load_family

from gspo_jax import score
from gspo_jax.models import ARCHITECTURES
from gspo_jax.policy import describe_policy


@pytest.fixture(scope="module", params=NAMES)
def family(request) -> Family:
    return load_family(request.param)


def test_every_architecture_has_a_checkpoint_with_reference_logits():
    found = {describe_policy(path, compute_dtype="float32", remat="none").architecture for path in DATA.iterdir()}
    assert {ARCHITECTURES[name] for name in found} == set(ARCHITECTURES.values())


def test_logits_of_whole_sequences(family: Family):
    np.testing.assert_allclose(family.logits[2:, :37], family.data["logits"], atol=TOLERANCE)


def test_logits_of_packed_sequences(family: Family):
    """All three in one row: segment ids keep them apart, positions start again."""
    np.testing.assert_allclose(family.logits[0].reshape(family.data["logits"].shape), family.data["logits"], atol=TOLERANCE)


def test_logits_of_completions_that_share_their_prompt(family: Family):
    if family.policy.config.recurrent:  # a state cannot branch, and says so
        prefixes = np.where(np.arange(5)[:, None] == 1, family.shared.prefix_ids, 0).astype(np.int32)
        found = family.logprobs(family.params, family.batch._replace(prefix_ids=prefixes))[0]
        assert np.isnan(np.asarray(found)[np.asarray(family.batch.loss_mask)]).all()
        return
    golden, row, length = family.data["logits"][0], family.logits[1], family.ids.shape[1]
    assert family.batch.segment_ids[1].max() > 1
    np.testing.assert_allclose(row[:length], golden, atol=TOLERANCE)
    np.testing.assert_allclose(row[length : 2 * length - SHARED], golden[SHARED:], atol=TOLERANCE)


def test_logprobs_of_packed_sequences(family: Family):
    """The trainer's own function; the first token of each sequence was not sampled and gets none."""
    found = np.asarray(family.logprobs(family.params, family.batch)[0])
    first = found[0].reshape(family.ids.shape)
    np.testing.assert_allclose(first[:, 1:], family.data["next_logprobs"], atol=TOLERANCE)
    assert not first[:, 0].any()
    np.testing.assert_allclose(found[2:, 1:37], family.data["next_logprobs"], atol=TOLERANCE)


def test_score_command_reproduces_the_logprobs(family: Family, tmp_path: Path):
    np.savez(tmp_path / "tokens.npz", input_ids=family.ids)
    argv = [str(family.folder), "--input", str(tmp_path / "tokens.npz"), "--output", str(tmp_path / "scores.npz")]
    assert score.main(argv) == 0
    found = np.load(tmp_path / "scores.npz")["next_logprobs"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, family.data["next_logprobs"], atol=TOLERANCE)
