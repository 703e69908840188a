"""Bad input: one clear line with what to do, exit code 2, no traceback."""

import pytest
import torch
from safetensors.torch import save_file

import bitplan
from bitplan.core.records import Plan
from bitplan.store.files import save

UNIFORM = ("--gain", "uniform", "--budget", "70%")


@pytest.fixture(autouse=True)
def files(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(graph, "graph.json")
    save(Plan.uniform(graph, 4), "plan.json")
    save(bitplan.estimate("uniform", None, graph), "gains.json")
    save(bitplan.price("bmac", graph), "bmac.json")
    text = (tmp_path / "graph.json").read_text()
    (tmp_path / "cut.json").write_text(text[:200])
    (tmp_path / "newer.json").write_text(text.replace('"format": 1', '"format": 9'))
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "binary.json").write_bytes(b"\x89PNG\r\n\xff")
    (tmp_path / "nan.csv").write_text("layer,gain\na,1\nb,nan\nc,1\n")
    (tmp_path / "inf.csv").write_text("layer,gain\na,1\nb,inf\nc,1\n")
    (tmp_path / "extra.csv").write_text("layer,gain\na,1\nb,1\nc,1\nbb,1\n")
    (tmp_path / "missing.csv").write_text("layer,gain\na,1\nb,1\n")
    (tmp_path / "negative.csv").write_text("layer,w2a2,w4a4\na,1,-2\nside,1,1\nb,1,1\nc,1,1\n")
    (tmp_path / "fraction.csv").write_text("layer,w2a2,w4a4\na,1,2.5\nside,1,1\nb,1,1\nc,1,1\n")
    (tmp_path / "cut.safetensors").write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "net.safetensors")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (tmp_path / "empty").mkdir()
    (tmp_path / "raises.py").write_text("raise RuntimeError('my own bug')\n")
    (tmp_path / "factories.py").write_text(
        "from torch import nn\n"
        "class Decides(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.one = nn.Linear(4, 4)\n"
        "    def forward(self, x): return self.one(x) if x.sum() < 100 else x\n"
        "def decides(): return Decides()\n"
        "def needs(width, depth, *, bias=True): ...\ndef fails(): return {}['weights']\ndef half(): raise OSError\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("plan", "graph.json", "--gain", "uniform", "--budget", "45%"),
            "the bmac is 50.0%. Raise the budget to at least",
        ),
        (("plan", "graph.json", "--gain", "uniform", "--budget", "lots"), "budget 'lots' cannot be read: write 70%"),
        (("plan", "graph.json", "--gain", "uniform", "--budget", "heat=70%"), "'heat', which was not priced"),
        (("plan", "resnet20", "--rules", "narrow=128", *UNIFORM), "18 by the rule on input features"),
        (("plan", "resnet20", "--rules", "narrow=128", *UNIFORM), "--rules narrow=0"),
        (("plan", "graph.json", "--gain", "nan.csv", "--budget", "70%"), "the gain of 'b' at w4a4 is nan"),
        (("plan", "graph.json", "--gain", "inf.csv", "--budget", "70%"), "the gain of 'b' at w4a4 is inf"),
        (("plan", "graph.json", "--gain", "extra.csv", "--budget", "70%"), "unknown layer in extra.csv: 'bb'"),
        (("plan", "graph.json", "--gain", "missing.csv", "--budget", "70%"), "no gain for layer 'c'"),
        (("plan", "graph.json", "--cost", "negative.csv", *UNIFORM), "is -2; a cost is a whole number ≥ 0"),
        (("plan", "graph.json", "--cost", "fraction.csv", *UNIFORM), "is 2.5; a cost is a whole number ≥ 0"),
        (("plan", "graph.json", "--gain", "unifrom", "--budget", "70%"), "did you mean uniform"),
        (("plan", "graph.json", "--cost", "bmacs", *UNIFORM), "did you mean bmac"),
        (("plan", "graph.json", "--selector", "exakt", *UNIFORM), "did you mean exact"),
        (("plan", "resnet5O", *UNIFORM), "resnet50"),
        (("plan", "timm/vit_tny_patch16_224", *UNIFORM), "did you mean timm/vit_tiny_patch16_224"),
        (("plan", "resnet50", "--gain", "eagl", "--budget", "70%"), "has random weights"),
        (("plan", "graph.json", "--bits", "w4a4,w2a2", *UNIFORM), "choices must ascend"),
        (("plan", "graph.json", "--bits", "4bit", *UNIFORM), "written like w4a4"),
        (("plan", "resnet50", "--rules", "fix=layr1.*=w8a8", *UNIFORM), "matches no layer"),
        (("plan", "resnet50", "--rules", "fix=layer1", *UNIFORM), "is not PATTERN=PRECISION"),
        (("plan", "graph.json", "--gain", "uniform:x", "--budget", "70%"), "is not KEY=VALUE"),
        (("plan", "graph.json", "--gain", "uniform:x=1", "--budget", "70%"), "unknown option of uniform 'x'"),
        (("steps", "trace", "resnet50", "--input", "1x4x224x224"), "in conv1 (Conv2d): "),
        (("steps", "trace", "resnet50", "--input", "1x3"), "in conv1 (Conv2d): "),
        (("steps", "trace", "resnet50", "--input", "large"), "cannot be read: write 1x3x224x224"),
        (("steps", "trace", "no_such_package:build"), "cannot import 'no_such_package'"),
        (("steps", "trace", "raises:build"), "cannot import 'raises' of raises:build: RuntimeError: my own bug"),
        (("steps", "trace", "users_model:bdy"), "unknown factory in users_model 'bdy'; did you mean body"),
        (("steps", "trace", "users_model:not_callable"), "unknown factory"),
        (("steps", "trace", "users_model:wrong"), "returned int, not a torch model"),
        (("steps", "trace", "users_model:body"), "gives no example input: add --input"),
        (
            ("steps", "trace", "factories:needs"),
            "factories:needs needs the arguments width, depth, and a factory is",
        ),
        (("steps", "trace", "factories:fails"), "factories:fails cannot be built, its code raised KeyError: 'weights'"),
        (("steps", "trace", "factories:half"), "cannot be built, its code raised OSError"),
        (("steps", "trace", "nowhere.json"), "cannot read nowhere.json: No such file"),
        (("plan", "nowhere/weights", "--budget", "70%"), "there is no file or folder nowhere/weights"),
        (("plan", "nowhere.ckpt", "--budget", "70%"), "there is no file or folder nowhere.ckpt"),
        (("plan", "resnet5O", "--budget", "70%"), "unknown model 'resnet5O'; did you mean"),
        (("plan", "graph.json", "--rules", "fix=nolayer=w8a8", *UNIFORM), "the pattern 'nolayer' matches no layer"),
        (("plan", "graph.json", "--rules", "free=nolayer", *UNIFORM), "the pattern 'nolayer' matches no layer"),
        (
            ("plan", "graph.json", "--rules", "first=w4a4", *UNIFORM),
            "--rules first would have no effect: graph.json was traced",
        ),
        (
            ("plan", "graph.json", "--rules", "narrow=0", *UNIFORM),
            "--rules narrow would have no effect: graph.json was traced",
        ),
        (
            ("show", "frontier", "graph.json", "--rules", "last=free", "--gain", "uniform"),
            "--rules last would have no effect",
        ),
        (
            ("quantize", "digits_resnet", "--plan", "plan.json", "--rules", "fix=a=w8a8", "-o", "q"),
            "--rules fix would have no effect",
        ),
        (("plan", "graph.json", "--input", "1x3", *UNIFORM), "--input would have no effect: graph.json is a record"),
        (
            ("plan", "net.safetensors", "--input", "values", "--budget", "70%"),
            "--input would have no effect: net.safetensors is",
        ),
        (("steps", "trace", "factories:decides", "--input", "1x4"), "trace it with data, --input values (in Python"),
        (("steps", "trace", "plan.json"), "this is a plan, where a graph is needed"),
        (("steps", "price", "bmac", "cut.json"), "cut.json: cut off"),
        (("steps", "price", "bmac", "newer.json"), "format 9 is newer than this bitplan reads (1): upgrade bitplan"),
        (("steps", "price", "bmac", "text.json"), "text.json: not JSON"),
        (("steps", "price", "bmac", "binary.json"), "not a text file"),
        (("steps", "price", "bmac", "."), ". holds neither model.safetensors"),
        (("steps", "price", "bmac", "graph.json", "-o", "graph.json/x.json"), "cannot write graph.json/x.json"),
        (("steps", "select", "graph.json", "gains.json", "--budget", "70%"), "no costs among the files"),
        (("steps", "select", "graph.json", "bmac.json", "--budget", "70%"), "exactly one gains file is needed, got 0"),
        (("plan", "nowhere.safetensors", "--budget", "70%"), "cannot read nowhere.safetensors"),
        (("plan", "cut.safetensors", "--budget", "70%"), "cut.safetensors"),
        (("plan", "model.gguf", "--budget", "70%"), "GGUF"),
        (("plan", "empty", "--budget", "70%"), "holds neither model.safetensors nor"),
        (
            ("steps", "trace", "users_model:body", "--input", "1x200", "--rules", "link=["),
            "--rules link=… is for checkpoints",
        ),
        (("list", "gain"), "did you mean gains"),
        (("show", "diff", "plan.json", "graph.json"), "this is a graph, where a plan is needed"),
    ],
)
def test_one_line_and_exit_code_two(run, own_model, words, said):
    code, out, err = run(*words)
    assert code == 2
    assert out == ""
    assert said in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_validate_goes_on_after_a_bad_file(run):
    code, out, err = run("show", "validate", "cut.json", "graph.json", "newer.json")
    assert code == 2
    assert out.startswith("graph.json: graph ")
    assert err.count("error: ") == 2


def test_a_model_that_decides_by_values_is_traced_with_some(run):
    code, out, err = run("steps", "trace", "factories:decides", "--input", "1x4,values", "--json")
    assert (code, err) == (0, "")
    assert '"name": "one"' in out
