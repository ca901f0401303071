"""CReFF (Shang et al. 2022): the server re-trains the classifier on features made to match class-wise gradients.

Lab only: the server does more than take a mean, so sites could not recompute its step from the sum. Sites send sums of
per-class gradients of the head; row c of such a gradient is close to a mean feature of class c, which is more than any
other method here gives away, most of all for a class that only one site has (`min_owners`).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from npr.device import to_host
from npr.methods.base import Kind, Method, MethodOptions
from npr.methods.registry import register
from npr.methods.site import Site
from npr.model import ModelSpec, SplitModel, build_model, feature_width, linear
from npr.params import Contribution, ParameterManifest, Sum, Vector
from npr.seeds import derive, generator


class CreffOptions(MethodOptions):
    """Synthetic features per class, steps and rates of matching them and of re-training the head on them."""

    per_class: int = Field(default=100, ge=1)
    matching_steps: int = Field(default=100, ge=0)
    matching_rate: float = Field(default=0.1, gt=0.0)
    head_epochs: int = Field(default=300, ge=0)
    head_rate: float = Field(default=0.01, gt=0.0)
    min_owners: int = Field(default=1, ge=1)


def class_gradients(features: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    """(C, C, d + 1): for each class the mean gradient of cross-entropy by weight and bias; zero for absent classes.

    For a linear head the gradient of one sample is (p - e_y) [h, 1]^T, so no backward pass is needed.
    """
    classes = head.out_features
    errors = torch.softmax(head(features), dim=1) - functional.one_hot(labels, classes)
    extended = torch.cat([features, features.new_ones(len(features), 1)], dim=1)
    gradients = features.new_zeros(classes, classes, features.shape[1] + 1)
    for label in set(to_host(labels).tolist()):
        mine = labels == label
        gradients[label] = errors[mine].T @ extended[mine] / mine.sum()
    return gradients


def matching_loss(synthetic: Tensor, head: nn.Linear, target: Tensor, owned: Tensor) -> Tensor:
    """Sum over owned classes of 1 - cosine between synthetic and real gradients: row by row, and once for the bias."""
    classes, per_class, _ = synthetic.shape
    errors = torch.softmax(head(synthetic), dim=2) - torch.eye(classes, device=synthetic.device)[:, None, :]
    weight = torch.einsum("cmk,cmd->ckd", errors, synthetic) / per_class
    rows = 1.0 - functional.cosine_similarity(weight, target[:, :, :-1], dim=2)
    bias = 1.0 - functional.cosine_similarity(errors.mean(1), target[:, :, -1], dim=1)
    return ((rows.sum(1) + bias) * owned).sum()


@register("creff", "classifier re-trained at the server on federated features; lab only")
class CReFF(Method):
    """Sites train as in FedAvg, from the averaged head. The re-trained head is for gradients and for deployment."""

    Options = CreffOptions
    options: CreffOptions
    one_label: ClassVar[str] = "its server makes features of one class each"
    judged: ClassVar[Kind] = "global"
    wire: ClassVar[bool] = False
    _seed = 0

    def build_model(self, spec: ModelSpec) -> SplitModel:
        model = build_model(spec)
        head = linear(feature_width(model.extractor), spec.num_classes, derive(spec.seed, "retrained head"))
        model.retrained_head = head.requires_grad_(False)
        self._seed = spec.seed
        return model

    def broadcasts(self, round_number: int) -> frozenset[str]:
        return super().broadcasts(round_number) | {"retrained_head"}

    def begin_round(self, site: Site, round_number: int) -> None:
        super().begin_round(site, round_number)
        features, labels = site.training_features(site.model)
        site.kept["class_gradients"] = to_host(class_gradients(features, labels, _retrained(site.model)))

    def contribution(self, site: Site, round_number: int) -> Contribution:
        """Gradients count once per owning site, not per image, so they are sums of their own beside the owners'."""
        plain = super().contribution(site, round_number)
        extras = {
            "class_gradients": to_host(site.kept["class_gradients"]).flatten().numpy(),
            "owners": to_host(site.prior.present.float()).numpy(),
        }
        return Contribution(vector=plain.vector, weight=plain.weight, extras=extras)

    def server_step(self, model: SplitModel, manifest: ParameterManifest, mean: Vector, extras: dict[str, Sum]) -> None:
        super().server_step(model, manifest, mean, extras)
        head = _retrained(model)
        owners = torch.from_numpy(extras["owners"].astype(np.float32)).to(head.weight.device)
        gradients = torch.from_numpy(extras["class_gradients"].astype(np.float32)).to(head.weight.device)
        target = gradients.view(len(owners), len(owners), -1) / owners.clamp(min=1.0)[:, None, None]
        owned = owners >= self.options.min_owners
        synthetic = self._match(head, target, owned)
        known = self.server_memory.get("known", owned).to(owned.device) | owned
        self.server_memory = {"synthetic": to_host(synthetic), "known": to_host(known)}
        self._retrain(head, synthetic[known], known.nonzero().flatten())

    def _match(self, head: nn.Linear, target: Tensor, owned: Tensor) -> Tensor:
        shape = (head.out_features, self.options.per_class, head.in_features)
        start = self.server_memory.get("synthetic")
        if start is None:
            start = torch.randn(shape, generator=generator(self._seed, "synthetic features"))
        synthetic = start.to(target.device).clone().requires_grad_()
        optimizer = torch.optim.SGD([synthetic], lr=self.options.matching_rate)
        for _ in range(self.options.matching_steps):
            optimizer.zero_grad()
            matching_loss(synthetic, head, target, owned).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return synthetic.detach()

    def _retrain(self, head: nn.Linear, synthetic: Tensor, classes: Tensor) -> None:
        """Train a fresh head on the synthetic features and put it in the old one's place."""
        draws = generator(self._seed, "head batches")
        fresh = linear(head.in_features, head.out_features, derive(self._seed, "retrained head")).to(synthetic.device)
        inputs, labels = synthetic.flatten(0, 1), classes.repeat_interleave(synthetic.shape[1])
        optimizer = torch.optim.SGD(fresh.parameters(), lr=self.options.head_rate)
        for _ in range(self.options.head_epochs):
            order = torch.randperm(len(labels), generator=draws).to(labels.device)
            for start in range(0, len(order), 32):
                rows = order[start : start + 32]
                optimizer.zero_grad()
                functional.cross_entropy(fresh(inputs[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        head.load_state_dict(fresh.state_dict())

    def class_logits(self, model: SplitModel, features: Tensor, kind: Kind) -> Tensor:
        """Local training ends in the averaged head's successor; everything the server sent has the re-trained one."""
        return model.logits(features) if kind == "local" else _retrained(model)(features)


def _retrained(model: SplitModel) -> nn.Linear:
    head = model.retrained_head
    if not isinstance(head, nn.Linear):
        raise TypeError("CReFF needs a model made by its own build_model")
    return head
