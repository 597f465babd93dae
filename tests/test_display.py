import io
from pathlib import Path

from rich.console import Console

from gspo_jax.config import parse_config
from gspo_jax.display import open_display
from gspo_jax.evaluate import Evaluation
from gspo_jax.watcher import Step

CONFIG = parse_config(
    {
        "model": {"base": "m", "trainer_mode": "full"},
        "rollout": {"episodes_per_batch": 4},
        "training": {"iterations_per_epoch": 2, "group_size": 2, "learning_rate": 1e-3, "log_interval": 1},
        "serving": {"context_length": 1024},
    }
)[0]
METRICS: dict[str, float | None] = {"reward/mean": 0.25, "policy/ratio_mean": 1.0, "policy/clip_fraction": 0.5}


def shown(*, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, height=40)
    with open_display(console) as display:
        display.started(Path("runs/x"), CONFIG, 0)
        display.evaluated(0, Evaluation(0.125, 0.01, ()))
        for phase in ("rollout", "update"):
            display.phase(phase)
        display.stepped(Step(0, METRICS, (), None))
        display.event({"type": "rollout.void", "reason": "timeout", "message": "no reply"})
    return out.getvalue()


def test_a_terminal_gets_a_panel_with_the_numbers():
    text = shown(terminal=True)
    for part in ("step 1/2", "0.250", "1.00000", "0.50", "held-out", "0.125", "timeout"):
        assert part in text


def test_a_pipe_gets_one_plain_line_a_step():
    text = shown(terminal=False)
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    assert len(lines) == 1
    assert "reward 0.250" in lines[0]
    assert "held-out reward after 0 steps: 0.125" in text
