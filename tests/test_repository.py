"""The repository itself: configs, the README's folder picture, file sizes, and imports that do nothing."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_jax.config import load_config

ROOT = Path(__file__).parent.parent
PACKAGES = ("gspo_jax", "serving_bridge", "rollout")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
MOST_LINES = 300
IN_VLLM = "serving_bridge/plugin/gspo_vllm/engines.py"
"""Imports torch and vLLM: it runs in vLLM's environment."""
LONG = {"gspo_jax/sections.py"}
"""Declarations only: a line per config key."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def committed() -> list[Path]:
    """Every text file that belongs to the repository."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).is_file() and path.suffix != ".png"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_loads_and_says_what_it_is(path):
    _, notes = load_config(path)
    assert notes == []
    assert re.match(r"# \w.{20,}", path.read_text()), "a config starts with a comment that says what it is for"


def test_folder_picture_is_the_folders():
    """Every file and folder of the packages is in the README's picture, and nothing else is."""
    text = (ROOT / "README.md").read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    picture = next(block for block in fenced if block.startswith("gspo_jax/"))
    shown: set[str] = set()
    package = ""
    for line in picture.splitlines():
        first, *rest = line.split()
        if not line.startswith(" "):
            package = first
            assert (ROOT / package).is_dir(), line
        if line.startswith(" ") or package not in {f"{name}/" for name in PACKAGES}:
            folder = package + (first if first.endswith("/") and line.startswith(" ") else "")
            names = [first, *(word.strip(",:;") for word in rest)]
            shown |= {folder.rstrip("/") + "/" + n for n in names if n.endswith((".py", ".toml", ".md", ".ipynb"))}
    real = {name_of(path) for path in SOURCES if path.name != "__init__.py"}
    real |= {name_of(path) for pattern in ("configs/*.toml", "docs/*.md", "notebooks/*.ipynb") for path in ROOT.glob(pattern)}
    assert shown == real


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_module_is_small_and_says_what_it_is(path):
    text = path.read_text()
    if name_of(path) not in LONG:
        assert len(text.splitlines()) <= MOST_LINES
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "a module starts with a docstring"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_all_names_what_exists(path):
    """`__all__`, where there is one, lists names of the module, each once."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            listed = ast.literal_eval(node.value)
            assert len(set(listed)) == len(listed)
            bound = {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
            bound |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
            bound |= {a.asname or a.name for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            bound |= {n.name for n in tree.body if isinstance(n, kinds)}
            assert set(listed) <= bound


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_errors_are_not_swallowed(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"line {node.lineno}: bare except"


PROBE = """
import importlib, json, os, sys, threading
before = dict(os.environ)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
report = {
    "threads": [t.name for t in threading.enumerate() if t is not threading.main_thread()],
    "environment": sorted(k for k in {*os.environ, *before} if os.environ.get(k) != before.get(k)),
    "jax": "jax" in sys.modules,
    "torch": "torch" in sys.modules,
    "files": sorted(os.listdir(".")),
}
if report["jax"]:
    from jax._src import xla_bridge
    report["backends"] = sorted(xla_bridge._backends)
print(json.dumps(report))
"""


def imported(modules: list[str], where: Path) -> dict:
    """What a fresh interpreter looks like after importing `modules`; libraries may keep caches in its home."""
    home = where.parent / f"{where.name}-home"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(modules)],
        cwd=where, capture_output=True, text=True, timeout=200, check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": f"{ROOT}:{where}", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_importing_everything_does_nothing(tmp_path):
    """No JAX backend, thread, file or output, and only libraries touch the environment."""
    report = imported([module_of(path) for path in SOURCES if name_of(path) != IN_VLLM], tmp_path)
    assert report["backends"] == []
    assert report["threads"] == []
    assert not report["torch"]
    assert report["files"] == []
    assert [key for key in report["environment"] if not key.startswith(("TF_", "GRPC_", "KMP_", "TPU_"))] == []


def test_the_probe_sees_a_backend(tmp_path):
    """The check above can fail: a module that computes at import is noticed."""
    (tmp_path / "eager.py").write_text("import jax.numpy as jnp\n\nONE = jnp.ones(1)\n")
    report = imported(["eager"], tmp_path)
    assert report["backends"] == ["cpu"]
    assert "eager.py" in report["files"]


def test_rollout_never_imports_jax(tmp_path):
    modules = [module_of(path) for path in SOURCES if name_of(path).startswith("rollout/")]
    assert not imported(modules, tmp_path)["jax"]


def test_no_addresses_of_package_indexes():
    """Builds work with any index: no file pins one."""
    found = []
    for path in committed():
        text = path.read_text(encoding="utf-8", errors="ignore")
        for pattern in (
            r"--(extra-)?index-url",
            r"find-links",
            r"https?://[^\s\"')]*/simple\b",
            r"pypi\.org",
            r"https?://10\.",
        ):
            if path != Path(__file__) and re.search(pattern, text):
                found.append(f"{name_of(path)}: {pattern}")
    assert found == []


def test_no_machine_is_mentioned():
    """No absolute path of a developer's machine is in any file."""
    pattern = re.compile(r"(?<![\w.])/(work|home/\w+|root|Users/\w+)/\w")
    found = [name_of(p) for p in committed() if p != Path(__file__) and pattern.search(p.read_text("utf-8", "ignore"))]
    assert found == []


def test_license_and_changelog():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "The gspo-jax authors" in text
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
