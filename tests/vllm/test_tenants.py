"""Requests that name a tenant: by their salt, or by a hint. Its KV is that tenant's alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import CHUNK, Daemon, Engine, arguments, prompt, transfer
from processes import until

pytest.importorskip("vllm")

from test_parts import facts  # noqa: E402
from test_reset import a_request  # noqa: E402

from forebay.errors import InvalidError  # noqa: E402
from forebay.vllm.connector.config import settings_of  # noqa: E402
from forebay.vllm.connector.hints import Hints, read  # noqa: E402
from forebay.vllm.connector.load_or_compute import CostModel  # noqa: E402
from forebay.vllm.connector.stats import Counts, PromMetrics, Stats, tenant_tokens  # noqa: E402
from forebay.vllm.connector.tenants import Tenants  # noqa: E402

ACME, OTHER = 3, 4
TENANTS = {"acme": ACME, "other": OTHER}


def named(tenant: Any) -> dict[str, Any]:
    """A hint that a request is for this tenant."""
    payload = {"tenant": tenant}
    action = {"action_id": "a", "action_type": "kv.tenant", "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


def hints_of(obeyed: str) -> Hints:
    node: Any = SimpleNamespace()
    return Hints(node, facts(), Counts(), obeyed, Tenants(0, TENANTS), CostModel(facts(), None))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("salt", "hint", "tenant"),
    [
        (None, None, None),
        ("whatever", None, None),
        ("acme", None, ACME),
        ("acme:session 7", None, ACME),
        ("acmeX", None, None),
        ("other:", "acme", ACME),
        ("", None, None),
        ("own:1", None, None),
    ],
)
def test_a_salt_names_a_tenant_up_to_its_colon_and_a_hint_goes_before_it(
    salt: str | None, hint: str | None, tenant: int | None
) -> None:
    assert Tenants(7, TENANTS | {"own": 7}).of(salt, hint) == tenant


@pytest.mark.smoke
def test_a_hint_that_names_nobody_has_its_request_left_alone_and_says_so() -> None:
    hints = hints_of("any")
    request = a_request("one", 100)
    request.kv_transfer_params = {"kv_hint": named("nobody")}
    hints.added(request)
    with pytest.raises(InvalidError, match="tenant is 'nobody'; allowed are the names in tenants of"):
        hints.tenant(request)
    (answer,) = hints.finished("one")
    assert answer["verdict"] == "rejected" and "'nobody'" in answer["reason"]


@pytest.mark.smoke
def test_a_client_that_may_send_no_hints_cannot_name_a_tenant_by_one() -> None:
    hints = hints_of("typed")
    request = a_request("one", 100)
    request.cache_salt, request.kv_transfer_params = "other:1", {"kv_hint": named("acme")}
    hints.added(request)
    assert hints.tenant(request) == OTHER


@pytest.mark.smoke
@pytest.mark.parametrize("name", [None, "", 3, ["acme"]])
def test_a_tenant_that_is_no_name_is_refused_and_so_is_a_second_one(name: Any) -> None:
    (answer,) = read(named(name)).answers
    assert answer["reason"].endswith("allowed is a name")
    twice = named("acme")
    twice["actions"] *= 2
    assert [one["verdict"] for one in read(twice).answers] == ["accepted", "rejected"]


@pytest.mark.smoke
@pytest.mark.parametrize("wrong", [3, ["acme"], {"acme": -1}, {"acme": 0xFFFF}, {"acme": "3"}, {"": 3}])
def test_tenants_that_are_no_names_and_numbers_are_refused_with_what_is_allowed(wrong: Any) -> None:
    with pytest.raises(InvalidError, match="kv_connector_extra_config: tenants.*allowed is"):
        settings_of({"tenants": wrong})


@pytest.mark.smoke
def test_a_tenant_has_the_same_names_in_an_engine_of_its_own() -> None:
    shared, own = facts(), facts(tenant=ACME)
    assert shared.namespaces("s", shared.shape, tenant=ACME) == own.namespaces("s", own.shape)
    assert shared.namespaces("s", shared.shape, tenant=ACME) != shared.namespaces("s", shared.shape)


@pytest.mark.smoke
def test_tokens_of_a_tenant_are_counted_by_tenant_and_tier() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    counts, registry = Counts(), CollectorRegistry()
    counts.add("tokens_disk", 5)
    counts.add(tenant_tokens(ACME, "disk"), 3)
    taken = counts.take()
    assert isinstance(taken, Stats) and taken.reduce() == {"tokens_disk": 5}

    def kind(of: Any) -> Any:
        return lambda **more: of(registry=registry, **more)

    types = {Counter: kind(Counter), Gauge: kind(Gauge), Histogram: kind(Histogram)}
    metrics = PromMetrics(
        SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], {0: ["m", "0"]}
    )
    metrics.observe(taken.data)
    labels = {"model_name": "m", "engine": "0", "tenant": "3", "tier": "disk"}
    assert registry.get_sample_value("vllm:forebay_tenant_tokens_total", labels) == 3.0


def test_one_engine_keeps_the_kv_of_each_requests_tenant_apart_and_within_its_quota(
    model: Path, tmp_path: Path
) -> None:
    quota = f"[tenants]\n[[tenants.quotas]]\ntenant = {OTHER}\nmemory = '128KiB'"
    node, tokens = Daemon(tmp_path / "node", more=quota), prompt(91, 4 * CHUNK + 5)
    more = {"kv_hints": "any", "tenants": TENANTS}
    with node, Engine(arguments(model, transfer(node.socket, **more)), tmp_path / "log") as engine:

        def ask(salt: str | None = None, hint: dict[str, Any] | None = None) -> Any:
            params = {"kv_hint": hint} if hint else None
            (said,) = engine.generate(prompts=[tokens], tokens=2, params=params, salt=salt)
            engine.settle()
            engine.forget()
            return said

        def used(tenant: int) -> float:
            return node.metric(f'forebay_tenant_used_bytes{{tier="memory",tenant="{tenant}"')

        plain = ask()
        until(lambda: used(0) > 0)
        assert used(ACME) == 0 and ask()["cached"] == 4 * CHUNK
        first = ask("acme:1")
        assert first["cached"] == 0 and first["tokens"] == plain["tokens"]
        until(lambda: used(ACME) == used(0))
        assert ask("acme:1")["cached"] == 4 * CHUNK
        assert ask("acme:1", named("other"))["cached"] == 0, "the hint goes before the salt"
        assert used(OTHER) <= 128 << 10
        forget = {"action_id": "f", "action_type": "kv.forget", "action_version": "1.0", "payload": {}}
        ask("acme:1", {"actions": [forget]})
        until(lambda: used(ACME) == 0)
        assert ask()["cached"] == 4 * CHUNK, "nobody else's is forgotten"
