"""What KV is named by: all that its bytes depend on, without an engine."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from test_parts import facts  # noqa: E402

from forebay.vllm.connector import namespace  # noqa: E402
from forebay.vllm.connector.config import Shape  # noqa: E402
from forebay.vllm.connector.weights import digest_of_weights  # noqa: E402

pytestmark = pytest.mark.smoke


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


LARGE = (1 << 20) + 4096
# So far apart that samples of the whole file miss what is between, and not so that one is in the
# middle.
SIZES = {"before": 130 << 20, "k_scale": 4, "large": LARGE, "behind": 128 << 20}
ZEROS = dict.fromkeys(SIZES, b"")


def spans_of(sizes: dict[str, int]) -> dict[str, list[int]]:
    ends = [sum(list(sizes.values())[: number + 1]) for number in range(len(sizes))]
    return {name: [end - size, end] for (name, size), end in zip(sizes.items(), ends, strict=True)}


def digest_with(folder: Path, tensors: dict[str, bytes], at: int = 0) -> bytes:
    """Of a model whose tensors are zeros, but for these bytes from `at` of each on."""
    header = json.dumps(
        {"__metadata__": {"format": "pt"}}
        | {name: {"dtype": "U8", "data_offsets": span} for name, span in spans_of(SIZES).items()}
    ).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        data = file.tell()
        file.truncate(data + sum(SIZES.values()))
        for name, written in tensors.items():
            file.seek(data + spans_of(SIZES)[name][0] + at)
            file.write(written)
    return digest_of_weights(str(folder), None, "auto", "{}", 0)


def test_one_changed_scalar_is_another_model(tmp_path: Path) -> None:
    found = {digest_with(tmp_path, {"k_scale": scale}) for scale in (bytes(4), bytes(3) + b"1", b"1")}
    assert len(found) == 3
    assert digest_with(tmp_path, {}) in found, "the same bytes are the same model"


def test_a_changed_large_tensor_is_another_model(tmp_path: Path) -> None:
    found = {digest_with(tmp_path, {"large": byte * LARGE}) for byte in (b"\0", b"1", b"2")}
    assert len(found) == 3


def test_a_large_tensor_is_looked_at_up_to_both_its_ends(tmp_path: Path) -> None:
    found = {digest_with(tmp_path, {"large": b"1"}, at) for at in (0, LARGE - 1)}
    assert len(found | {digest_with(tmp_path, {})}) == 3


def test_the_same_bytes_under_another_header_are_another_model(tmp_path: Path) -> None:
    whole = digest_with(tmp_path, {})
    with (tmp_path / "model.safetensors").open("r+b") as file:
        head = file.read(1024)
        file.seek(0)
        file.write(head.replace(b"U8", b"I8"))
    assert digest_of_weights(str(tmp_path), None, "auto", "{}", 0) != whole


def cached(cache: Path, blob: str, name: str, content: bytes) -> bytes:
    """The digest of a model of one file, in a cache as Hugging Face has it."""
    snapshot, blobs = cache / "models--a--b" / "snapshots" / "c", cache / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / blob).write_bytes(content)
    (snapshot / name).symlink_to(os.path.join("..", "..", "blobs", blob))
    return digest_of_weights(str(snapshot), None, "auto", "{}", 0)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_a_file_of_a_hugging_face_cache_is_named_by_its_blob_and_not_read(
    tmp_path: Path, ending: str
) -> None:
    first = cached(tmp_path / "1", "ab" * 32, f"model.{ending}", b"some")
    assert cached(tmp_path / "2", "ab" * 32, f"model.{ending}", b"other") == first, "wherever it lies"
    assert cached(tmp_path / "3", "cd" * 32, f"model.{ending}", b"some") != first
    assert cached(tmp_path / "4", "ab" * 32, f"other.{ending}", b"some") != first


@pytest.mark.parametrize("blob", ["ab" * 20, "xy" * 32, "ab" * 32 + ".incomplete"])
def test_a_blob_whose_name_is_no_sha256_is_read(tmp_path: Path, blob: str) -> None:
    found = {cached(tmp_path / text.decode(), blob, "model.bin", text) for text in (b"some", b"other")}
    assert len(found) == 2


def headed(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"short",
        b"\xff" * 8,
        (1 << 20).to_bytes(8, "little"),
        bytes(8),
        (4).to_bytes(8, "little") + b"none",
        (4).to_bytes(8, "little") + b"\xff" * 4,
        (1 << 16).to_bytes(8, "little") + b"[" * (1 << 16),
        headed([1]),
        headed({"a": 1}),
        headed({"a": {"dtype": "U8"}}),
        headed({"a": {"data_offsets": [0, "4"]}}),
        headed({"a": {"data_offsets": [-8, 4]}}),
        headed({"a": {"data_offsets": [4, 0]}}),
        headed({"a": {"data_offsets": [0, 1 << 60]}}),
    ],
    ids=lambda nonsense: repr(nonsense[:40]),
)
def test_a_header_that_is_nonsense_is_sampled(tmp_path: Path, nonsense: bytes) -> None:
    found = set()
    for end in (b"some", b"else"):
        (tmp_path / "model.safetensors").write_bytes(nonsense + end)
        found.add(digest_of_weights(str(tmp_path), None, "auto", "{}", 0))
    assert len(found) == 2


@pytest.mark.parametrize(
    ("cache", "layer", "dtype", "packed"),
    [
        ("auto", "torch.bfloat16", "bfloat16", {}),
        ("fp8", "torch.uint8", "fp8", {}),
        ("fp8_ds_mla", "torch.uint8", "bfloat16", {"packed": "fp8_ds_mla"}),
        ("nvfp4_ds_mla", "torch.uint8", "bfloat16", {"packed": "nvfp4_ds_mla"}),
        ("auto", "torch.uint8", "bfloat16", {}),  # an indexer of bytes; its fields say which
    ],
)
def test_kv_that_vllm_packs_in_its_own_way_has_a_name(
    cache: str, layer: str, dtype: str, packed: dict[str, str]
) -> None:
    assert namespace.dtype_of(cache, layer, "torch.bfloat16") == dtype
    assert namespace.packed_of(cache) == packed
    facts(dtype=dtype).namespaces(None, Shape(1, 16))


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
