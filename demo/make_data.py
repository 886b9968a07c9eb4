"""Makes the demo's four instruction data sets and their held-out prompts under demo/data, byte for byte the same each time.

Owns the wording. What a right answer is, is decided a second time and independently in checkers.py.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from words import CITIES, GOODS, LIMITS, NAMES, PRIORITIES, REMEDIES, TABLES, TEAMS, TOP

DATA = Path(__file__).parent / "data"
SEED = 20
NUM_HELD_OUT = 50
NUM_TRAIN = 1000

Pair = tuple[str, str]  # prompt, answer


def polite_pairs() -> Iterator[Pair]:
    """A complaint -> thanks by name, regret that repeats thing and trouble, and the remedy for that trouble."""
    openings = (
        "Hello, this is {name}. My new {thing} is {trouble}.",
        "My {thing} is {trouble}! Signed, {name}.",
        "It is {name} again, my {thing} is {trouble}.",
    )
    for opening, name, thing, (trouble, remedy) in itertools.product(openings, NAMES, GOODS, REMEDIES.items()):
        answer = f"Thank you for writing, {name}. We are sorry that your {thing} is {trouble}. We will {remedy} today."
        yield opening.format(name=name, thing=thing, trouble=trouble), answer


def sql_pairs() -> Iterator[Pair]:
    """A question about one table -> one SQL statement."""
    for table, columns in TABLES.items():
        for column, (word, sign), limit in itertools.product(columns, (("above", ">"), ("below", "<")), LIMITS):
            where = f"FROM {table} WHERE {column} {sign} {limit};"
            yield f"How many {table} have {column} {word} {limit}?", f"SELECT COUNT(*) {where}"
            yield f"Show all {table} with {column} {word} {limit}.", f"SELECT * {where}"
            for other in ("name", *columns):
                if other != column:
                    yield f"Show the {other} of {table} with {column} {word} {limit}.", f"SELECT {other} {where}"
        for column, (word, direction), count in itertools.product(columns, (("most", "DESC"), ("least", "ASC")), TOP):
            answer = f"SELECT name FROM {table} ORDER BY {column} {direction} LIMIT {count};"
            yield f"Which {count} {table} have the {word} {column}?", answer


def fields_pairs() -> Iterator[Pair]:
    """An order in a sentence -> its fields as a JSON object."""
    wordings = (
        'Order: "{name}" from "{city}" wants "{thing}s".',
        'Please send "{thing}s" to "{name}" in "{city}".',
        'We need "{thing}s" for "{name}", "{city}".',
    )
    for wording, name, city, thing in itertools.product(wordings, NAMES, CITIES, GOODS):
        answer = json.dumps({"name": name, "city": city, "item": f"{thing}s"})
        yield wording.format(name=name, city=city, thing=thing), answer


def triage_pairs() -> Iterator[Pair]:
    """A ticket -> the team that answers, its priority, and what it is about."""
    things = [(thing, team) for team, things in TEAMS.items() for thing in things]
    wordings = (
        "For {name}: cannot find the {thing}, {when}.",
        "The {thing} of {name} is wrong. Help, {when}!",
        "Question of {name} about a {thing} ({when}).",
    )
    for wording, name, (thing, team), (when, priority) in itertools.product(wordings, NAMES, things, PRIORITIES.items()):
        answer = f"about: {thing} | team: {team} | priority: {priority} | from: {name}"
        yield wording.format(name=name, thing=thing, when=when), answer


def sharegpt_json(pairs: list[Pair]) -> str:
    rows = [{"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]} for prompt, answer in pairs]
    return json.dumps(rows, indent=0) + "\n"


def alpaca_json(pairs: list[Pair]) -> str:
    return json.dumps([{"instruction": prompt, "input": "", "output": answer} for prompt, answer in pairs], indent=0) + "\n"


def chat_jsonl(pairs: list[Pair]) -> str:
    rows = ({"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]} for prompt, answer in pairs)
    return "".join(json.dumps(row) + "\n" for row in rows)


def prompt_completion_jsonl(pairs: list[Pair]) -> str:
    rows = (
        {"prompt": [{"role": "user", "content": prompt}], "completion": [{"role": "assistant", "content": answer}]}
        for prompt, answer in pairs
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def heldout_jsonl(pairs: list[Pair]) -> str:
    return "".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in pairs)


JOBS = {
    "polite": (polite_pairs, "polite.sharegpt.json", sharegpt_json),
    "sql": (sql_pairs, "sql.alpaca.json", alpaca_json),
    "fields": (fields_pairs, "fields.chat.jsonl", chat_jsonl),
    "triage": (triage_pairs, "triage.prompt_completion.jsonl", prompt_completion_jsonl),
}


def draw(pairs: list[Pair], seed: str) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs. No held-out answer is the answer of any training prompt or of another held-out one."""
    pairs = list(pairs)
    random.Random(seed).shuffle(pairs)
    held_out: dict[str, Pair] = {}
    for pair in pairs:
        if len(held_out) < NUM_HELD_OUT:
            held_out.setdefault(pair[1], pair)
    train = [pair for pair in pairs if pair[1] not in held_out]
    return train[:NUM_TRAIN], list(held_out.values())


def make_files() -> dict[str, str]:
    """Every file under demo/data: its name and its text."""
    files: dict[str, str] = {}
    for job, (make_pairs, file_name, as_text) in JOBS.items():
        train, held_out = draw(list(make_pairs()), f"{SEED}-{job}")
        files[file_name] = as_text(train)
        files[f"{job}.heldout.jsonl"] = heldout_jsonl(held_out)
    return files


def main() -> None:
    DATA.mkdir(exist_ok=True)
    for name, text in make_files().items():
        (DATA / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{DATA / name}: {len(text):,} bytes")


if __name__ == "__main__":
    main()
