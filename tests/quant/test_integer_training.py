"""Networks made for integer kernels: what is added to products lies on their grid, and residual sums are of 8 bits."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.registry import LAYERS
from bitplan.quant.checkpoint import fingerprint, load_checkpoint, save_checkpoint
from bitplan.quant.convert import integer_weights, options_of, plan_of, weight_steps, without_quantizers
from bitplan.quant.integer import NormLayer, additions_of, write_rounded_
from bitplan.quant.layers import Adopted, LayerType, release_
from nets import Net, dynamo

FREE = bitplan.Rules(first=None, last=None, narrow=0, embeddings=None)
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
EXAMPLE = torch.empty(1, 3, 8, 8, device="meta")


def plus(a, b):
    return a + b


def in_place(a, b):
    a += b
    return a


def by_statement(a, b):
    a.add_(b)
    return a


SUMS = {
    "operator": plus,
    "in_place": in_place,
    "statement": by_statement,
    "function": torch.add,
    "method": lambda a, b: a.add(b),
    "keyword": lambda a, b: torch.add(input=a, other=b),
}


class Block(nn.Module):
    """x + what two convolutions make of it; the second has a bias before its norm."""

    def __init__(self, add=plus, width=6):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)
        self.add = add

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.add(self.bn2(self.conv2(y)), x))


def network(add=plus):
    """A stem without a norm, two blocks, a classifier; norms as training leaves them, scales of both signs."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), Block(add), Block(add), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 5),
    )  # fmt: skip
    for norm in [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]:
        for values in (norm.weight.data, norm.bias.data, norm.running_mean):
            values.normal_()
        norm.running_var.uniform_(0.5, 2)
    return net.eval()


def planned(net, precision="w4a4"):
    return bitplan.Plan.uniform(bitplan.trace(net, EXAMPLE, rules=FREE), precision)


def made(net, precision="w4a4", **options):
    model = bitplan.quantize(net, planned(net, precision), integer=True, **options)
    bitplan.calibrate_(model, [X.to(next(net.parameters()).dtype)])
    return model.eval()


def norms_of(model):
    return {path: module for path, module in model.named_modules() if isinstance(module, NormLayer)}


def grid_of(model, layer):
    """step_x·step_w of a layer, as one may read it off the model."""
    module = model.get_submodule(layer)
    return (module.input_quantizer.step * module.weight_quantizer.step.flatten()).detach().abs().double()


def watched(model, paths, x):
    """What modules are given and give, in one run."""
    seen = {}
    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda _, given, out, path=path: seen.update({path: (given[0].detach().double(), out.detach().double())})
        )
        for path in paths
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return seen


def off_grid(values, grid):
    codes = values / grid
    return (codes - codes.round()).abs().max().item()


def channels(values):
    return values.view(1, -1, 1, 1)


# --- What is added to products ---


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_shift_of_a_norm_is_a_multiple_of_the_steps_times_its_scale(training, per_channel):
    model = made(network(), per_channel=per_channel).train(training)
    norms = norms_of(model)
    assert len(norms) == 4
    for path, (given, out) in watched(model, norms, X).items():
        norm, layer = norms[path], path.replace("bn", "conv")
        variance, mean = (
            torch.var_mean(given, (0, 2, 3), correction=0) if training else (norm.running_var, norm.running_mean)
        )
        k = norm.weight.detach().double().abs() / (variance.double() + norm.eps).sqrt()
        bias = norm.convolution.bias
        products = given - (0 if bias is None else channels(bias.detach().double()))
        shift = out / channels(k) - products
        assert shift.std((0, 2, 3)).max() < 1e-5 * shift.abs().max()  # one number for each channel
        assert off_grid(shift.mean((0, 2, 3)), grid_of(model, layer)) < 5e-3
        exact = (0 if bias is None else bias.detach().double()) - mean + norm.bias.detach().double() / k
        assert ((shift.mean((0, 2, 3)) - exact).abs() <= 0.505 * grid_of(model, layer)).all()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_other_biases_are_multiples_of_the_steps(training, per_channel):
    model = made(network(), per_channel=per_channel).train(training)
    codes, steps = integer_weights(model), weight_steps(model)
    for layer, product in (("0", lambda x, w: F.conv2d(x, w, padding=1)), ("6", F.linear)):
        module = model.get_submodule(layer)
        given, out = watched(model, [layer], X)[layer]
        step = module.input_quantizer.step.detach().abs().double()
        low, high = module.input_quantizer.range
        added = out - product((given / step).round().clamp(low, high) * step, codes[layer] * steps[layer].double())
        bias = added.transpose(0, 1).flatten(1).mean(1)
        assert off_grid(bias, grid_of(model, layer)) < 5e-3
        assert ((bias - module.bias.detach()).abs() <= 0.505 * grid_of(model, layer)).all()


@pytest.mark.parametrize("kind", [nn.ConvTranspose2d, nn.Conv2d])
def test_biases_of_groups_and_of_functions_are_multiples_too(kind):
    torch.manual_seed(0)
    layer = kind(4, 6, 3, groups=2)
    handed = nn.Parameter(torch.randn(5, 6))
    bias = nn.Parameter(torch.randn(5))
    net = Net(lambda net, x: F.linear(net.layer(x).mean((2, 3)), net.m, net.c), layer=layer, m=handed, c=bias)
    x = torch.randn(2, 4, 6, 6)
    plan = bitplan.Plan.uniform(bitplan.trace(net, x, rules=FREE), "w4a4")
    model = bitplan.quantize(net, plan, integer=True, per_channel=True)
    bitplan.calibrate_(model, [x])
    zero = torch.zeros_like(x)
    out = watched(model.eval(), ["layer"], zero)["layer"][1]
    assert off_grid(out.mean((0, 2, 3)), grid_of(model, "layer")) < 1e-3
    call = model.call_quantizers["m"]
    grid = call.input_quantizer.step.detach().double() * call.weight_quantizer.step.detach().double().flatten()
    nn.init.zeros_(model.layer.bias)
    assert off_grid(model(zero)[0].detach().double(), grid) < 1e-3
    assert not torch.equal(model(zero)[0], bias)


def test_gradients_pass_straight_through_the_rounding():
    """Those of a norm are those of torch's, whose shift is not rounded, and finite differences of that."""
    net = network().double()
    model = made(net).train()
    path, norm = next(iter(norms_of(model).items()))
    x = watched(model, [path], X.double())[path][0].requires_grad_()
    weights = torch.randn(x.shape, dtype=torch.double)
    (norm(x) * weights).sum().backward()

    def smooth(x, gamma, beta):
        return (F.batch_norm(x, None, None, gamma.abs(), beta, training=True) * weights).sum()

    figures = [x, norm.weight, norm.bias]
    wanted = torch.autograd.grad(smooth(*figures), figures)
    for one, gradient in zip(figures, wanted, strict=True):
        torch.testing.assert_close(one.grad, gradient)
    assert torch.autograd.gradcheck(smooth, [one.detach().clone().requires_grad_() for one in figures], fast_mode=True)


def test_every_parameter_learns():
    model = made(network()).train()
    F.cross_entropy(model(X), torch.tensor([0, 1, 2, 3])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0 or name.endswith("conv2.bias"), name  # which a norm takes away again


def test_a_scale_of_zero_learns_and_its_shift_fits_32_bits():
    net = network()
    with torch.no_grad():
        net[2].bn2.weight.zero_()
    model = made(net).train()
    norm = model[2].bn2
    F.cross_entropy(model(X), torch.tensor([0, 1, 2, 3])).backward()
    assert norm.weight.grad.count_nonzero() > 3  # not those of channels that no ReLU lets pass
    out = watched(model.eval(), ["2.bn2"], X)["2.bn2"][1]
    torch.testing.assert_close(out, channels(norm.bias.detach().double()).expand_as(out), atol=1e-4, rtol=1e-4)
    grid, bias = grid_of(model, "2.conv2"), norm.convolution.bias.detach().double()
    write_rounded_(model)
    k = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach().double()
    codes = (bias - norm.running_mean + norm.bias.detach() / k) / grid
    assert codes.abs().max() < 2**31
    assert (k > 0).all()


@pytest.mark.parametrize("per_channel", [False, True])
def test_settled_plain_modules_compute_what_rounding_ones_do(per_channel):
    model = made(network(), per_channel=per_channel)
    wanted = model(X)
    write_rounded_(model)
    assert not norms_of(model)
    torch.testing.assert_close(model(X), wanted)
    for layer in ("0", "6"):
        assert off_grid(model.get_submodule(layer).bias.detach().double(), grid_of(model, layer)) < 1e-3


# --- What the float network is ---


def test_changing_signs_leaves_the_float_network_as_it_is():
    net = network()
    assert any((module.weight < 0).any() for module in net.modules() if isinstance(module, nn.BatchNorm2d))
    model = made(net)
    assert all((norm.weight > 0).all() for norm in norms_of(model).values())
    with without_quantizers(model):
        torch.testing.assert_close(model(X), net(X))
        torch.testing.assert_close(model.train()(X), copy.deepcopy(net).train()(X))


def test_names_classes_and_keys_stay():
    net = network()
    model = made(net)
    added = [key for key in model.state_dict() if key not in net.state_dict()]
    assert all(
        ".step" in key or ".saved_bits" in key or ".signed" in key or key.startswith("weight_q") for key in added
    )
    assert net.state_dict().keys() <= model.state_dict().keys()
    assert all(isinstance(norm, nn.BatchNorm2d) for norm in norms_of(model).values())


# --- Additions ---


@pytest.mark.parametrize("form", SUMS)
def test_however_it_is_written_an_addition_adds_8_bits(form):
    model = made(network(SUMS[form]))
    plain = made(network())
    assert list(additions_of(model)) == ["2.add", "3.add"]
    torch.testing.assert_close(model(X), plain(X))
    left = additions_of(model)["3.add"].left
    assert left.bits == 8
    assert left.range == (-128, 127)
    assert additions_of(model)["3.add"].right.range == (0, 255)
    model.train()(X).sum().backward()
    plain.train()(X).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_what_is_added_lies_on_8_bits():
    model = made(network())
    call = additions_of(model)["3.add"]
    out = watched(model, ["3"], X)["3"][1]
    left, right = (quantizer.step.detach().double() for quantizer in (call.left, call.right))
    sums = (torch.arange(-128, 128).double()[:, None] * left + torch.arange(256).double() * right).flatten()
    sums = torch.cat([sums[sums > 0], torch.zeros(1).double()]).sort().values
    above = torch.searchsorted(sums, out.flatten()).clamp(1, sums.numel() - 1)
    nearest = torch.minimum((out.flatten() - sums[above]).abs(), (out.flatten() - sums[above - 1]).abs())
    assert nearest.max() < 1e-6 * out.max()


def test_everything_in_a_block_reads_the_integers_that_it_adds():
    model = made(network())
    given = watched(model, ["3.conv1"], X)["3.conv1"][0]
    assert off_grid(given, additions_of(model)["3.add"].right.step.double()) < 1e-4


@pytest.mark.parametrize("integer", [False, True])
def test_a_proof_tells_of_additions(integer):
    net = network()
    model = bitplan.quantize(net, planned(net), integer=integer)
    names = {name for name in bitplan.prove(model, EXAMPLE).quantized if name.endswith("add")}
    assert names == ({"2.add", "3.add"} if integer else set())
    bitplan.prove(model, EXAMPLE).check()


def test_a_proof_finds_an_addition_that_runs_in_float():
    net = network()
    model = bitplan.quantize(net, planned(net), integer=True)
    release_(model[3])  # its quantizers are there, and nobody calls them
    proof = bitplan.prove(model, EXAMPLE)
    assert proof.unreached == ("3.add",)
    with pytest.raises(InputError, match="never ran layer 3.add"):
        proof.check()


def test_a_proof_finds_an_addition_with_one_operand_in_float():
    net = network()
    model = bitplan.quantize(net, planned(net), integer=True)
    call = additions_of(model)["3.add"]
    call.added = lambda addends: torch.add(addends.left, addends.right)  # the right one is quantized on entry
    assert dict(bitplan.prove(model, EXAMPLE).in_float) == {"3.add": 1}


# --- Exactness ---


class Integers:
    """Computes a network of `Block`s by codes: int64 products, and one scale and one shift code for each channel."""

    def __init__(self, model):
        self.model, self.codes, self.steps = model, integer_weights(model), weight_steps(model)
        self.seen = {}

    def quantized(self, quantizer, real, label):
        low, high = quantizer.range
        codes = (real / quantizer.step.detach().abs()).round().clamp(low, high)
        self.seen[label] = codes.long()
        return codes.long(), quantizer.step.detach().abs()

    def layer(self, path, real, norm=None):
        module = self.model.get_submodule(path)
        codes, step = self.quantized(module.input_quantizer, real, f"{path}.input_quantizer")
        grid = step * self.steps[path].flatten()
        convolve = F.conv2d if codes.dim() == 4 else F.linear
        options = {"padding": 1} if codes.dim() == 4 else {}
        total = convolve(codes.double(), self.codes[path].double(), **options).long()
        bias = 0 if module.bias is None else module.bias.detach()
        shape = (1, -1, *[1] * (codes.dim() - 2))
        if norm is None:
            return (total + (bias / grid).round().long().view(shape)) * grid.view(shape)
        k = norm.weight.detach().abs() / (norm.running_var + norm.eps).sqrt()
        shift = ((bias - norm.running_mean + norm.bias.detach() / k) / grid).round().long()
        assert shift.abs().max() < 2**31
        return (total + shift.view(shape)) * (grid * k).view(shape)

    def block(self, path, real):
        block, call = self.model.get_submodule(path), additions_of(self.model)[f"{path}.add"]
        codes, step = self.quantized(call.right, real, f"{path}.call_quantizers.add.right")
        entered = codes * step
        y = self.layer(f"{path}.conv1", entered, block.bn1).clamp_min(0)
        y = self.layer(f"{path}.conv2", y, block.bn2)
        left, left_step = self.quantized(call.left, y, f"{path}.call_quantizers.add.left")
        return (left * left_step + codes * step).clamp_min(0)

    def __call__(self, x):
        x = self.layer("0", x).clamp_min(0)
        x = self.block("3", self.block("2", x))
        return self.layer("6", x.mean((2, 3)))


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("precision", ["w2a2", "w4a4", "w8a8", "w2a4"])
def test_integer_arithmetic_gives_the_same_codes(precision, per_channel):
    model = made(network(), precision, per_channel=per_channel).double()
    F.mse_loss(model.train()(X.double()), torch.ones(4, 5, dtype=torch.double)).backward()
    with torch.no_grad():  # after a step of training: steps, scales and statistics as they come
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    model.eval()
    seen = {}
    quantizers = {name: one for name, one in model.named_modules() if hasattr(one, "signed")}
    for name, quantizer in quantizers.items():
        quantizer.register_forward_hook(
            lambda one, _, out, name=name: seen.update({name: (out / one.step.abs()).round().long()})
        )
    out = model(X.double())
    reference = Integers(model)
    torch.testing.assert_close(reference(X.double()), out)
    assert reference.seen.keys() == seen.keys()
    for name, codes in seen.items():
        assert torch.equal(codes, reference.seen[name]), name


# --- What goes with a network ---


def test_a_checkpoint_is_read_back_bit_for_bit(tmp_path):
    model = made(network())
    model.train()(X).sum().backward()
    torch.optim.SGD(model.parameters(), 0.05).step()
    model.eval()
    loaded = load_checkpoint(save_checkpoint(model, tmp_path / "kept"), network()).eval()
    assert options_of(loaded).integer
    assert torch.equal(loaded(X), model(X))
    again = load_checkpoint(save_checkpoint(loaded, tmp_path / "again"), network()).eval()
    assert torch.equal(again(X), model(X))


def test_a_packed_file_is_read_back_bit_for_bit(tmp_path):
    model = made(network())
    bitplan.export(model, tmp_path / "net.bitplan.safetensors", to="packed")
    loaded = bitplan.load_packed(tmp_path / "net.bitplan.safetensors", network())
    assert torch.equal(loaded.eval()(X), model(X))


def test_copies_and_pickles_compute_the_same():
    model = made(network())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert norms_of(other)["2.bn1"].convolution is other[2].conv1
        torch.testing.assert_close(other(X), model(X))


def test_state_dicts_of_trainers_go_from_one_to_another():
    model, other = made(network()), bitplan.quantize(network(), planned(network()), integer=True)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(X), model(X))


def test_a_new_plan_keeps_the_option_and_what_was_learned():
    model = made(network())
    lowered = bitplan.quantize(model, planned(network(), "w2a2"))
    assert options_of(lowered).integer
    steps = [quantizer.step for quantizer in additions_of(lowered)["2.add"].children()]
    for one, other in zip(steps, additions_of(model)["2.add"].children(), strict=True):
        assert torch.equal(one, other.step)
    back = bitplan.quantize(lowered, plan_of(model)).eval()
    torch.testing.assert_close(back(X), model(X))


def test_the_option_can_be_taken_back():
    net = network()
    plain = bitplan.quantize(made(net), planned(net), integer=False)
    assert not norms_of(plain)
    assert not additions_of(plain)
    with without_quantizers(plain):
        torch.testing.assert_close(plain.eval()(X), net(X))


def test_fingerprints_tell_networks_for_integers_from_others():
    net = network()
    plain = bitplan.quantize(net, planned(net))
    assert fingerprint(plain).network != fingerprint(made(net)).network
    assert "integer" not in repr(options_of(plain))  # so outcomes of before are found


def test_a_plan_that_says_nothing_of_additions_needs_an_example():
    net = network()
    plan = planned(net).model_copy(update={"integers": None})
    with pytest.raises(InputError, match="give an example of its input") as error:
        bitplan.quantize(net, plan, integer=True)
    assert "\n" not in str(error.value)
    model = bitplan.quantize(net, plan, integer=True, example=EXAMPLE)
    assert list(additions_of(model)) == ["2.add", "3.add"]
    assert list(additions_of(bitplan.quantize(model, plan))) == ["2.add", "3.add"]  # it is known by now


def test_layers_left_in_float_leave_their_norms_and_sums_in_float():
    net = network()
    plan = planned(net)
    precisions = plan.precisions | {"3.conv2": "w4a16", "3.conv1": "w16a16"}
    part = bitplan.Plan(**(dict(plan) | {"precisions": precisions}))
    model = bitplan.quantize(net, part, integer=True)
    assert list(norms_of(model)) == ["2.bn1", "2.bn2"]
    assert list(additions_of(model)) == ["2.add"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_networks_in_half_precision_run(dtype):
    net = network().to(dtype)
    model = made(net)
    assert model(X.to(dtype)).dtype == dtype
    assert torch.isfinite(model(X.to(dtype))).all()


def test_what_is_retraced_is_what_was_traced():
    net = network()
    graph = bitplan.trace(net, EXAMPLE, rules=FREE)
    assert bitplan.trace(made(net), EXAMPLE, rules=FREE).integers == graph.integers


@dynamo
@pytest.mark.parametrize("training", [False, True])
def test_it_compiles(training):
    model = made(network()).train(training)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(X), reference(X))
    compiled(X).sum().backward()
    reference(X).sum().backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_norms_can_be_refreshed():
    model = made(network())
    before = norms_of(model)["2.bn1"].running_mean.clone()
    bitplan.calibrate_(model, [X], refresh_norms=True)
    given = watched(model.eval(), ["2.bn1"], X)["2.bn1"][0]
    torch.testing.assert_close(norms_of(model)["2.bn1"].running_mean.double(), given.mean((0, 2, 3)))
    assert not torch.equal(before, norms_of(model)["2.bn1"].running_mean)


def test_it_trains_under_autocast():
    model = made(network()).train()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(X)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


class Shifted(nn.Linear):
    """A layer with a forward of its own, which adds its bias as it is."""

    def forward(self, x):
        return F.linear(x, self.weight) * 2 + self.bias


class ShiftedLayer(Adopted):
    def forward(self, x):
        return F.linear(self.input_quantizer(x), self.weight_quantizer(self.weight)) * 2 + self.bias


class ShiftedType(LayerType):
    modules, quantized = (Shifted,), ShiftedLayer

    def example(self):
        return Shifted(6, 4), torch.randn(3, 6)


def test_a_layer_type_that_does_not_round_keeps_its_bias_where_others_are_settled():
    net, x = Net(lambda net, x: net.shifted(x), shifted=Shifted(6, 4)), torch.randn(3, 6)
    with LAYERS.registered("shifted", ShiftedType):
        model = bitplan.quantize(net, bitplan.Plan.uniform(bitplan.trace(net, x, rules=FREE), "w4a4"), integer=True)
        bitplan.calibrate_(model, [x])
        wanted = model.eval()(x)
        write_rounded_(model)
        assert torch.equal(model(x), wanted)
