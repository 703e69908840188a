"""Small networks with everything an exporter meets, quantized and calibrated on random data."""

import torch
from torch import nn

import bitplan
from bitplan.adapters.torchvision import torchvision
from bitplan.adapters.transformers import bert_for_question_answering
from bitplan.core.precision import Precision
from bitplan.models.bert import example as bert_example
from bitplan.models.pspnet import PSPNet
from bitplan.models.zoo import load_model

RULES = bitplan.Rules(narrow=0)


class Mixed(nn.Module):
    """Linked convolutions, depthwise, ReLU6, a transposed one with groups, pooling and resizing, a classifier."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1, bias=False)
        self.each = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norms = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2)
        self.pool, self.point = nn.AdaptiveAvgPool2d(2), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = nn.functional.relu6(self.norms(self.each(self.left(x) + self.right(x))))
        x = self.up(x)
        small = nn.functional.interpolate(self.point(self.pool(x)), x.shape[2:], mode="bilinear", align_corners=False)
        return self.head(torch.cat([x, small], 1).mean((2, 3)))


class Words(nn.Module):
    """An embedding, torch's own attention, two linear layers, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.linear, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, ids):
        x = self.table(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.linear(self.linear(x).relu()).mean(1))


IMAGES = torch.empty(1, 3, 8, 8)
IDS = torch.zeros(1, 6, dtype=torch.long)


def made(model, example, precisions="w4a4", data=None, *, seed=0, train=True, **options):
    """A quantized copy; `precisions` is one for all, or by layer over w4a4. Normalization has lived a little."""
    torch.manual_seed(seed)
    if train:
        scramble_norms_(model)
    graph = bitplan.trace(model, example, rules=RULES, name="net")
    precisions = lowered(graph) if precisions == "mixed" else precisions
    plan = bitplan.Plan.uniform(graph, precisions if isinstance(precisions, str) else "w4a4")
    if not isinstance(precisions, str):
        chosen = {name: bitplan.Precision.parse(precision) for name, precision in precisions.items()}
        plan = plan.model_copy(update={"precisions": {**plan.precisions, **chosen}})
    quantized = bitplan.quantize(model, plan, **options).eval()
    batch = data if data is not None else batch_like(example, 8)
    bitplan.calibrate_(quantized, [batch])
    return quantized


def lowered(graph):
    """w2a2 for every second group that may be chosen, w4a4 for the others: a mixed 4/2 plan."""
    groups = graph.selectable
    return {layer.name: "w2a2" for group in groups[::2] for layer in group.layers}


def batch_like(example, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    if isinstance(example, dict):
        return {name: batch_like(value, count, seed) for name, value in example.items()}
    shape = (count, *example.shape[1:])
    if example.is_floating_point():
        return torch.randn(shape, generator=generator)
    return torch.randint(0, 2, shape, generator=generator)


def scramble_norms_(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)


class Body(nn.Module):
    """The parts that PSPNet wants of a backbone, small."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(2))
        self.layer3 = nn.Sequential(nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.ReLU())
        self.layer4 = nn.Sequential(nn.Conv2d(8, 16, 3, padding=2, dilation=2), nn.ReLU())


def pspnet():
    return PSPNet(Body(), classes=5, width=16), torch.empty(1, 3, 37, 41)


def bert():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return bert_for_question_answering(**sizes, vocab_size=50), bert_example(9)


def vit():
    models = torchvision().models
    net = models.VisionTransformer(16, 8, num_layers=1, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10)
    nn.init.normal_(net.heads.head.weight)  # torchvision starts it at zero
    return net, torch.empty(1, 3, 16, 16)


def mobilenet():
    setting = [[1, 8, 1, 1], [6, 8, 1, 2]]
    return torchvision().models.MobileNetV2(10, inverted_residual_setting=setting), torch.empty(1, 3, 32, 32)


def mixed():
    return Mixed(), IMAGES


def words():
    return Words(), IDS


def digits_transformer():
    return load_model("digits_transformer")


def digits_resnet():
    return load_model("digits_resnet")


def assert_holds_the_codes(exporter, path, model, *, inputs=True):
    found, own = exporter.read(path), bitplan.integer_weights(model)
    planned = bitplan.plan_of(model).precisions
    if not inputs:
        planned = {layer: Precision(weight_bits=one.weight_bits, act_bits=16) for layer, one in planned.items()}
    assert found.precisions == planned
    assert found.codes.keys() == own.keys()
    assert all(torch.equal(found.codes[layer], own[layer]) for layer in own)
