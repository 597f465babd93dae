"""plots/reward.png and plots/health.png, drawn from metrics.jsonl and events.jsonl alone."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gspo_jax.runlog import read_lines

HEALTH = {
    "sequence ratio": ("policy/ratio_mean", "policy/ratio_max"),
    "clip fraction": ("policy/clip_fraction", "policy/clip_fraction_2", "policy/clip_fraction_4"),
    "sampler-trainer mismatch (nats)": ("mismatch/mean", "mismatch/p99", "mismatch/max"),
    "entropy (nats)": ("policy/entropy",),
    "gradient norm": ("optimizer/grad_norm",),
    "fractions": ("group/flat_fraction", "rollout/truncated_fraction", "rollout/void_fraction"),
    "completion tokens": ("rollout/completion_tokens_mean",),
    "seconds a step": ("time/rollout", "time/update", "time/sync"),
}


def write_plots(run_dir: Path) -> None:
    """Both pictures of the run so far; nothing for a run without a step."""
    metrics = list(read_lines(run_dir / "metrics.jsonl"))
    if not metrics:
        return
    (run_dir / "plots").mkdir(exist_ok=True)
    figure, (axes,) = _figure(1, 1, (7.0, 4.0))
    _line(axes, metrics, "reward/mean", "training")
    scores = {e["step"]: e for e in read_lines(run_dir / "events.jsonl") if e["type"] == "evaluation"}
    if scores:
        steps = sorted(scores)
        means, errors = ([scores[s][key] for s in steps] for key in ("reward_mean", "reward_sem"))
        axes.errorbar([s - 0.5 for s in steps], means, errors, marker="o", capsize=3, label="held-out (± standard error)")
    axes.set(xlabel="step", ylabel="mean reward", title=run_dir.name)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(run_dir / "plots" / "reward.png", dpi=120)
    figure, places = _figure(4, 2, (11.0, 12.0))
    for axes, (title, names) in zip(places, HEALTH.items(), strict=True):
        for name in names:
            _line(axes, metrics, name, name.partition("/")[2])
        axes.set(title=title, xlabel="step")
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(run_dir / "plots" / "health.png", dpi=100)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _line(axes: Axes, metrics: list[dict[str, Any]], name: str, label: str) -> None:
    points = [(m["step"], m[name]) for m in metrics if m.get(name) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), marker=".", label=label)
