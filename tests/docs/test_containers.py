"""The files in deploy/containers and deploy/kubernetes keep what docs/containers.md promises; a long test runs them."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from scripts.local_federation import containers
from scripts.local_federation.containers import GIVEN, SHARED
from scripts.releasing import ROLES, ROOT
from site_agent.config import SiteConfig
from site_agent.trainer import __main__ as trainer
from site_agent.trainer import isolation
from tests.support.site_world import write_config

yaml = pytest.importorskip("yaml")
DEPLOY = ROOT / "deploy"
FILE = (DEPLOY / "containers" / "Containerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "containers" / "compose.yaml").read_text(encoding="utf-8"))
KUBERNETES = "1.30"
IMAGED = ("audit", "consortium", "coordinator", "site")


def stages() -> dict[str, tuple[str, list[str]]]:
    """What each stage begins with, and its instructions."""
    found: dict[str, tuple[str, list[str]]] = {}
    lines: list[str] = []
    for line in FILE.splitlines():
        if begun := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            lines = []
            found[begun[2]] = (begun[1], lines)
        elif line and not line.startswith("#"):
            lines.append(line)
    return found


def test_there_is_a_target_for_every_role_that_runs_somewhere() -> None:
    found = stages()
    assert set(ROLES) - {"lab"} == set(IMAGED) == {name for name, (base, _) in found.items() if base == "party"}
    for role in IMAGED:
        assert f"COPY --from={role}-installed /opt/lazaret /opt/lazaret" in found[role][1]
        assert found[f"{role}-installed"] == (
            "${BASE}", [f"COPY {role} /release", 'RUN ["/release/install", "/opt/lazaret"]']
        )  # fmt: skip


def test_no_image_is_taken_from_anywhere_by_default() -> None:
    arguments = re.findall(r"^ARG (.*)$", FILE, re.MULTILINE)
    assert arguments == ["BASE", "RUNTIME=${BASE}"]
    named = {base for base, _ in stages().values()}
    assert named == {"${BASE}", "${RUNTIME}", "party"}


def test_what_runs_is_not_root_and_needs_no_shell() -> None:
    base, lines = stages()["party"]
    assert base == "${RUNTIME}" and lines[-1] == "USER 65532:65532"
    for role in IMAGED:
        own = stages()[role][1]
        assert not any(line.startswith(("USER", "RUN")) for line in own)
        for line in own:
            if run := re.search(r"(?:ENTRYPOINT|CMD) (.*)$", line):
                assert isinstance(json.loads(run[1]), list), "a string would be given to a shell"
    for role, program in (("coordinator", "coordinator"), ("site", "site-agent")):
        (check,) = (line for line in stages()[role][1] if line.startswith("HEALTHCHECK"))
        assert check.endswith(f'CMD ["{program}", "status", "--running"]')


def closed(service: dict[str, Any]) -> bool:
    return (
        service["read_only"] is True
        and service["user"] == "65532:65532"
        and service["cap_drop"] == ["ALL"]
        and service["security_opt"] == ["no-new-privileges:true"]
        and any(line.startswith("/tmp:") for line in service["tmpfs"])
        and not service.keys() & {"privileged", "cap_add", "devices", "pid", "ipc", "ports"}
    )


def test_every_container_of_the_compose_file_is_closed() -> None:
    services = COMPOSE["services"]
    sites = {name.removesuffix("-agent") for name in services if name.endswith("-agent")}
    assert len(sites) == 3 and services.keys() == {"coordinator"} | {
        f"{site}-{part}" for site in sites for part in ("agent", "trainer")
    }
    assert all(closed(service) for service in services.values())
    assert COMPOSE["networks"] == {"federation": {"internal": True}}
    assert not any("/" in service["image"] for service in services.values()), "names no registry"


def test_the_trainer_has_neither_network_nor_keys_and_the_agent_no_images() -> None:
    for name, service in COMPOSE["services"].items():
        mounts = service["volumes"]
        if name.endswith("-trainer"):
            site = name.removesuffix("-trainer")
            assert service["network_mode"] == "none" and "networks" not in service
            assert "--required" in service["entrypoint"] and "environment" not in service
            assert f"${{FOLDER}}/images/{site}:/images:ro" in mounts
            inside = {mount.split(":")[0].removeprefix("${FOLDER}/") for mount in mounts}
            assert inside == {f"images/{site}", *(f"{site}/{name}" for name in (*GIVEN, *SHARED))}
            assert {mount.split(":")[0] for mount in mounts if mount.endswith(":ro")} == {
                f"${{FOLDER}}/images/{site}", *(f"${{FOLDER}}/{site}/{name}" for name in GIVEN)
            }  # fmt: skip
        else:
            assert not any("images" in mount for mount in mounts) and service["networks"] == ["federation"]
            assert "DIGEST" in service["environment"]["LAZARET_IMAGE"]


def test_the_trainer_s_container_has_what_a_trainer_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that came by wire and an approved plugin too, and not only what a first run needs."""
    config = SiteConfig.read(write_config(tmp_path, Path("identity"), Path("initial.safetensors")))
    for name in (*GIVEN, *SHARED):
        (tmp_path / name).mkdir(parents=True, exist_ok=True) if "." not in name else (tmp_path / name).touch()
    asked: dict[str, Any] = {}
    monkeypatch.setattr(isolation, "enter", lambda mode, **rest: asked.update(rest))
    trainer.isolate(config, None, tmp_path / "scratch")
    read, write = (
        {str(path.relative_to(tmp_path)) for path in asked[name] if path.is_relative_to(tmp_path)}
        for name in ("read", "write")
    )
    assert read == {*GIVEN, *SHARED} - {"site.toml", "run"} and write == {*SHARED, "scratch"} - {"run"}


def objects() -> list[tuple[Path, dict[str, Any]]]:
    found = []
    for path in sorted((DEPLOY / "kubernetes").glob("*/*.yaml")):
        found += [(path, one) for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    return found


def test_kustomizations_list_their_files() -> None:
    for folder in ("coordinator", "site"):
        path = DEPLOY / "kubernetes" / folder / "kustomization.yaml"
        listed = yaml.safe_load(path.read_text(encoding="utf-8"))["resources"]
        assert sorted([*listed, path.name]) == sorted(one.name for one in path.parent.iterdir())


def test_kubernetes_schemas_accept_every_object_and_not_its_twin() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    kinds = []
    for _, one in objects():
        if one["kind"] != "Kustomization":
            validator.validate(one, KUBERNETES, strict=True)
            kinds.append(one["kind"])
            twin = copy.deepcopy(one)
            twin["spec"]["podSelektor"] = {}
            with pytest.raises(validator.ValidationError):
                validator.validate(twin, KUBERNETES, strict=True)
    assert kinds.count("StatefulSet") == kinds.count("NetworkPolicy") == 3


OVERLAY = """
resources: [base/coordinator, base/site]
images: [{{name: lazaret-site, newName: hospital/lazaret-site, digest: {digest}}}]
patches:
  - target: {{kind: StatefulSet, name: lazaret-agent}}
    patch: '[{{"op": "replace", "path": "/spec/template/spec/containers/0/env/0/value", "value": "{digest}"}}]'
  - target: {{kind: NetworkPolicy, name: lazaret-agent}}
    patch: '[{{"op": "add", "path": "/spec/egress/0/to", "value": [{{"ipBlock": {{"cidr": "192.0.2.10/32"}}}}]}}]'
"""


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed here")
def test_kustomize_builds_them_with_an_overlay(tmp_path: Path) -> None:
    """The image by its digest, the same in the log, and the coordinator's address: what the page asks of an overlay."""
    validator, digest = pytest.importorskip("kubernetes_validate"), f"sha256:{'1' * 64}"
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "base")
    (tmp_path / "kustomization.yaml").write_text(OVERLAY.format(digest=digest))
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, timeout=60, check=True)
    built = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}
    for one in built.values():
        validator.validate(one, KUBERNETES, strict=True)
    (agent,) = built["StatefulSet", "lazaret-agent"]["spec"]["template"]["spec"]["containers"]
    assert agent["image"] == f"hospital/lazaret-site@{digest}" and agent["env"][0]["value"] == digest
    first, _ = built["NetworkPolicy", "lazaret-agent"]["spec"]["egress"]
    assert first["to"] == [{"ipBlock": {"cidr": "192.0.2.10/32"}}]
    assert len(built) == len(objects()) - 2


def pods() -> dict[str, dict[str, Any]]:
    found = [one for _, one in objects() if one["kind"] == "StatefulSet"]
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in found}


def test_every_pod_is_closed() -> None:
    for name, pod in pods().items():
        assert pod["automountServiceAccountToken"] is False and not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        # Kubernetes would open the keys to the group, and a party refuses keys that others can read.
        assert "fsGroup" not in pod["securityContext"]
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
        }  # fmt: skip
        assert ("livenessProbe" in container) == (name != "lazaret-trainer")
        assert "/" not in container["image"] and "hostPath" not in str(pod["volumes"])


def test_the_trainer_s_pod_reaches_nobody_and_sees_no_key() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for _, one in objects() if one["kind"] == "NetworkPolicy"}
    assert policies.keys() == pods().keys(), "one policy a pod"
    trainer = policies["lazaret-trainer"]
    assert (trainer["policyTypes"], trainer["ingress"], trainer["egress"]) == (["Ingress", "Egress"], [], [])
    assert policies["lazaret-agent"]["ingress"] == []
    mounts = pods()["lazaret-trainer"]["containers"][0]["volumeMounts"]
    assert all("subPath" in mount for mount in mounts if mount["name"] == "home"), "never the whole folder"
    parts = {mount["subPath"]: mount.get("readOnly", False) for mount in mounts if mount["name"] == "home"}
    assert parts == dict.fromkeys(GIVEN, True) | dict.fromkeys(SHARED, False)
    assert {"name": "images", "mountPath": "/images", "readOnly": True} in mounts
    assert "images" not in str(pods()["lazaret-agent"])


@pytest.mark.parametrize(("tools", "user", "reason"), [(None, 0, "not installed"), ("/bin/true", 1000, "only root")])
def test_where_it_cannot_run_it_says_why(
    monkeypatch: pytest.MonkeyPatch, tools: str | None, user: int, reason: str
) -> None:
    monkeypatch.setattr(containers.shutil, "which", lambda name: tools)
    monkeypatch.setattr(containers.os, "geteuid", lambda: user)
    said = CliRunner().invoke(containers.main, ["--json"])
    assert said.exit_code == 0 and reason in json.loads(said.output)["skipped"]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_a_federation_in_containers() -> None:
    words = [ROOT / "scripts" / "containers", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout) if done.stdout else {}
    if "skipped" in told:
        pytest.skip(told["skipped"])
    assert told.get("ok") is True, done.stdout + done.stderr
