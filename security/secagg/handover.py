"""The newest covered result of a run and its model, in one file: what a replacement of a lost coordinator starts from.

It is a safetensors file with the shared tensors by name, and in its metadata the result and the acknowledgements of the
sites. Any site can write it, and nobody has to be believed: the result's hash is computed here, the sites' signatures
on it are checked with the manifest, and the state must have the hash that they signed. Nothing in it is of one hospital
alone: all sites hold the same model, and everything else in the file has been public among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lazaret import files
from lazaret.errors import CodecError, ConfigError, VerificationFailed
from security.identity.membership import AggregationPolicy
from security.secagg import certificate_checks
from security.secagg.layout import Layout
from security.secagg.messages import Jump
from security.secagg.published import result_digests
from security.secagg.state import State, canonical, flatten, state_hash, unflatten

KEY: Final = "lazaret-handover"
COMPLETED: Final = "lazaret-completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A covered result, its hash and its state.

    :param completed: how many models the run had then, as the writer has counted; nobody signs it.
    """

    covered: Jump
    result_hash: bytes
    state: State
    completed: int

    @property
    def round(self) -> int:
        return self.covered.result.context.round

    @classmethod
    def of(cls, covered: Jump, state: State, completed: int) -> Handover:
        return cls(covered=covered, result_hash=result_digests(covered.result)[2], state=state, completed=completed)

    def write(self, path: Path, layout: Layout) -> None:
        tensors = {name: np.ascontiguousarray(part) for name, part in unflatten(layout, self.state).items()}
        told = {KEY: self.covered.to_bytes().hex(), COMPLETED: str(self.completed)}
        files.write_atomically(path, save(tensors, told), replace=False)

    @classmethod
    def read(cls, path: Path, policy: AggregationPolicy) -> Handover:
        """A file whose every part was checked.

        :raises VerificationFailed: if the sites of this federation did not sign this result and this state.
        """
        try:
            with safe_open(path, framework="np") as file:
                told = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
            covered = Jump.from_bytes(bytes.fromhex(told[KEY]))
            completed = int(told[COMPLETED])
            shared = {block.name: tensors[block.name] for block in policy.layout.state_blocks}
            state = canonical(flatten(policy.layout, shared))
        except FileNotFoundError as error:
            raise ConfigError("there is no such file", where=str(path)) from error
        except (SafetensorError, KeyError, ValueError, CodecError, OSError) as error:
            hint = "a site writes one with `site-agent handover FILE`"
            raise ConfigError("is not a handover of this federation's model", where=str(path), hint=hint) from error
        found = cls.of(covered, state, completed)
        found.check(policy, where=str(path))
        return found

    def check(self, policy: AggregationPolicy, *, where: str) -> None:
        result, context = self.covered.result, self.covered.result.context
        if (context.federation, context.run) != (policy.federation, policy.run):
            raise VerificationFailed(f"is of run {context.run} of {context.federation}", where=where)
        if context.layout_hash != policy.layout.layout_hash or context.t < policy.thresholds(context.n).t:
            raise VerificationFailed("was made under another layout, or by too small a quorum", where=where)
        follows = certificate_checks.check_certificate(
            policy, self.covered.check, result=self.result_hash, state_hash=result.state_hash, quorum=context.t
        )
        if not follows:
            raise VerificationFailed("the sites have voted against this state", where=where)
        if state_hash(self.state) != result.state_hash:
            raise VerificationFailed("the tensors are not the state that the sites have signed", where=where)
        if not 0 < self.completed <= context.round:
            raise VerificationFailed("the number of completed rounds is not possible", where=where)
