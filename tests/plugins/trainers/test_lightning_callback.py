"""The callback of Lightning: it quantizes, calibrates, looks at the optimizers, and keeps the plan in checkpoints."""

import logging

import pytest
import tiny_bert as tiny
import torch
from loops import Module, lightning, lightnings_trainer

import bitplan
from bitplan.plugins.trainers.lightning import Quantization, restore_

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),  # which Lightning uses
    pytest.mark.filterwarnings("ignore:.*Found unsupported keys in the optimizer"),
]
PLAN = bitplan.plan_of(tiny.quantized())


def floating(kind=Module):
    return kind(tiny.network(dropout=0))


def fit(module, *callbacks, epochs=1, data=None, **options):
    trainer = lightnings_trainer(max_epochs=epochs, callbacks=list(callbacks), enable_checkpointing=False)
    trainer.fit(module, tiny.loader() if data is None else data, **options)
    return trainer


class Whole(Module):
    """A module that can be traced itself."""

    def forward(self, **inputs):
        return self.network(**inputs)


class Validated(Module):
    """Looked at before its first training step."""

    def validation_step(self, batch, index):
        self.log("validation", self.network(**batch).loss)


class Restoring(Module):
    """With the line by which `load_from_checkpoint` gives quantized modules."""

    def __init__(self):
        super().__init__(tiny.network(dropout=0))

    def on_load_checkpoint(self, checkpoint):
        restore_(self, checkpoint)


@pytest.mark.parametrize("part", ["network", ""])
def test_it_trains_what_quantize_and_calibrate_would_have_made(part, tmp_path):
    network = bitplan.quantize(tiny.network(dropout=0), PLAN)
    bitplan.calibrate_(network, list(tiny.loader())[:2])
    by_hand, by_callback = Module(network), floating(Whole)
    fit(by_hand)
    plan = PLAN
    if not part:  # the same layers, as the whole module calls them
        graph = bitplan.trace(by_callback, {"input_ids": tiny.inputs()["input_ids"]}, rules=bitplan.Rules(narrow=0))
        plan = bitplan.Plan.uniform(graph, "w4a4")
    bitplan.save(plan, tmp_path / "plan.json")
    fit(by_callback, Quantization(tmp_path / "plan.json", part=part, batches=2))
    assert by_callback.state_dict().keys() == by_hand.state_dict().keys()
    for name, value in by_hand.state_dict().items():
        assert torch.equal(by_callback.state_dict()[name], value), name


def test_it_calibrates_before_the_first_validation():
    data = {"train_dataloaders": tiny.loader(), "val_dataloaders": tiny.loader()}
    trainer = lightnings_trainer(
        max_epochs=1, callbacks=[Quantization(PLAN, part="network")], enable_checkpointing=False
    )
    trainer.fit(floating(Validated), **data)
    assert {"loss", "validation"} <= trainer.callback_metrics.keys(), "what it logs is logged again"


def test_calibration_leaves_random_numbers_alone():
    data = torch.utils.data.DataLoader(tiny.dataset(), batch_size=8, shuffle=True)
    seen = []
    for batches in (1, 4):

        class Watching(Module):
            def on_train_batch_start(self, batch, index):
                seen.append(batch["input_ids"])

        torch.manual_seed(7)
        fit(floating(Watching), Quantization(PLAN, part="network", batches=batches), data=data)
    half = len(seen) // 2
    assert all(map(torch.equal, seen[:half], seen[half:]))


def test_a_checkpoint_goes_on_where_it_was_and_comes_back_without_a_trainer(tmp_path):
    unbroken, broken, resumed = floating(), floating(), floating()
    callback = [Quantization(PLAN, part="network", per_channel=True) for _ in range(3)]
    fit(unbroken, callback[0], epochs=2)
    fit(broken, callback[1]).save_checkpoint(tmp_path / "half.ckpt")
    fit(resumed, callback[2], epochs=2, ckpt_path=tmp_path / "half.ckpt")
    for name, value in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    again = floating()
    restore_(again, tmp_path / "half.ckpt")
    loaded = Restoring.load_from_checkpoint(tmp_path / "half.ckpt")
    for one in (again, loaded):
        assert bitplan.plan_of(one) == PLAN
        assert torch.equal(tiny.logits(one.network), tiny.logits(broken.network))
    fit(again, Quantization(PLAN, part="network"))  # quantized by that plan already: it goes on training
    assert not torch.equal(tiny.logits(again.network), tiny.logits(broken.network))


def test_a_quantized_module_is_tested_from_its_checkpoint(tmp_path):
    class Tested(Module):
        def test_step(self, batch, index):
            self.log("test", self.network(**batch).loss)

    module = floating(Tested)
    trainer = fit(module, Quantization(PLAN, part="network"))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    expected = trainer.test(module, tiny.loader(), verbose=False)
    other = lightnings_trainer(callbacks=[Quantization(PLAN, part="network")])
    assert other.test(floating(Tested), tiny.loader(), ckpt_path=tmp_path / "last.ckpt", verbose=False) == expected


class Manual(Module):
    def __init__(self, network):
        super().__init__(network)
        self.automatic_optimization = False


class Forgetting(Module):
    """It made its optimizer before there were steps."""

    def __init__(self, network):
        super().__init__(network)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self):
        return self.optimizer


def forward_alone(module, batch):
    return module.network(input_ids=batch["input_ids"])


WRONG = {
    "part": (Module, {"part": "net"}, {}, "Module has no part 'net': its parts are network"),
    "plan": (Module, {"part": ""}, {}, "unknown layer 'bert.embeddings.word_embeddings'; did you mean network.bert"),
    "manual": (Manual, {}, {}, "optimizes by itself, so calibration cannot run it: give .*forward="),
    "optimizer": (Forgetting, {"forward": forward_alone}, {}, "no optimizer has .* learned steps: .*parameter_groups"),
    "loaders": (Module, {}, {"data": [tiny.loader(), tiny.loader()]}, "there are several or none: give .*batches="),
}


@pytest.mark.parametrize(("kind", "options", "fitting", "said"), WRONG.values(), ids=WRONG)
def test_what_it_cannot_do_is_one_line(kind, options, fitting, said):
    with pytest.raises(bitplan.InputError, match=said) as caught:
        fit(floating(kind), Quantization(PLAN, **{"part": "network"} | options), **fitting)
    assert "\n" not in str(caught.value)


def test_it_is_refused_in_one_line_where_it_cannot_be_made():
    for arguments, options, said in [
        ((3,), {}, "a Plan or the path of one, not a int"),
        (("nowhere.json",), {}, "cannot read nowhere.json"),
        ((PLAN,), {"batches": 0}, "at least one batch, not from 0"),
        ((PLAN,), {"per_chanel": True}, "did you mean per_channel"),
    ]:
        with pytest.raises(bitplan.InputError, match=said):
            Quantization(*arguments, **options)


def test_checkpoints_of_others_are_refused_in_one_line(tmp_path):
    plain = floating()
    fit(plain).save_checkpoint(tmp_path / "float.ckpt")
    with pytest.raises(bitplan.InputError, match="holds a float network: load it into the module first"):
        fit(floating(), Quantization(PLAN, part="network"), epochs=2, ckpt_path=tmp_path / "float.ckpt")
    with pytest.raises(bitplan.InputError, match="float.ckpt has no plan: it was not saved in a training with"):
        restore_(floating(), tmp_path / "float.ckpt")
    fit(floating(), Quantization(PLAN, part="network")).save_checkpoint(tmp_path / "w4a4.ckpt")
    higher = {name: bitplan.Precision.parse("w8a8") for name in PLAN.precisions}
    other = PLAN.model_copy(update={"precisions": higher})
    with pytest.raises(bitplan.InputError, match="has 4 bits in this state dict and 8 in the model: quantize"):
        fit(floating(), Quantization(other, part="network"), epochs=2, ckpt_path=tmp_path / "w4a4.ckpt")
    with pytest.raises(bitplan.InputError, match="quantized already, by another plan"):
        fit(Module(bitplan.quantize(tiny.network(), other)), Quantization(PLAN, part="network"))
    with pytest.raises(bitplan.InputError, match="w4a4.ckpt: .* has no part 'network'"):
        restore_(lightning.LightningModule(), tmp_path / "w4a4.ckpt")


def test_steps_that_decay_are_told(caplog):
    class Decaying(Module):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)

    with caplog.at_level(logging.WARNING, "bitplan"):
        fit(floating(Decaying), Quantization(PLAN, part="network"))
    assert "learned steps decay: return torch.optim.AdamW(bitplan.parameter_groups" in caplog.text
