"""A record log of made-up requests, for tests of the report. Nothing in it was measured."""

import json
import random

ARMS = ["round-robin", "least-loaded", "session-sticky", "linear", "lmetric", "lpwl"]
ENGINES = ["engine-0", "engine-1", "engine-2", "engine-3"]
SECONDS = 240


def synthetic_lines(arms=ARMS, requests=300, seed=7):
    """Lines of a log: for each arm its parameters, requests, samples and counters."""
    random_numbers = random.Random(seed)
    for position, arm in enumerate(arms):
        yield {
            "kind": "run",
            "arm": arm,
            "parameters": [
                ["trace", "generated, preset demo, seed 7"],
                ["model", "Qwen/Qwen3-Coder-30B-A3B-Instruct"],
                ["pacing", "closed loop with think times"],
                ["clock ratio", "20"],
                ["seed of the policy", str(position)],
            ],
        }
        hit_share = 0.25 + 0.09 * position
        for number in range(requests):
            yield _request(random_numbers, arm, number, requests, hit_share)
        yield from _samples(random_numbers, arm, position)
        for number in range(requests):
            yield _decision(random_numbers, arm, number, requests, position)
        yield {"kind": "counter", "arm": arm, "name": "corruptions caught", "value": position}


def write_synthetic_log(path, **options):
    """Writes the lines to a file."""
    with open(path, "w", encoding="utf-8") as log:
        for line in synthetic_lines(**options):
            log.write(json.dumps(line) + "\n")


def _request(random_numbers, arm, number, requests, hit_share):
    input_tokens = int(min(random_numbers.lognormvariate(9.7, 0.9), 120_000)) + 100
    cached = int(input_tokens * random_numbers.betavariate(2 * hit_share, 2 * (1 - hit_share)))
    executed = input_tokens - cached
    ttft_s = 0.05 + executed * 61.5e-6 + executed**2 * 2.95e-9 + random_numbers.expovariate(4)
    tpot_s = random_numbers.lognormvariate(-3.8, 0.4)
    output_tokens = random_numbers.randint(40, 300)
    arrival_s = SECONDS * number / requests
    failed = number in (17, 170) and arm == "least-loaded"
    outcome = {"failed": {"kind": "reset", "detail": "connection reset by peer"}} if failed else "ok"
    return {
        "kind": "request",
        "arm": arm,
        "session": f"session-{number % 28}",
        "turn": number // 28,
        "backend": random_numbers.choice(ENGINES),
        "arrival_s": arrival_s,
        "start_s": arrival_s + 0.002,
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        "e2e_s": ttft_s + tpot_s * (output_tokens - 1),
        "input_tokens": input_tokens,
        "carried_tokens": 0,
        "output_tokens": output_tokens,
        "cached_tokens": cached,
        "external_cached_tokens": int(cached * 0.4),
        "wrong_tokens": 0,
        "outcome": outcome,
    }


def _decision(random_numbers, arm, number, requests, position):
    choices = ["home", "elsewhere", "new_session", "by_load", "refused"]
    weights = [4 + position, 3, 1, 0.2, 0.4]
    choice = random_numbers.choices(choices, weights)[0]
    ttft_s = random_numbers.lognormvariate(-0.7, 1.0)
    weighed = choice not in ("by_load", "refused")
    regret_s = max(0.0, random_numbers.gauss(0.0, 0.4))
    return {
        "kind": "decision",
        "arm": arm,
        "at_s": SECONDS * number / requests,
        "choice": choice,
        "predicted_ttft_s": ttft_s * random_numbers.lognormvariate(0, 0.3) if weighed else None,
        "ttft_s": ttft_s if weighed else None,
        "regret_s": regret_s if weighed else None,
        "over_best_other_s": random_numbers.gauss(-0.5, 0.5) if weighed else None,
    }


def _samples(random_numbers, arm, position):
    held = {engine: 3.0 for engine in ENGINES}
    for at_s in range(0, SECONDS + 30, 2):
        for engine in ENGINES:
            step = random_numbers.gauss(0, 1.2 - 0.15 * position)
            held[engine] = min(max(held[engine] + step + 0.1 * (4 - held[engine]), 0.0), 24.0)
            running = min(int(held[engine]), 8)
            yield {
                "kind": "load",
                "arm": arm,
                "at_s": float(at_s),
                "instance": engine,
                "running": running,
                "waiting": int(held[engine]) - running,
                "kv_usage": held[engine] / 24,
            }
    for at_s in range(0, SECONDS + 30, 5):
        for gpu in range(2):
            busy = min(100.0, max(0.0, random_numbers.gauss(60 + 5 * position, 20)))
            sample = {"kind": "gpu", "arm": arm, "at_s": float(at_s), "gpu": gpu}
            yield {**sample, "busy_percent": busy, "memory_mib": 61_000.0}
    for engine in ENGINES:
        for link, share in (("memory to " + engine, 0.6), (engine + " to memory", 1.0)):
            moved = int(share * random_numbers.uniform(0.5, 1.0) * (1 + position) * 4e8)
            lots = moved // 2_000_000
            yield {
                "kind": "link",
                "arm": arm,
                "at_s": float(SECONDS),
                "link": link,
                "bytes": moved,
                "lots": lots,
            }
