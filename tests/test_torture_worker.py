"""The loop that torture workers of other projects' stores share speaks the protocol of docs/torture.md."""

import json
import struct
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "bench/peers/torture"
DOCUMENTED = (ROOT / "docs/torture.md").read_text().split("```python\n")[1].split("```")[0]
SHARED = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import worker

class Kept(dict):
    def __init__(self, setup):
        super().__init__()
        self.full = setup["capacity_bytes"]
    def put(self, key, value):
        if len(value) > self.full:
            raise worker.Refused("full")
        self[key] = value
    def get_many(self, keys):
        return [self.get(key) for key in keys]
    def delete(self, key):
        del self[key]
    def flush(self):
        pass
    def close(self):
        print("libraries may print")

worker.serve(Kept)
"""
SETUP = {"dir": "/", "capacity_bytes": 9, "staging_bytes": 9, "value_bytes": 3, "namespace": "model"}
TALK = [
    ("inject", {"fault": "none"}, b""),
    ("open", SETUP, b""),
    ("put", {"key": 1}, b"one"),
    ("put", {"key": 2}, b"two"),
    ("get", {"key": 1}, b""),
    ("get", {"key": 3}, b""),
    ("get_many", {"keys": [2, 3, 1]}, b""),
    ("delete", {"key": 1}, b""),
    ("get", {"key": 1}, b""),
    ("flush", {}, b""),
    ("stat", {}, b""),
    ("close", {}, b""),
]


def answers_of(program, talk):
    """What a worker answers to one command after another, without what is said of them in words."""
    answers = []
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        for number, (do, fields, payload) in enumerate(talk):
            command = {"id": number, "bytes": len(payload), "do": do, **fields}
            header = json.dumps(command).encode()
            worker.stdin.write(struct.pack("<I", len(header)) + header + payload)
            worker.stdin.flush()
            [length] = struct.unpack("<I", worker.stdout.read(4))
            answer = json.loads(worker.stdout.read(length))
            answer["payload"] = worker.stdout.read(answer["bytes"])
            answers.append(
                {name: value for name, value in answer.items() if name not in ("reason", "played")}
            )
        worker.stdin.close()
        assert worker.wait(timeout=20) == 0
    return answers


def test_a_dictionary_is_answered_for_as_the_documented_worker_answers():
    assert answers_of(SHARED, TALK) == answers_of(DOCUMENTED, TALK)


def test_an_exception_of_a_store_is_an_error_and_what_it_declines_is_refused():
    talk = [
        ("get", {"key": 1}, b""),
        ("open", SETUP, b""),
        ("put", {"key": 1}, b"too long a value"),
        ("delete", {"key": 1}, b""),
        ("close", {}, b""),
    ]
    assert [answer["is"] for answer in answers_of(SHARED, talk)] == [
        "error",
        "done",
        "refused",
        "error",
        "done",
    ]
