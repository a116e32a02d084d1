"""``ops/helm/sglang-lite``, linted and rendered by Helm itself (its library, in the wheel helm-python-sdk)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, HelmError, lint

from sglang_lite.configuration.loading import load_config
from sglang_lite.router.options import parse_options
from tests.support.server import ROOT

CHART = ROOT / "ops/helm/sglang-lite"
PAIRS: dict[str, Any] = {
    "model": {"path": "/models/qwen3", "servedName": "qwen3"},
    "auth": {"apiKey": "klopstock", "adminApiKey": "more"},
    "prefill": {"replicas": 2, "gpus": 4, "bootstrapPort": 9000, "extraArgs": ["--page-size", "16"]},
    "decode": {"replicas": 3, "rdma": {"enabled": True}, "resources": {"requests": {"cpu": "8"}}},
    "pool": {
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "extraEnv": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "podAnnotations": {"team": "a"},
    },
    "router": {"replicas": 2},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
}
WORKERS: dict[str, Any] = {
    "model": {"path": "demo"},
    "workers": {
        "replicas": 2,
        "gpus": 0,
        "extraArgs": ["--device", "cpu"],
        "cacheVolume": {"hostPath": {"path": "/c"}},
    },
}
Document = dict[str, Any]


def render(values: Document, release: str = "prod") -> list[Document]:
    with Chart.load(CHART) as chart:
        rendered = chart.render(values=values, name=release, namespace="llm")
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def one(documents: list[Document], kind: str, name: str) -> Document:
    found = [item for item in documents if item["kind"] == kind and item["metadata"]["name"] == name]
    assert len(found) == 1, [(item["kind"], item["metadata"]["name"]) for item in documents]
    return found[0]


def container(workload: Document) -> Document:
    found: Document = workload["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("values", [PAIRS, WORKERS], ids=["pairs", "workers"])
def test_lint_and_the_schemas_of_kubernetes(values: Document) -> None:
    report = lint(CHART, values, strict=True)
    assert not report["errors"] and all(message["severity"] <= 1 for message in report["messages"]), report
    documents = render(values)
    own = [item for item in documents if "monitoring.coreos.com" not in item["apiVersion"]]
    assert len(own) >= 6
    for document in own:
        kubernetes_validate.validate(document, "1.33", strict=True)
    names = [(item["kind"], item["metadata"]["name"]) for item in documents]
    assert len(set(names)) == len(names)
    assert {item["metadata"]["namespace"] for item in documents} == {"llm"}


def test_the_router_discovers_its_pods() -> None:
    """Its selectors fit the pods of the pools and no others, and a Role lets it look."""
    for values, pools in ((PAIRS, ("prefill", "decode")), (WORKERS, ("workers",))):
        documents = render(values)
        router = one(documents, "Deployment", "prod-sglang-lite-router")
        options = parse_options(container(router)["args"][1:])
        assert options.service_discovery and options.service_discovery_namespace == "llm"
        assert options.service_discovery_port == 30000
        assert options.pd_disaggregation is (len(pools) == 2)
        labels = {
            item["metadata"]["name"].rpartition("-")[2]: item["spec"]["template"]["metadata"]["labels"]
            for item in documents
            if item["kind"] in ("StatefulSet", "Deployment")
        }
        for pool in pools:
            terms = options.selector if pool == "workers" else getattr(options, f"{pool}_selector")
            wanted = dict(term.split("=") for term in terms)
            assert [name for name, has in labels.items() if wanted.items() <= has.items()] == [pool]
        pod = router["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is True
        binding = one(documents, "RoleBinding", "prod-sglang-lite-discovery")
        assert binding["subjects"][0]["name"] == pod["serviceAccountName"] == "prod-sglang-lite"
        role = one(documents, "Role", binding["roleRef"]["name"])
        assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    prefill = one(render(PAIRS), "StatefulSet", "prod-sglang-lite-prefill")["spec"]["template"]
    assert prefill["metadata"]["annotations"]["sglang.ai/bootstrap-port"] == "9000"
    assert prefill["spec"]["automountServiceAccountToken"] is False and "serviceAccountName" not in prefill["spec"]


def test_pairs_are_wired() -> None:
    """Without discovery the router's workers are the names of the pods, on the ports that these listen on."""
    documents = render({**PAIRS, "router": {"discovery": False}})
    assert not [item for item in documents if item["kind"].startswith("Role")]
    router = one(documents, "Deployment", "prod-sglang-lite-router")
    words = container(router)["args"]
    assert words[0] == "router"
    options = parse_options(words[1:])
    assert options.pd_disaggregation and options.health_check_interval_secs == 5 and not options.service_discovery
    host = "prod-sglang-lite-{0}-{1}.prod-sglang-lite-{0}.llm.svc"
    assert options.prefill == tuple((f"http://{host.format('prefill', i)}:30000", 9000) for i in range(2))
    assert options.decode == tuple(f"http://{host.format('decode', i)}:30000" for i in range(3))
    for role, count in (("prefill", 2), ("decode", 3)):
        workload = one(documents, "StatefulSet", f"prod-sglang-lite-{role}")
        assert workload["spec"]["replicas"] == count
        service = one(documents, "Service", workload["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        ports = {port["name"]: port["containerPort"] for port in container(workload)["ports"]}
        assert ports == ({"http": 30000, "bootstrap": 9000} if role == "prefill" else {"http": 30000})
        words = container(workload)["args"]
        assert words[0] == "serve"
        config = load_config(words[1:])
        assert (config.disaggregation_mode, config.host, config.port) == (role, "0.0.0.0", 30000)
        assert (config.model_path, config.served_model_name) == ("/models/qwen3", "qwen3")
        assert config.enable_metrics and not config.unknown_flags and not config.ignored_flags
        if role == "prefill":
            assert (config.disaggregation_bootstrap_port, config.page_size) == (9000, 16)
    assert not [item for item in documents if item["metadata"]["name"].endswith("-workers")]


def test_time_to_leave_and_probes() -> None:
    documents = render({**PAIRS, "drainSeconds": 200, "preStopSeconds": 7})
    workloads = [item for item in documents if item["kind"] in ("StatefulSet", "Deployment")]
    assert len(workloads) == 3
    for workload in workloads:
        pod, main = workload["spec"]["template"]["spec"], container(workload)
        assert main["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
        assert pod["terminationGracePeriodSeconds"] >= 200 + 7 + 10
        if workload["kind"] == "StatefulSet":
            assert load_config(main["args"][1:]).drain_timeout == 200
            assert main["startupProbe"]["httpGet"]["path"] == "/health_generate"
            assert main["startupProbe"]["periodSeconds"] * main["startupProbe"]["failureThreshold"] >= 1800
            assert {main[name]["httpGet"]["path"] for name in ("readinessProbe", "livenessProbe")} == {"/health"}
        else:
            assert parse_options(main["args"][1:]).shutdown_grace_period_secs == 200
            assert {main[f"{name}Probe"]["httpGet"]["path"] for name in ("readiness", "liveness")} == {"/healthz"}
            assert main["startupProbe"]["httpGet"]["path"] == "/readyz"
            assert main["startupProbe"]["periodSeconds"] * main["startupProbe"]["failureThreshold"] >= 1800
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["enableServiceLinks"] is False
        assert main["securityContext"]["readOnlyRootFilesystem"] is True
        assert {mount["name"] for mount in main["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}


def test_names_that_look_like_numbers_stay_texts() -> None:
    for document in render({**WORKERS, "nameOverride": "123", "router": {"policy": "random"}}, release="7"):
        found = [document["metadata"]]
        if document["kind"] in ("StatefulSet", "Deployment"):
            found.append(document["spec"]["template"]["metadata"])
            assert all(isinstance(word, str) for word in container(document)["args"])
        for head in found:
            assert all(isinstance(value, str) for value in head["labels"].values()), head


def test_resources_and_shared_memory() -> None:
    documents = render(PAIRS)
    prefill = one(documents, "StatefulSet", "prod-sglang-lite-prefill")
    decode = one(documents, "StatefulSet", "prod-sglang-lite-decode")
    assert container(prefill)["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 4}
    assert container(decode)["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1, "rdma/hca": 1}
    assert container(decode)["resources"]["requests"] == {"cpu": "8", "memory": "32Gi"}
    assert container(decode)["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert "add" not in container(prefill)["securityContext"]["capabilities"]
    volumes = {volume["name"]: volume for volume in prefill["spec"]["template"]["spec"]["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "models"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container(prefill)["volumeMounts"]}
    assert mounts["shared-memory"] == "/dev/shm" and mounts["models"] == "/models"
    workers = one(render(WORKERS), "StatefulSet", "prod-sglang-lite-workers")
    assert container(workers)["resources"]["limits"] == {"memory": "64Gi"}
    volumes = {volume["name"]: volume for volume in workers["spec"]["template"]["spec"]["volumes"]}
    assert volumes["cache"] == {"name": "cache", "hostPath": {"path": "/c"}}


def test_keys_are_in_secrets_only() -> None:
    documents = render(PAIRS)
    secret = one(documents, "Secret", "prod-sglang-lite-keys")
    assert secret["stringData"] == {"api-key": "klopstock", "admin-api-key": "more"}
    variables = {
        workload["metadata"]["name"].rpartition("-")[2]: {
            item["name"]: item["valueFrom"]["secretKeyRef"]
            for item in container(workload).get("env", ())
            if "secretKeyRef" in item.get("valueFrom", {})
        }
        for workload in documents
        if workload["kind"] in ("StatefulSet", "Deployment")
    }
    key = {"name": "prod-sglang-lite-keys", "key": "api-key", "optional": False}
    assert {name: found["SGLANG_LITE_API_KEY"] for name, found in variables.items()} == dict.fromkeys(variables, key)
    assert "SGLANG_LITE_ADMIN_API_KEY" in variables["decode"] and "SGLANG_LITE_ADMIN_API_KEY" not in variables["router"]
    for document in documents:
        if document["kind"] != "Secret":
            assert "klopstock" not in yaml.safe_dump(document)
    existing = render({**PAIRS, "auth": {"existingSecret": "mine"}})
    assert not [item for item in existing if item["kind"] == "Secret"]
    server = one(existing, "StatefulSet", "prod-sglang-lite-decode")
    assert container(server)["env"][1]["valueFrom"]["secretKeyRef"] == {
        "name": "mine",
        "key": "api-key",
        "optional": False,
    }
    assert not [item for item in render(WORKERS) if item["kind"] == "Secret"]


def test_budgets_and_monitors_select_what_runs() -> None:
    documents = render(PAIRS)
    pods = [
        item["spec"]["template"]["metadata"]["labels"]
        for item in documents
        if item["kind"] in ("StatefulSet", "Deployment")
    ]
    budgets = [item for item in documents if item["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == 3
    for budget in budgets:
        assert budget["spec"]["maxUnavailable"] == 1
        assert sum(budget["spec"]["selector"]["matchLabels"].items() <= labels.items() for labels in pods) == 1
    services = [item for item in documents if item["kind"] == "Service"]
    monitors = [item for item in documents if item["kind"] == "ServiceMonitor"]
    assert len(monitors) == 3
    for monitor in monitors:
        wanted = monitor["spec"]["selector"]["matchLabels"]
        chosen = [item for item in services if wanted.items() <= item["metadata"]["labels"].items()]
        assert len(chosen) == 1 and monitor["metadata"]["labels"]["release"] == "prometheus"
        endpoint = monitor["spec"]["endpoints"][0]
        assert endpoint["port"] in {port["name"] for port in chosen[0]["spec"]["ports"]}
        job = "sglang-router" if monitor["metadata"]["name"].endswith("-router") else "sglang-server"
        assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": job}]
    rules = one(documents, "PrometheusRule", "prod-sglang-lite")["spec"]
    assert rules == yaml.safe_load((ROOT / "ops/prometheus/rules.yml").read_text())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"path": ""}}, "model.path"),
        ({"workers": {"replicas": 1}}, "either workers, or prefill and decode"),
        ({"decode": {"replicas": 0}}, "need each other"),
        ({"prefill": {"replicas": 0}, "decode": {"replicas": 0}}, "no servers"),
        ({"router": {"replicas": 0}}, "replicas"),
        ({"prefill": {"replicas": 1, "port": 1234}}, "prefill.port and decode.port"),
        ({"prefil": {"replicas": 2}}, "prefil"),
        ({"pool": {"sharedMemory": "lots"}}, "sharedMemory"),
        ({"pool": {"podAnnotations": {"a": 1}}}, "podAnnotations"),
        ({"prefill": {"replicas": 1, "bootstrapPort": 30000}}, "must differ"),
    ],
)
def test_wrong_values_are_refused(change: Document, words: str) -> None:
    with pytest.raises(HelmError, match=words):
        render({**copy.deepcopy(PAIRS), **change})


def test_long_names_leave_room_for_pods() -> None:
    documents = render(PAIRS, release="a" * 53)
    for document in documents:
        assert len(document["metadata"]["name"]) <= 52, document["metadata"]["name"]


def test_the_chart_can_be_packaged(tmp_path: Path) -> None:
    """The rules are a link inside the repository; an archive holds the file."""
    with Chart.load(CHART) as chart:
        archive = chart.save(tmp_path)
    with Chart.load(archive) as packed:
        files = {item["name"]: item["data"] for item in packed.files}
        assert packed.name == "sglang-lite"
    assert files.get("files/rules.yml")
