"""Microbatches in flight are counted by what autograd still holds."""

import pytest


@pytest.fixture
def stage():
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def seen(probe):
    (peak,) = probe.peaks(rank=0, step=1)
    return peak.peak, peak.left


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_all_forwards_first_hold_every_microbatch(stage, microbatches):
    import torch

    from invariants.probes.activations import Activations

    probe = Activations([(0, stage)])
    with probe.watching():
        outputs = [stage(torch.randn(2, 3)).sum() for _ in range(microbatches)]
        for output in outputs:
            output.backward()
        del output, outputs
    assert seen(probe) == (microbatches, 0)


def test_one_forward_one_backward_holds_one(stage):
    import torch

    from invariants.probes.activations import Activations

    probe = Activations([(0, stage)])
    for _ in range(2):
        with probe.watching():
            for _ in range(4):
                stage(torch.randn(2, 3)).sum().backward()
        assert seen(probe) == (1, 0)


def test_a_graph_that_is_kept_is_left_and_counts_in_the_next_step(stage):
    import torch

    from invariants.probes.activations import Activations

    probe = Activations([(0, stage)])
    kept = []
    with probe.watching():
        kept.append(stage(torch.randn(2, 3)).sum())
        kept[0].backward(retain_graph=True)
    assert seen(probe) == (1, 1)
    with probe.watching():
        stage(torch.randn(2, 3)).sum().backward()
    assert seen(probe) == (2, 1)
    kept.clear()
    assert seen(probe) == (2, 0)


def test_outputs_without_graph_parameters_and_meta_tensors_do_not_count(stage):
    import torch
    from torch import nn

    from invariants.probes.activations import Activations

    probe = Activations([(0, stage)])
    with probe.watching(), torch.no_grad():
        kept = stage(torch.randn(2, 3))
    assert seen(probe) == (0, 0)
    assert kept.shape == (2, 2)

    linear = nn.Linear(3, 3, bias=False)
    probe = Activations([(0, linear)])
    with probe.watching():
        # The input needs a gradient and the weight does not: autograd saves the weight alone.
        linear.weight.requires_grad_(False)
        output = linear(torch.randn(2, 3, requires_grad=True))
    assert seen(probe) == (0, 0)
    assert output.requires_grad

    shadow = nn.Linear(3, 3).to("meta")
    probe = Activations([(0, shadow)])
    with probe.watching():
        output = shadow(torch.empty(2, 3, device="meta"))
    assert seen(probe) == (0, 0)
    assert output.device.type == "meta"


def test_an_output_that_its_node_saves_is_freed(stage):
    import torch
    from torch import nn

    from invariants.probes.activations import Activations

    probe = Activations([(7, nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()))])
    module = probe._modules[0]
    with probe.watching():
        output = module(torch.randn(2, 3))
        assert probe.peaks(0, 1)[0].left == 1
        del output
        assert probe.peaks(0, 1)[0].left == 0


def test_stages_of_one_rank_are_counted_apart_and_a_raising_one_leaves_no_trace(stage):
    import torch
    from torch import nn

    from invariants.probes.activations import Activations

    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    raises = Raises()
    probe = Activations([(0, stage), (4, raises)])
    with probe.watching():
        with pytest.raises(ValueError, match="no"):
            raises(torch.zeros(1))
        output = stage(torch.randn(2, 3))
    found = {peak.stage: (peak.peak, peak.left) for peak in probe.peaks(0, 1)}
    assert found == {0: (1, 1), 4: (0, 0)}
    assert output.requires_grad
    probe.close()
    assert not stage._forward_hooks
    assert not stage._forward_pre_hooks
    assert not raises._forward_hooks


def test_gradients_are_bit_for_bit_those_without_the_probe(stage):
    import torch

    from invariants.probes.activations import Activations

    inputs = torch.randn(5, 3)
    stage(inputs).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in stage.parameters()]
    stage.zero_grad()
    with Activations([(0, stage)]).watching():
        stage(inputs).square().sum().backward()
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(plain, stage.parameters(), strict=True))
