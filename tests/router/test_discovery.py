"""Workers that are found in a Kubernetes cluster, by a scripted API server behind TLS (C932 and around it)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from sglang_lite.router import kubernetes_api
from sglang_lite.router.app import make_app
from sglang_lite.router.context import RouterContext
from sglang_lite.router.discovery import Pool, follow
from sglang_lite.router.kubernetes_api import ApiError, ClusterAccess, KubernetesApi
from sglang_lite.router.kubernetes_objects import Found, resource_path, workers_of
from sglang_lite.router.options import RouterOptions, checked, parse_options
from sglang_lite.types import StartupError
from tests.support.cluster_api import ClusterApi, pod
from tests.support.null_workers import NullWorker
from tests.unit.server.test_security import make_certificate

CLUSTER: dict[str, Any] = {"service_discovery": True, "selector": ("app=x",), "service_discovery_port": 8000}


@asynccontextmanager
async def serving(api: ClusterApi, folder: Path) -> AsyncIterator[ClusterAccess]:
    """The API server behind TLS, with the files of a service account in ``folder``."""
    certificate, key = make_certificate(folder, "api")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    (folder / "token").write_text(api.token + "\n")
    (folder / "ca.crt").write_bytes(certificate.read_bytes())
    await api.server.start_server(ssl=context)
    try:
        yield ClusterAccess(str(api.server.make_url("/")).rstrip("/"), folder / "token", folder / "ca.crt")
    finally:
        api.break_watches()
        await api.server.close()


@asynccontextmanager
async def following(
    api: ClusterApi, folder: Path, role: str = "regular", **options: Any
) -> AsyncIterator[RouterContext]:
    context = RouterContext(checked(RouterOptions(**{**CLUSTER, "worker_startup_check_interval": 60.0, **options})))
    context.session = aiohttp.ClientSession()
    async with serving(api, folder) as access, KubernetesApi(access) as client:
        task = asyncio.create_task(follow(client, Pool(context, "app=x", role), first_wait=0.01))
        try:
            yield context
        finally:
            for running in (task, *context.tasks.values()):
                running.cancel()
            await asyncio.gather(task, *context.tasks.values(), return_exceptions=True)
            await context.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)


def hosts(context: RouterContext) -> set[str]:
    return {worker.host for worker in context.registry.workers.values()}


async def test_pods_come_change_and_go(tmp_path: Path) -> None:
    api = ClusterApi()
    api.put(pod("a", "10.0.0.1"), pod("b", "10.0.0.2", ready=False), pod("c", "10.0.0.3", deletionTimestamp="now"))
    async with following(api, tmp_path) as context:
        await until(lambda: hosts(context) == {"10.0.0.1"})
        assert set(context.registry.workers) == {"http://10.0.0.1:8000"}
        assert set(context.tasks) == set(context.registry.workers)
        api.put(pod("b", "10.0.0.2"))
        await until(lambda: hosts(context) == {"10.0.0.1", "10.0.0.2"})
        api.put(pod("a", "10.0.0.1", ready=False))
        await until(lambda: hosts(context) == {"10.0.0.2"})
        api.put(pod("a", "10.0.0.9"))
        await until(lambda: hosts(context) == {"10.0.0.2", "10.0.0.9"})
        api.put(pod("b", "10.0.0.2", deletionTimestamp="now"))
        await until(lambda: hosts(context) == {"10.0.0.9"})
        api.delete("a")
        await until(lambda: not hosts(context))
        assert context.tasks == {}
        assert api.count("list") == 1
        assert all(query["labelSelector"] == "app=x" for _, query in api.calls)


async def test_a_broken_watch_goes_on_where_it_was(tmp_path: Path) -> None:
    api = ClusterApi()
    api.put(pod("a", "10.0.0.1"))
    async with following(api, tmp_path) as context:
        await until(lambda: bool(hosts(context)) and api.watching.is_set())
        worker = next(iter(context.registry.workers.values()))
        api.break_watches()
        await until(lambda: not api.watching.is_set())
        api.put(pod("b", "10.0.0.2"))
        await until(lambda: hosts(context) == {"10.0.0.1", "10.0.0.2"})
        assert api.count("list") == 1 and api.count("watch") >= 2
        assert context.registry.workers[worker.url] is worker


async def test_a_version_that_is_too_old_leads_to_a_new_list(tmp_path: Path) -> None:
    """Both forms of 410 Gone; what has gone meanwhile is gone, what is still there stays the same worker."""
    api = ClusterApi()
    api.put(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
    async with following(api, tmp_path) as context:
        await until(lambda: len(hosts(context)) == 2 and api.watching.is_set())
        kept = context.registry.workers["http://10.0.0.1:8000"]
        api.break_watches()
        await until(lambda: not api.watching.is_set())
        api.delete("b")
        api.put(pod("c", "10.0.0.3"))
        api.forget()
        await until(lambda: hosts(context) == {"10.0.0.1", "10.0.0.3"})
        assert context.registry.workers[kept.url] is kept
        lists = api.count("list")
        assert lists >= 2
        await until(lambda: api.watching.is_set())
        api.refused.append(410)
        api.break_watches()
        await until(lambda: api.count("list") > lists)


async def test_an_api_server_that_is_away_takes_no_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    api = ClusterApi()
    api.put(pod("a", "10.0.0.1"))
    async with following(api, tmp_path) as context:
        await until(lambda: bool(hosts(context)) and api.watching.is_set())
        api.refused += [500, 503, 403, 500]
        api.break_watches()
        await until(lambda: not api.refused)
        assert hosts(context) == {"10.0.0.1"}
        await until(lambda: api.watching.is_set())
        api.put(pod("b", "10.0.0.2"))
        await until(lambda: len(hosts(context)) == 2)
        assert "not now" in caplog.text


@pytest.mark.parametrize(
    "line", [b"nonsense", b'{"type": 3}', b"[]", b'{"type":"ADDED","object":[]}', b'{"object":' + b"[" * 20_000]
)
async def test_events_without_sense_lead_to_a_new_list(tmp_path: Path, line: bytes) -> None:
    api = ClusterApi()
    api.put(pod("a", "10.0.0.1"))
    async with following(api, tmp_path) as context:
        await until(lambda: bool(hosts(context)) and api.watching.is_set())
        api.send(line)
        await until(lambda: api.count("list") == 2)
        api.put(pod("b", "10.0.0.2"))
        await until(lambda: len(hosts(context)) == 2)


async def test_bookmarks_and_unknown_kinds_change_nothing(tmp_path: Path) -> None:
    api = ClusterApi()
    api.put(pod("a", "10.0.0.1"))
    async with following(api, tmp_path) as context:
        await until(lambda: api.watching.is_set())
        api.send(b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"77"}}}')
        api.put(pod("b", "10.0.0.2"))
        await until(lambda: len(hosts(context)) == 2)
        assert api.count("list") == 1


async def test_long_lists_come_in_pages_and_the_token_is_read_anew(tmp_path: Path) -> None:
    api = ClusterApi()
    api.page = 3
    api.put(*(pod(f"p{number}", f"10.0.0.{number}") for number in range(8)))
    async with following(api, tmp_path) as context:
        await until(lambda: len(hosts(context)) == 8 and api.watching.is_set())
        assert api.count("list") == 3
        api.token = "renewed"
        api.break_watches()
        await until(lambda: not api.watching.is_set())
        (tmp_path / "token").write_text("renewed")
        await until(lambda: api.watching.is_set())


async def test_a_pool_has_its_role_and_ports(tmp_path: Path) -> None:
    api = ClusterApi()
    api.put(pod("a", "10.0.0.1", port=9000), pod("b", "fd00::1"))
    options = {"selector": (), "prefill_selector": ("r=p",), "decode_selector": ("r=d",)}
    async with following(api, tmp_path, "prefill", **options) as context:
        await until(lambda: len(hosts(context)) == 2)
        assert context.options.is_paired
        first, second = (context.registry.workers[f"http://{name}:8000"] for name in ("10.0.0.1", "[fd00::1]"))
        assert (first.role, first.bootstrap_port, second.bootstrap_port) == ("prefill", 9000, None)


async def test_workers_that_somebody_else_named_are_left_alone(tmp_path: Path) -> None:
    api = ClusterApi()
    api.put(pod("a", "10.0.0.1"))
    async with following(api, tmp_path, worker_urls=("http://10.0.0.1:8000",)) as context:
        await until(lambda: api.watching.is_set())
        api.delete("a")
        api.put(pod("b", "10.0.0.2"))
        await until(lambda: "10.0.0.2" in hosts(context))
        assert "10.0.0.1" in hosts(context)


async def test_workers_that_another_process_found_are_taken_over(tmp_path: Path) -> None:
    """A process of ``--workers N`` that was started again has the workers of the others, labels and all."""
    api = ClusterApi()
    api.put(pod("a", "10.0.0.1"))
    async with serving(api, tmp_path) as access, KubernetesApi(access) as client:
        context = RouterContext(checked(RouterOptions(**CLUSTER)))
        context.session = aiohttp.ClientSession()
        for host in ("10.0.0.1", "10.0.0.2"):
            context.registry.add(f"http://{host}:8000").labels = {"source": "kubernetes app=x"}
        kept = context.registry.workers["http://10.0.0.1:8000"]
        task = asyncio.create_task(follow(client, Pool(context, "app=x", "regular"), first_wait=0.01))
        await until(lambda: hosts(context) == {"10.0.0.1"})
        assert context.registry.workers[kept.url] is kept
        api.delete("a")
        await until(lambda: not hosts(context))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await context.close()


async def test_a_worker_that_cannot_be_used_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    api = ClusterApi()
    api.put(pod("a", "not an address"))
    async with following(api, tmp_path) as context:
        for number in range(3):
            api.put(pod(f"p{number}", f"10.0.0.{number}"))
            await until(lambda number=number: len(hosts(context)) == number + 1)  # type: ignore[misc]
    assert caplog.text.count("cannot be used") == 1


@pytest.mark.parametrize("port", ["\u00b2", "\u0663", "9" * 5000, "-1", "0", "65536", "90 00", ""])
def test_a_note_of_an_operator_does_not_end_the_discovery(port: str) -> None:
    value = pod("a", "10.0.0.1")
    value["metadata"]["annotations"] = {"sglang.ai/bootstrap-port": port}
    assert workers_of("pods", value, "http", 8000) == [Found("http://10.0.0.1:8000", None)]


@pytest.mark.parametrize("odd", [3, "x", {}, {"0": 1}, [[]], [{"type": {}}], True])
@pytest.mark.parametrize("resource", ["pods", "endpointslices"])
def test_objects_of_other_shapes_are_no_workers(resource: str, odd: Any) -> None:
    for value in (
        {"metadata": odd, "status": {"conditions": odd, "phase": "Running", "podIP": "10.0.0.1"}},
        {"metadata": {"annotations": odd}, "ports": odd, "endpoints": odd},
        {"ports": [{"port": 1}], "endpoints": [{"addresses": odd, "conditions": odd}]},
        {"status": odd, "endpoints": [{"addresses": ["10.0.0.1"]}], "ports": [{"port": odd, "protocol": odd}]},
    ):
        assert workers_of(resource, value, "http", None) == []


async def test_a_list_without_end_and_a_token_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_api, "_MOST_OBJECTS", 5)
    api = ClusterApi()
    api.page = 2
    api.put(*(pod(f"p{number}", f"10.0.0.{number}") for number in range(8)))
    async with serving(api, tmp_path) as access, KubernetesApi(access) as client:
        with pytest.raises(ApiError, match="more than 5 objects"):
            await client.list("/api/v1/pods", "app=x")
        assert api.count("list") == 3
        for token in (b"\xff\xfe", b"two\nlines", b"a\0b"):
            (tmp_path / "token").write_bytes(token)
            with pytest.raises(ApiError, match="no token"):
                await client.list("/api/v1/pods", "app=x")


def test_endpoint_slices() -> None:
    value = {
        "metadata": {"name": "s", "annotations": {"sglang.ai/bootstrap-port": "9001"}},
        "addressType": "IPv4",
        "ports": [{"port": 53, "protocol": "UDP"}, {"port": 30000}],
        "endpoints": [
            {"addresses": ["10.0.0.1"], "conditions": {"ready": True}},
            {"addresses": ["10.0.0.2"], "conditions": {}},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": False, "serving": True, "terminating": True}},
            {"addresses": ["10.0.0.4"], "conditions": {"ready": True, "terminating": True}},
            {"addresses": []},
            "odd",
        ],
    }
    expected = [Found(f"http://10.0.0.{number}:30000", 9001) for number in (1, 2)]
    assert workers_of("endpointslices", value, "http", None) == expected
    assert [found.url for found in workers_of("endpointslices", value, "grpc", 7)] == [
        "grpc://10.0.0.1:7",
        "grpc://10.0.0.2:7",
    ]
    assert workers_of("endpointslices", {**value, "addressType": "FQDN"}, "http", None) == []
    assert workers_of("endpointslices", {**value, "ports": None}, "http", None) == []
    assert resource_path("endpointslices", "n") == "/apis/discovery.k8s.io/v1/namespaces/n/endpointslices"
    assert resource_path("pods", None) == "/api/v1/pods"


@pytest.mark.parametrize(
    "status",
    [{"phase": "Pending"}, {"podIP": None}, {"podIP": ""}, {"conditions": None}, {"conditions": ["x"]}],
)
def test_pods_that_cannot_serve(status: dict[str, Any]) -> None:
    value = pod("a", "10.0.0.1")
    assert [found.url for found in workers_of("pods", value, "http", None)] == ["http://10.0.0.1:80"]
    value["status"] |= status
    assert workers_of("pods", value, "http", None) == []
    assert workers_of("pods", {"metadata": None, "status": "odd"}, "http", None) == []


async def test_the_router_finds_a_worker_and_sends_it_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: the account's files, EndpointSlices of a namespace, registration, a request, the end."""
    worker, api = NullWorker(), ClusterApi(path="/apis/discovery.k8s.io/v1/namespaces/n/endpointslices")
    await worker.server.start_server()
    slice_ = {
        "metadata": {"name": "s"},
        "ports": [{"port": worker.server.port}],
        "endpoints": [{"addresses": ["127.0.0.1"], "conditions": {"ready": True}}],
    }
    api.put(slice_)
    words = ["--service-discovery", "--selector", "app=x", "role=y", "--service-discovery-namespace", "n"]
    options = parse_options([*words, "--service-discovery-resource", "endpointslices"])
    async with AsyncExitStack() as stack:
        stack.push_async_callback(worker.server.close)
        access = await stack.enter_async_context(serving(api, tmp_path))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", access.url.rpartition(":")[2])
        monkeypatch.setattr(kubernetes_api, "ACCOUNT", tmp_path)
        context = RouterContext(options)
        router = TestServer(make_app(context))
        await router.start_server()
        stack.push_async_callback(router.close)
        await until(lambda: bool(context.registry.registered()))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.post(router.make_url("/generate"), json={"text": "A"}) as response:
            assert (response.status, (await response.json())["worker"]) == (200, worker.url)
        assert api.calls[0][1]["labelSelector"] == "app=x,role=y"
        api.delete("s")
        await until(lambda: not context.registry.workers)


def test_a_start_outside_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="KUBERNETES_SERVICE_HOST"):
        ClusterAccess.in_cluster({})
    with pytest.raises(StartupError, match="token"):
        ClusterAccess.in_cluster({"KUBERNETES_SERVICE_HOST": "h"}, tmp_path)
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x")
    assert ClusterAccess.in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path).url == "https://[fd00::1]:443"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--service-discovery"], "--selector"),
        (["--selector", "a=b"], "--service-discovery"),
        (["--service-discovery-namespace", "n"], "--service-discovery only"),
        (["--service-discovery", "--selector", "a=b", "--prefill-selector", "c=d"], "selector"),
        (["--service-discovery", "--prefill-selector", "c=d"], "decode-selector"),
        (["--service-discovery", "--prefill-selector", "c=d", "e=f", "--decode-selector", "e=f", "c=d"], "differ"),
        (["--service-discovery", "--selector", "a in (b,c)"], "label=value"),
        (["--service-discovery", "--selector", "a!=b"], "label=value"),
        (["--service-discovery", "--selector", "a"], "label=value"),
        (["--service-discovery", "--selector", "a=b", "--service-discovery-port", "0"], "service-discovery-port"),
    ],
)
def test_selectors_that_do_not_go_together(words: list[str], named: str) -> None:
    """C932."""
    with pytest.raises(StartupError, match=named):
        parse_options(words)


def test_options_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(
        "discovery: {backend: k8s, prefill_selector: 'a=b,c==d', decode_selector: [e=f], namespace: n, port: 7}"
    )
    options = parse_options(["--config", str(file)])
    assert options.service_discovery and options.is_paired
    assert (options.prefill_selector, options.decode_selector) == (("a=b,c==d",), ("e=f",))
    assert (options.service_discovery_namespace, options.service_discovery_port) == ("n", 7)
