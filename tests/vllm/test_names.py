"""What KV is named by: all that its bytes depend on, without an engine."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from test_parts import facts  # noqa: E402

from forebay.vllm.connector import namespace  # noqa: E402
from forebay.vllm.connector.config import Shape  # noqa: E402
from forebay.vllm.connector.weights import digest_of_weights  # noqa: E402


def test_engines_that_differ_in_anything_have_other_namespaces() -> None:
    keys = {
        facts(**different).namespaces(salt, shape)[0]
        for different, salt, shape in [
            ({}, None, Shape(1, 16)),
            ({}, "a", Shape(1, 16)),
            ({}, "b", Shape(1, 16)),
            ({}, None, Shape(1, 32)),
            ({}, None, Shape(2, 16)),
            ({"salt": b"s"}, None, Shape(1, 16)),
            ({"weights": bytes(31) + b"1"}, None, Shape(1, 16)),
            ({"dtype": "float16"}, None, Shape(1, 16)),
            ({"attention": {"head": "128"}}, None, Shape(1, 16)),
        ]
    }
    keys |= {facts().namespaces(None, Shape(1, 16), adapter)[0] for adapter in (bytes(32), b"1" * 32)}
    assert len(keys) == 11
    assert len(set(facts().namespaces(None, Shape(4, 16)))) == 4, "each rank has its own"


def test_lengths_are_said_but_for_those_that_vllm_found_to_fit() -> None:
    said = [
        namespace.longest_of(SimpleNamespace(max_model_len=longest, original_max_model_len=asked))
        for longest, asked in ((4096, None), (4096, 4096), (8192, 8192), (4096, -1), (8192, -1))
    ]
    assert said == ["4096", "4096", "8192", "fitted", "fitted"]


def test_tenants_find_their_own_alone() -> None:
    assert namespace.of_tenant(0) == b"", "names without tenants stay as they are"
    assert len({namespace.of_tenant(tenant) for tenant in range(3)}) == 3


def test_weights_are_those_of_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def downloaded(model: str, revision: str | None, local_files_only: bool) -> str:
        assert (model, local_files_only) == ("org/model", True)
        return str(tmp_path / (revision or "main"))

    monkeypatch.setattr(hub, "snapshot_download", downloaded)
    for revision in ("main", "step"):
        (tmp_path / revision).mkdir()
        (tmp_path / revision / "model.safetensors").write_text(revision)
    found = [digest_of_weights("org/model", revision, "auto", "{}", 0) for revision in (None, "main", "step")]
    assert found[0] == found[1] != found[2]


def test_layers_that_are_kept_out_of_fp8_are_said() -> None:
    said = [
        namespace.unquantized_of(SimpleNamespace(kv_cache_dtype_skip_layers=layers))
        for layers in ([], ["0"], ["1"], ["sliding_window", "1"], ["1", "sliding_window"])
    ]
    assert said[0] == {} == namespace.unquantized_of(SimpleNamespace())
    assert len({str(one) for one in said}) == 4 and said[3] == said[4]


def test_stages_that_have_other_layers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: 4)
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    said = [namespace.stages_of(model, 3)]
    for partition in ("2,1,1", "1,1,2"):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        said.append(namespace.stages_of(model, 3))
    assert said[0] == {"stages": "[(0, 1), (1, 3), (3, 4)]"}
    assert len({str(one) for one in said}) == 3 and namespace.stages_of(model, 1) == {}
