"""What is taken for the same adapter, without an engine."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="SKIPPED: no vLLM here: `make test-vllm`")

from vllm.lora.request import LoRARequest  # noqa: E402

from forebay.vllm.connector import compat  # noqa: E402
from forebay.vllm.connector.adapters import Adapter, Adapters  # noqa: E402

pytestmark = pytest.mark.smoke

TIMEOUT_S = 60.0


@pytest.fixture
def adapters() -> Iterator[Adapters]:
    made = Adapters(SimpleNamespace(lora_dtype="bfloat16", max_loras=1))
    yield made
    made.close()


def write(folder: Path, weights: bytes, config: str = "{}", name: str = "adapter_model.safetensors") -> Path:
    """An adapter's files, new ones."""
    folder.mkdir(exist_ok=True)
    for file, content in ((name, weights), ("adapter_config.json", config.encode())):
        (folder / "new").write_bytes(content)
        (folder / "new").replace(folder / file)
    return folder


def find(adapters: Adapters, folder: Path | str, name: str = "a", number: int = 1, **more: Any) -> Any:
    """What is found for a request, which vLLM makes."""
    asked = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(folder), **more)
    return adapters.find(asked).result(TIMEOUT_S)


def test_an_adapter_is_its_weights_and_its_configuration(adapters: Adapters, tmp_path: Path) -> None:
    end = bytes(3 << 20)  # Adapters may differ at a single place.
    found = [
        find(adapters, write(tmp_path / str(number), weights, config), str(number), 1 + number)
        for number, (weights, config) in enumerate(
            [(end, "{}"), (end, "{}"), (end[:-1] + b"1", "{}"), (b"1" + end[1:], "{}"), (end, '{"r": 8}')]
        )
    ]
    assert found[0] == found[1] and len({one.digest for one in found}) == 4
    other = Adapters(SimpleNamespace(lora_dtype="float32", max_loras=1))
    assert find(other, tmp_path / "0").digest not in {one.digest for one in found}
    wider = Adapters(SimpleNamespace(lora_dtype="bfloat16", max_loras=7))
    assert find(wider, tmp_path / "0") == found[0], "how many there may be changes no KV"
    assert find(wider, tmp_path / "0", number=2, is_3d_lora_weight=True).digest != found[0].digest


def test_files_are_read_again_when_they_have_changed_and_only_then(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "a", b"one")
    first = find(adapters, folder)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: pytest.fail("it was read again"))
        assert find(adapters, folder) == first
    write(folder, b"two")
    second = find(adapters, folder, "b", 2)
    assert second.digest != first.digest


def test_a_number_that_has_stood_for_two_contents_is_left_alone_from_then_on(
    adapters: Adapters, tmp_path: Path
) -> None:
    one, two = write(tmp_path / "one", b"one"), write(tmp_path / "two", b"two")
    assert isinstance(find(adapters, one, "one", 1), Adapter)
    assert find(adapters, two, "two", 1) is None
    assert find(adapters, one, "one", 1) is None, "vLLM may have the other one"
    assert not find(adapters, one, "one", 2).renamed


def test_a_name_that_has_stood_for_two_contents_is_renamed_from_then_on(
    adapters: Adapters, tmp_path: Path
) -> None:
    one, two = write(tmp_path / "one", b"one"), write(tmp_path / "two", b"two")
    assert not find(adapters, one, "name", 1).renamed
    assert find(adapters, two, "name", 2).renamed
    assert find(adapters, one, "name", 1).renamed, "vLLM's own cache may have KV of the other one"
    assert not find(adapters, one, "another", 3).renamed


def test_an_adapter_whose_files_change_between_its_loading_and_its_first_prompt_is_left_alone(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.core import EngineCore

    monkeypatch.setattr(EngineCore, "add_lora", lambda self, lora_request: True)
    compat.when_adapters_load(adapters.look)
    try:
        for number, changes in ((1, False), (2, True)):
            folder = write(tmp_path / str(number), b"one")
            asked = LoRARequest(lora_name=str(number), lora_int_id=number, lora_path=str(folder))
            assert EngineCore.add_lora(object.__new__(EngineCore), asked)
            if changes:
                write(folder, b"two")
            assert (find(adapters, folder, str(number), number) is None) == changes
    finally:
        compat.not_when_adapters_load(adapters.look)


def test_what_cannot_be_told_is_left_alone(adapters: Adapters, tmp_path: Path) -> None:
    good = write(tmp_path / "good", b"one")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "adapter_config.json").write_text("{}")
    bare = write(tmp_path / "bare", b"one")
    (bare / "adapter_config.json").unlink()
    wrong = [empty, bare, tmp_path / "nothing", "somebody/some-adapter", "\0"]
    for number, path in enumerate(wrong):
        assert find(adapters, path, f"w{number}", 10 + number) is None, path
    assert find(adapters, good, "x", 20, load_inplace=True) is None
    if hasattr(LoRARequest, "tensorizer_config_dict"):
        assert find(adapters, good, "y", 21, tensorizer_config_dict={"a": 1}) is None
    assert find(adapters, good, "z", 22) is not None


def test_files_that_change_while_they_are_read_are_no_adapter(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = write(tmp_path / "a", b"one"), Path.open

    def changing(path: Path, *mode: Any) -> Any:
        file = opened(path, *mode)
        if path.name.endswith(".safetensors"):
            monkeypatch.undo()
            write(folder, b"two")
        return file

    monkeypatch.setattr(Path, "open", changing)
    assert find(adapters, folder) is None
