"""Networks with recurrent parts: trained at few bits, and the same in a plan, a network and a file."""

import torch
import torch.nn.functional as F
from torch import nn

import bitplan
from bitplan.exporters.packed import Packed
from bitplan.quant.convert import quantizers_of

STEPS = 8


def pairs(count, seed):
    """Numbers (count, T, 2), two of them marked; whether these two add up to more than nothing."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.rand(count, STEPS, generator=random) * 2 - 1
    marked = torch.rand(count, STEPS, generator=random).argsort(1)[:, :2]
    marks = torch.zeros(count, STEPS).scatter_(1, marked, 1.0)
    return torch.stack((numbers, marks), -1), ((numbers * marks).sum(1) > 0).long()


class Adder(nn.Module):
    """Reads the numbers one by one: what it answers it must have kept in its state."""

    def __init__(self):
        super().__init__()
        self.stem, self.rnn, self.head = nn.Linear(2, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 2)

    def forward(self, x):
        return self.head(self.rnn(self.stem(x))[0][:, -1])


def train_(model, groups, steps=300):
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    x, answers = pairs(4000, seed=1)
    random = torch.Generator().manual_seed(2)
    model.train()
    for _ in range(steps):
        rows = torch.randint(0, len(x), (64,), generator=random)
        loss = F.cross_entropy(model(x[rows]), answers[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def share_right(model):
    x, answers = pairs(4000, seed=3)
    return (model.eval()(x).argmax(1) == answers).float().mean().item()


def test_at_four_bits_an_lstm_learns_to_add_as_the_float_network_does():
    torch.manual_seed(0)
    network = Adder()
    train_(network, bitplan.parameter_groups(network, lr=0.02))
    x, _ = pairs(256, seed=4)
    graph = bitplan.trace(network, x, rules=bitplan.Rules(narrow=0))
    model = bitplan.quantize(network, bitplan.Plan.uniform(graph, "w4a4"))
    assert {name: str(precision) for name, precision in bitplan.plan_of(model).precisions.items()} == {
        "stem": "w8a8", "rnn.weight_ih_l0": "w4a4", "rnn.weight_hh_l0": "w4a4", "head": "w8a8",
    }  # fmt: skip
    bitplan.calibrate_(model, [x])
    float_score, calibrated = share_right(network), share_right(model)
    train_(model, bitplan.parameter_groups(model, lr=0.01))
    tuned = share_right(model)
    assert float_score > 0.97
    assert calibrated < float_score - 0.02, "the task tells four bits from float"
    assert tuned >= float_score - 0.02


class Mixed(nn.Module):
    """(B, 6, T) → (B, 4): every kind of part, in the order of the state dict; T = 3 leaves one step of time."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(6, 9, 3)
        self.lstm = nn.LSTM(9, 8, 2, batch_first=True, bidirectional=True)
        self.cell = nn.LSTMCell(16, 10)
        self.gru = nn.GRU(10, 7, batch_first=True)
        self.small = nn.GRUCell(7, 5)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        x = self.lstm(self.conv(x).transpose(1, 2))[0]
        state, hidden = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            hidden.append(state[0])
        last = None
        for step in self.gru(torch.stack(hidden, 1))[0].unbind(1):
            last = self.small(step, last)
        return self.head(last)


def shown(graph):
    """All of a graph but its name and the words for where a link comes from."""
    return graph.layers, [link.layers for link in graph.links]


RULES = bitplan.Rules(narrow=0)


def test_a_file_and_the_module_give_one_graph_and_plan_network_and_packed_file_agree(tmp_path):
    torch.manual_seed(0)
    network = Mixed()
    torch.save(network.state_dict(), tmp_path / "mixed.pth")
    from_file = bitplan.trace(tmp_path / "mixed.pth", rules=RULES)
    assert shown(from_file) == shown(bitplan.trace(network, torch.empty(1, 6, 3), rules=RULES, name="mixed"))
    assert len(from_file.layers) == 2 + 2 * 2 * 2 + 3 * 2
    gains = bitplan.estimate("eagl", tmp_path / "mixed.pth", from_file)
    plan = bitplan.select(from_file, gains, bitplan.price("memory", from_file), budget="75%")
    assert {str(plan.precisions[name]) for name in plan.precisions if "weight_" in name} == {"w2a2", "w4a4"}

    x = torch.randn(5, 6, 9)
    model = bitplan.quantize(network, plan)
    bitplan.calibrate_(model, [x])
    for layer, (weight, inputs) in quantizers_of(model).items():
        assert (weight.bits, *(each.bits for each in inputs)) == (
            plan.precisions[layer].weight_bits,
            plan.precisions[layer].act_bits,
        )
    packed = bitplan.export(model, tmp_path / "mixed.safetensors", "packed")
    held, codes = Packed().read(packed), bitplan.integer_weights(model)
    assert held.precisions == plan.precisions == bitplan.plan_of(model).precisions
    assert held.codes.keys() == codes.keys() == plan.precisions.keys()
    assert all(torch.equal(held.codes[layer], codes[layer]) for layer in codes)
    assert torch.equal(bitplan.load_packed(packed, Mixed()).eval()(x), model.eval()(x))


def test_every_planned_layer_computes_with_its_codes():
    torch.manual_seed(0)
    x = torch.randn(5, 6, 9)
    network = Mixed()
    for parameter in network.parameters():
        nn.init.normal_(parameter)  # so that answers differ, in spite of four bits
    graph = bitplan.trace(network, x, rules=RULES)
    model = bitplan.quantize(network, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(model, [x])
    expected = model.eval()(x)
    for layer, (weight, (inputs,)) in quantizers_of(model).items():
        for quantizer in (weight, inputs):
            quantizer.step.data.mul_(1.5)
            assert not torch.equal(model(x), expected), layer
            quantizer.step.data.div_(1.5)
