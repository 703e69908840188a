"""The folder that one is in may be anybody's: the real command runs nothing that lies there, and nor do its workers."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitplan.core.private_cache import UnsafeFolder, check_private

COMMAND = """
import sys
from bitplan.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""  # as pip writes it
PLAN = ["plan", "model.safetensors", "--budget", "70%", "--rules", "narrow=0"]
OPTIONAL = {
    "cupy",
    "dotenv",
    "flash_attn",
    "librosa",
    "pandas",
    "sitecustomize",
    "tensorflow",
    "triton",
    "usercustomize",
}
GROUPS = ("bitplan.gains", "bitplan.models", "numba_extensions", "pydantic", "torch.backends", "torch_dynamo_backends")
STUDY = """
name = "gift"
task = "digits"
model = "digits_resnet"
choices = ["w2a2", "w4a4"]
budgets = ["70%"]
seeds = [0]
[rules]
narrow = 0
[recipe]
steps = 1
[start]
[start.float_recipe]
steps = 1
[start.recipe]
steps = 1
[[methods]]
name = "eagl"
"""


class Payload:
    """A pickle that leaves a mark."""

    def __init__(self, code):
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)


def leave(marks, name):
    return f"open({str(marks / name)!r}, 'w').close()\n"


def environment(home, **variables):
    """That of a user with a home of her own, where no cache is filled."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    return kept | {"HOME": str(home), "OMP_NUM_THREADS": "1"} | variables


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder of compiled loops: those of EAGL and of the quantizer."""
    folder = tmp_path_factory.mktemp("filled")
    folder.chmod(0o700)
    save_file({f"layers.{i}.weight": torch.randn(32, 32) for i in range(4)}, folder.parent / "model.safetensors")
    load = "from bitplan.cli import main; import bitplan.quant.numba_loops, bitplan.quant.numba_loops; main()"
    where = environment(folder, NUMBA_CACHE_DIR=str(folder))
    subprocess.run([sys.executable, "-P", "-c", load, *PLAN], cwd=folder.parent, env=where, check=True)
    assert len(list(folder.rglob("*.nbc"))) > 5
    return folder


def copy_cache(filled, folder, damage):
    """Copy compiled loops, with something done to the bytes of each file."""
    shutil.copytree(filled, folder)
    for path in folder.rglob("*.nb?"):
        path.write_bytes(damage(path.read_bytes()))


@pytest.fixture
def command(tmp_path):
    """The command as it is installed, in a folder of its own."""
    script = tmp_path / "bin" / "bitplan"
    script.parent.mkdir()
    script.write_text(COMMAND)
    return [sys.executable, str(script)]


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    save_file({f"layers.{i}.weight": torch.randn(32, 32) for i in range(4)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def strange(tmp_path, home, filled):
    """A folder with a model, a study, and all that somebody could put beside them; what ran is in its `marks`."""
    folder, marks = tmp_path / "strange", tmp_path / "strange" / "marks"
    marks.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes((home / "model.safetensors").read_bytes())
    (folder / "study.toml").write_text(STUDY)
    for name in {*packages_distributions(), *OPTIONAL, "payload"} - {"bitplan"}:
        (folder / f"{name}.py").write_text(leave(marks, f"module {name}") + "def run(*_): pass\n")
    for kind, file in (("dist-info", "METADATA"), ("egg-info", "PKG-INFO")):
        about = folder / f"payload-1.0.{kind}"
        about.mkdir()
        (about / file).write_text("Metadata-Version: 2.1\nName: payload\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text("\n".join(f"[{group}]\ninit = payload:run" for group in GROUPS))
    copy_cache(filled, folder / "cache", lambda _: pickle.dumps(Payload(leave(marks, "numba's cache"))))
    (folder / ".numba_config.yaml").write_text("cache_dir: cache\n")
    return folder


def shadow_the_standard_library(folder):
    for name in sys.stdlib_module_names:
        (folder / f"{name}.py").write_text(leave(folder / "marks", f"module {name}"))


def marks_after(command, folder, **variables):
    done = subprocess.run(
        command, cwd=folder, env=environment(folder.parent / "home", **variables), capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    return sorted(path.name for path in (folder / "marks").iterdir())


def test_the_command_runs_nothing_of_it(strange, command):
    shadow_the_standard_library(strange)
    assert marks_after([*command, *PLAN], strange) == []


def test_nor_do_its_workers(strange, command):
    shadow_the_standard_library(strange)
    assert marks_after([*command, "sweep", "study.toml", "--workers", "1"], strange) == []


def test_as_a_module_neither_but_for_what_python_itself_imports_before(strange, command):
    assert marks_after([sys.executable, "-m", "bitplan", *PLAN], strange) == []


def test_a_payload_that_is_run_would_be_seen(strange, command):
    """The poisoned cache is one that the loops find, if the user herself names it."""
    marks = marks_after([*command, *PLAN], strange, NUMBA_CACHE_DIR=str(strange / "cache"))
    assert marks == ["numba's cache"]


@pytest.mark.parametrize("text", ["- a list\n", "disable_jit: 1\ncache_locator_classes: payload.Locator\n"])
def test_settings_of_numba_in_it_change_nothing(strange, filled, text):
    (strange / ".numba_config.yaml").write_text(text)
    code = "import bitplan.quant.numba_loops, bitplan.gains.histogram, numba.core.config as c; c.reload_config()"
    code += "; print(c.DISABLE_JIT, c.CACHE_LOCATOR_CLASSES)"
    command = [sys.executable, "-P", "-W", "error", "-c", code]
    where = environment(strange.parent / "home", NUMBA_CACHE_DIR=str(filled))
    done = subprocess.run(command, cwd=strange, env=where, capture_output=True, text=True)
    assert done.stdout.split() == ["0"], done.stderr


@pytest.fixture
def plan(home, command):
    """A function that gives the plan that the command prints, and its warnings of loops."""

    def call(**variables):
        where = environment(home, **variables)
        done = subprocess.run([*command, *PLAN], cwd=home, env=where, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout, [line for line in done.stderr.splitlines() if "loops" in line]

    return call


def test_loops_are_kept_in_the_users_cache_and_only_she_can_write_there(home, plan):
    before = plan()
    folder = home / ".cache" / "bitplan" / "numba"
    assert folder.stat().st_mode & 0o777 == 0o700
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb?")}
    assert len(kept) >= 4
    assert plan() == before
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb?")} == kept


def test_damaged_loops_are_compiled_anew_and_it_is_said(plan, filled, tmp_path):
    before, _ = plan()
    copy_cache(filled, tmp_path / "cache", lambda content: content[:-100])
    after, warnings = plan(NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert after == before
    assert len(warnings) == 1
    assert f"{tmp_path / 'cache'} is damaged or full" in warnings[0]


def test_where_nothing_can_be_written_loops_are_compiled_without_a_word(plan):
    before = plan()
    assert plan(XDG_CACHE_HOME=os.devnull) == before


@pytest.fixture
def public(filled):
    """A folder that others can look into; that of the tests is closed to them, and so is all below it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_cache_that_others_can_fill_is_not_read(strange, plan, public):
    (strange / "cache").rename(public / "cache")
    (public / "cache").chmod(0o777)
    _, warnings = plan(NUMBA_CACHE_DIR=str(public / "cache"))
    assert len(warnings) == 1
    assert f"other users can write to {public / 'cache'}" in warnings[0]
    assert list((strange / "marks").iterdir()) == []


def test_nor_one_below_the_current_folder(strange, command):
    assert marks_after([*command, *PLAN], strange, NUMBA_CACHE_DIR="cache") == []
    assert marks_after([*command, *PLAN], strange, XDG_CACHE_HOME=".") == []


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o757, 0o1777])
def test_every_folder_above_counts(public, mode):
    """Who can write to a folder can exchange what is in it, unless it is sticky, as /tmp is."""
    (public / "above" / "cache").mkdir(parents=True)
    check_private(public / "above" / "cache")
    (public / "above").chmod(mode)
    if mode in (0o755, 0o1777):
        check_private(public / "above" / "cache")
    else:
        with pytest.raises(UnsafeFolder, match=f"other users can write to {public / 'above'}: chmod go-w"):
            check_private(public / "above" / "cache")
    if mode == 0o1777:
        with pytest.raises(UnsafeFolder, match="other users can write to"):
            check_private(public / "above")
    public.chmod(0o700)
    check_private(public / "above" / "cache")


def test_a_folder_of_somebody_else_is_not_ours(public, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: public.stat().st_uid + 1)
    if public.stat().st_uid == 0:  # root may do anything anyway
        check_private(public)
    else:
        with pytest.raises(UnsafeFolder, match=f"{public} belongs to another user"):
            check_private(public)
