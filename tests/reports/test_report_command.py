"`bitplan report` and `bitplan plan -o` from the command line."

import json
import re
import sys

import pytest
import torch
from safetensors.torch import save_file

from bitplan.cli import main


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Run the command line in an empty folder; gives exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def words(*given):
        monkeypatch.setattr(sys, "argv", ["bitplan", *map(str, given)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return words


def test_report_writes_the_page_and_the_figures(call, run, tmp_path):
    code, out, err = call("report", run.path, "-o", "page.html", "--figures", "figures", "--budget", "70%")
    assert (code, out) == (0, "")
    assert "wrote page.html" in err
    assert "no oracle figure: no method regression of this study has scores" in err
    assert (tmp_path / "figures" / "frontier.pdf").is_file()
    assert '"budget":"70%"' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "."], "say what to make: -o report.html"),
        (["report", ".", "-o", "page.html"], "not the folder of a run"),
        (["report", "nowhere", "--figures", "x"], "not the folder of a run"),
    ],
)
def test_report_refuses_in_one_line(call, words, said):
    code, _, err = call(*words)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_scan_of_a_checkpoint_makes_a_page(call, tmp_path):
    torch.manual_seed(0)
    save_file({f"layers.{i}.weight": torch.randn(160, 160) for i in range(5)}, tmp_path / "net.safetensors")
    words = ["plan", "net.safetensors", "--budget", "70%", "-o", "page.html", "--json"]
    code, out, err = call(*words)
    assert code == 0, err
    page = (tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["answer"]["command"] == "bitplan " + " ".join(words)
    assert data["scores"] is None
    shown = {layer[0] for group in data["network"]["groups"] for layer in group["layers"]}
    assert shown == set(json.loads(out)["precisions"])
