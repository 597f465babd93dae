"""docs/objectives.md and docs/models.md say what the code does: every variety, constant, key, architecture and rope type."""

import re
from pathlib import Path
from typing import get_args

from gspo_jax import corrections, sections
from gspo_jax.config_checks import ELSEWHERE
from gspo_jax.kl import FORMS
from gspo_jax.models import ARCHITECTURES
from gspo_jax.models.rotary import NEEDED
from gspo_jax.objective import VARIETIES
from gspo_jax.sections import keys

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "objectives.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()


def rows(title: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    part = TEXT.split(f"## {title}\n")[1].split("\n## ")[0]
    table = next(block for block in part.split("\n\n") if block.strip().startswith("| "))
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.strip().splitlines()[2:]]


def test_every_variety_with_its_denominator_constants_and_advantage():
    found = {cells[0].strip("` "): cells[2:] for cells in rows("Varieties")}
    assert found.keys() == VARIETIES.keys()
    for name, (denominator, constants, advantage) in found.items():
        variety = VARIETIES[name]
        assert denominator == f"`{variety.aggregation}`"
        assert advantage.strip("` ") == variety.advantage
        told = {k: float(v) for k, v in re.findall(r"`(\w+) = ([\d.]+)`", constants)}
        assert told == {k: v for k, v in variety.knobs.items() if isinstance(v, float)}, name
        assert ("`ratio_max` off" in constants) == ("ratio_max" in variety.knobs), name


def test_every_advantage_denominator_and_form_is_explained():
    assert {cells[0].strip("` ") for cells in rows("Advantages")} == set(get_args(sections.Advantages))
    assert {cells[0].strip("` ") for cells in rows("Denominators")} == {"row_mean", "row_sum", "token_mean", "budget_mean"}
    assert {cells[1].strip("` ") for cells in rows("KL to the reference") if cells[1]} == FORMS.keys()


def test_every_key_of_the_algorithm_is_mentioned():
    for name in keys():
        if name.startswith("algorithm.") and name not in ("algorithm.type", "algorithm.method"):
            assert name.rpartition(".")[2] in TEXT, name


def test_names_of_other_stacks_lead_to_keys_that_exist():
    for other, ours in ELSEWHERE.items():
        assert f"algorithm.{ours}" in keys(), other
        assert f"algorithm.{other}" not in keys(), other


def test_every_correction_is_mentioned():
    for function in (
        corrections.token_truncate,
        corrections.token_mask,
        corrections.sequence_truncate,
        corrections.sequence_mask,
    ):
        assert function.__name__ in TEXT


def test_models_are_those_of_the_registry():
    table = next(block for block in MODELS.split("\n\n") if block.startswith("| `model_type`"))
    told = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert told == ARCHITECTURES.keys()
    assert all(f"`{kind}`" in MODELS for kind in NEEDED)


def test_the_architecture_that_is_shown_is_the_one_that_runs():
    shown = re.findall(r"^```python\n(.*?)^```$", MODELS, re.DOTALL | re.MULTILINE)
    assert shown == [(ROOT / "gspo_jax" / "models" / "qwen2.py").read_text()]
