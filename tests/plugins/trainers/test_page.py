"""docs/trainers.md as it stands: its blocks are run one after the other."""

import re
from pathlib import Path

import pytest
import tiny_bert as tiny
import torch
from loops import lightning
from transformers.utils import logging

import bitplan

PAGE = Path(__file__).parents[3] / "docs" / "trainers.md"


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # which Lightning uses
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_every_block_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logging.disable_progress_bar()
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    tiny.network().save_pretrained("float")
    batch = {"input_ids": tiny.inputs()["input_ids"]}
    names = {"model": tiny.network(), "batch": batch, "dataset": tiny.dataset(), "folder": "float"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    same = [("again", "network"), ("restored", "module")]
    for one, other in same:
        first, second = (getattr(names[name], "network", names[name]) for name in (one, other))
        assert torch.equal(tiny.logits(first), tiny.logits(second)), one
    assert names["lightning"] is lightning
    loaded = names["Module"].load_from_checkpoint("module.ckpt", network=tiny.network())
    assert torch.equal(tiny.logits(loaded.network), tiny.logits(names["module"].network))
    carried = type(names["model"]).from_pretrained("carried")
    assert bitplan.plan_of(carried) == bitplan.plan_of(names["quantized"])
    assert {"run", "saved", "state", "trained"} <= {item.name for item in tmp_path.iterdir()}
