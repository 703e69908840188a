"""docs/trainers.md as it stands: its blocks are run one after the other."""

import re
from pathlib import Path

import pytest
import tiny_bert as tiny
import torch
from loops import lightning
from transformers.utils import logging

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # which Lightning uses
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_every_block_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logging.disable_progress_bar()
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names = {"model": tiny.network(), "batch": {"input_ids": tiny.inputs()["input_ids"]}, "dataset": tiny.dataset()}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
        if "again" in names:
            assert torch.equal(tiny.logits(names.pop("again")), tiny.logits(names["quantized"]))
    assert names["lightning"] is lightning
    assert {"run", "saved", "state", "weights", "module.ckpt"} <= {item.name for item in tmp_path.iterdir()}
