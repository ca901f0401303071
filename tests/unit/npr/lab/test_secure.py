"""Sums by the protocol: exact integers, the plain model within fixed point, and the same code everywhere else."""

import numpy as np
import pytest
import torch

from lazaret.errors import ConfigError, PolicyViolation
from npr.lab.cell import build_federation
from npr.lab.plan import Cell, DataSettings, ModelSettings, Settings
from npr.lab.secure import SecureAggregator
from npr.wire_layout import WireModel, ever_shared
from protos.loopback import LoopbackFederation
from security.secagg import fixed_point
from security.secagg.fixed_point import step_size

SOURCE = "generated:scale=0.002,sites=4"


def federation(aggregation, method="fedavg", source=SOURCE, **options):
    settings = Settings(
        data=DataSettings(source=source, image_size=32),
        model=ModelSettings(architecture="test_efficientnet"),
        rounds=2,
        aggregation=aggregation,
    )
    return build_federation(settings, Cell(method=method, seed=0, fold="fold", options=tuple(options.items())))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_model_is_the_plain_one_within_fixed_point(monkeypatch):
    plain, secure = federation("plain"), federation("secure")
    seen = []
    original = LoopbackFederation.run_round
    monkeypatch.setattr(
        LoopbackFederation,
        "run_round",
        lambda self, words, **options: seen.append((words, outcome := original(self, words, **options))) or outcome,
    )
    plain.run_round()
    report = secure.run_round()
    (words, outcome), = seen
    total = np.sum(list(words.values()), axis=0, dtype=outcome.total.dtype)
    assert np.array_equal(outcome.total, total), "the published sum is the sum of the encodings, bit for bit"
    layout = secure.aggregator.layout
    wire = WireModel(layout, plain.model)
    ours, theirs = wire.state(secure.model), wire.state(plain.model)
    for run in layout.runs:
        # Every site rounds by half a step at most, and a float32 of the model by a unit in its last place.
        rounding = len(secure.sites) * 0.5 * step_size(layout, run, report.weight)
        gap = np.abs(ours[run.place].astype(np.float64) - theirs[run.place])
        assert (gap <= rounding + 2 * np.spacing(np.abs(theirs[run.place]))).all()
    assert not np.array_equal(ours, theirs), "the bound has been used"


def test_in_sixteen_bits_every_site_errs_by_less_than_a_step(monkeypatch):
    federated, sent = federation("secure-16"), []

    def encode(layout, update, *, weight, **options):
        sent.append((update.astype(np.float64), min(weight, layout.weight_cap)))
        return fixed_point.encode(layout, update, weight=weight, **options)

    monkeypatch.setattr("npr.lab.secure.encode", encode)
    layout = federated.aggregator.layout
    wire = WireModel(layout, federated.model)
    before = wire.state(federated.model).astype(np.float64)
    federated.run_round()
    weight = sum(own for _, own in sent)
    mean = sum(update * own for update, own in sent) / weight
    gap = np.abs(wire.state(federated.model) - (before + mean))
    for run in layout.runs:
        assert (gap[run.place] <= len(sent) * step_size(layout, run, weight) + 1e-6).all()
    assert layout.byte_length <= 2 * layout.used_words + 16


def test_a_head_that_becomes_personal_leaves_the_sum():
    secure = federation("secure", "fednpr-per", personal_after=1)
    first, second = secure.run_round(), secure.run_round()
    assert first.vector_size - second.vector_size == sum(p.numel() for p in secure.model.head.parameters())
    sent = secure.aggregator.bytes_sent
    assert set(sent) == {site.name for site in secure.sites} and min(sent.values()) > 2 * 3 * second.vector_size


def test_two_runs_give_the_same_model_whatever_the_masks():
    models = []
    for _ in range(2):
        secure = federation("secure")
        secure.run_round()
        models.append(torch.cat([value.flatten().double() for value in secure.model.state_dict().values()]))
    assert torch.equal(*models)


def test_a_restored_federation_goes_on(tmp_path):
    whole, first = federation("secure"), federation("secure")
    for each in (whole, first):
        each.run_round()
    first.checkpoint(tmp_path / "state.safetensors")
    second = federation("secure")
    second.restore(tmp_path / "state.safetensors")
    for each in (whole, second):
        each.run_round()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_two_sites_cannot_hide():
    with pytest.raises(PolicyViolation, match="2 sites are too few"):
        federation("secure", source="generated:scale=0.002,sites=2")


def test_what_a_method_sends_beside_the_model_is_summed_by_the_protocol_too(monkeypatch):
    quick = {"matching_steps": 2, "head_epochs": 2, "per_class": 4}
    plain, secure = federation("plain", "creff", **quick), federation("secure", "creff", **quick)
    asked = []
    original = SecureAggregator.sum_extra

    def watched(self, name, vectors):
        found = original(self, name, vectors)
        exact = np.sum(vectors, axis=0, dtype=np.float64)
        assert np.abs(found - exact).max() <= len(vectors) * 0.5 * 2.0**10 / 2**35, name
        assert not np.array_equal(found, exact) or name == "owners", "it came through the ring, not around it"
        asked.append(name)
        return found

    monkeypatch.setattr(SecureAggregator, "sum_extra", watched)
    for each in (plain, secure):
        each.run_round()
    assert asked == ["class_gradients", "owners"]
    heads = [each.model.retrained_head.weight for each in (plain, secure)]
    assert torch.allclose(*heads, atol=1e-4)


def test_the_wire_refuses_a_method_whose_server_does_more_than_a_mean():
    with pytest.raises(ConfigError, match="creff needs more of its server"):
        ever_shared(federation("plain", "creff").method, 1)


def test_a_layout_can_be_given():
    layout = federation("secure").aggregator.layout
    plain = federation("plain")
    assert SecureAggregator(plain, rounds=1, layout=layout).layout is layout


def test_private_and_secure_at_once():
    options = {"dp.epsilon": 8.0, "dp.steps": 1, "dp.dimensions": 4, "assign": "nearest"}
    secure = federation("secure", "fednpr-per", **options)
    before = torch.cat([value.flatten().double() for value in secure.model.state_dict().values()])
    secure.run_round()
    after = torch.cat([value.flatten().double() for value in secure.model.state_dict().values()])
    assert not torch.equal(before, after) and min(secure.aggregator.bytes_sent.values()) > 0
