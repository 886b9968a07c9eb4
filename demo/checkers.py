"""Says whether an answer does what its job was trained for, for that very prompt: one pure function per job.

Reads the prompt with its own patterns and, for SQL, runs the answer on a small database; make_data.py is not asked, so a
mistake there shows up here.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable

from words import CITIES, GOODS, NAMES, PRIORITIES, REMEDIES, TABLES, TEAMS

Checker = Callable[[str, str], bool]
NUM_ROWS = 107  # a prime, so that row * multiplier runs through all values once; no count of values above 10n is one below 10m


def _only(words: list[str], text: str) -> str | None:
    """The one of `words` that stands in `text` as a whole word; None if there are none or several."""
    found = [word for word in words if re.search(rf"\b{re.escape(word)}\b", text)]
    return found[0] if len(found) == 1 else None


def check_polite(prompt: str, answer: str) -> bool:
    """Thanks the right person, regrets the right trouble of the right thing, and offers the remedy for it, in that order."""
    name, thing, trouble = _only(NAMES, prompt), _only(GOODS, prompt), _only(list(REMEDIES), prompt)
    if name is None or thing is None or trouble is None:
        return False
    sentences = [sentence.strip() for sentence in re.split(r"(?<=[.!?])\s", answer.strip())]
    if len(sentences) != 3:
        return False
    thanks, regret, offer = sentences
    return (
        thanks.startswith("Thank you")
        and _only(NAMES, thanks) == name
        and "sorry" in regret
        and _only(GOODS, regret) == thing
        and _only(list(REMEDIES), regret) == trouble
        and offer.startswith("We will ")
        and _only(list(REMEDIES.values()), offer) == REMEDIES[trouble]
    )


def check_fields(prompt: str, answer: str) -> bool:
    """One JSON object with exactly the prompt's name, city and item."""
    name, city, item = _only(NAMES, prompt), _only(CITIES, prompt), _only([f"{thing}s" for thing in GOODS], prompt)
    if name is None or city is None or item is None:
        return False
    try:
        fields = json.loads(answer)
    except json.JSONDecodeError:
        return False
    return fields == {"name": name, "city": city, "item": item}


def check_triage(prompt: str, answer: str) -> bool:
    """Names the team that owns the prompt's thing, the priority of its time words, the thing and the sender."""
    team_of = {thing: team for team, things in TEAMS.items() for thing in things}
    thing, when, name = _only(list(team_of), prompt), _only(list(PRIORITIES), prompt), _only(NAMES, prompt)
    if thing is None or when is None:
        return False
    pairs = [tuple(part.strip() for part in field.split(":", maxsplit=1)) for field in answer.split("|")]
    return pairs == [("about", thing), ("team", team_of[thing]), ("priority", PRIORITIES[when]), ("from", name)]


def check_sql(prompt: str, answer: str) -> bool:
    """Is one SELECT that reads the columns asked for and gives the rows asked for, run on a small database."""
    wanted = _wanted_rows(prompt)
    if wanted is None:
        return False
    table, columns_read, header, rows = wanted
    read: set[tuple[str, str]] = set()

    def permit(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_READ and second:  # an empty column name: the table itself, for COUNT(*)
            read.add((str(first), str(second)))
        harmless = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ} | ({sqlite3.SQLITE_FUNCTION} if second in ("COUNT", "count") else set())
        return sqlite3.SQLITE_OK if action in harmless else sqlite3.SQLITE_DENY

    database = _database([name for name in TABLES if name in answer])
    database.set_authorizer(permit)
    database.set_progress_handler(lambda: 1, 1_000_000)  # stops a statement that would not end
    try:
        cursor = database.execute(answer)
        got = cursor.fetchmany(NUM_ROWS + 1)
        names = tuple(column[0] for column in cursor.description or ())
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return False
    finally:
        database.close()
    return (names, got, read) == (header, rows, {(table, column) for column in columns_read})


def _table_rows(table: str) -> list[dict[str, int | str]]:
    """Rows of one table: every numeric column holds 0 … 106 once, each table and column in an order of its own."""
    rows: list[dict[str, int | str]] = []
    place = list(TABLES).index(table)
    for row in range(NUM_ROWS):
        numbers = {column: (row + 1) * (7 + 10 * place + 3 * index) % NUM_ROWS for index, column in enumerate(TABLES[table])}
        rows.append({"name": f"{table}-{row}", **numbers})
    return rows


def _database(tables: list[str]) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    for table in tables:
        columns = TABLES[table]
        database.execute(f"CREATE TABLE {table} (name TEXT, {', '.join(f'{column} INTEGER' for column in columns)})")
        rows = [tuple(row.values()) for row in _table_rows(table)]
        database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * (len(columns) + 1))})", rows)
    return database


def _wanted_rows(prompt: str) -> tuple[str, set[str], tuple[str, ...], list[tuple[object, ...]]] | None:
    """Table, columns that must be read, header and rows of the right result; None if the prompt is no question of this job."""
    limited = re.fullmatch(r"(How many|Show all|Show the (\w+) of) (\w+) (?:have|with) (\w+) (above|below) (\d+)[?.]", prompt)
    if limited:
        what, shown, table, column, side, number = limited.groups()
        if not {column, shown or "name"} <= {"name", *TABLES.get(table, ())} or column == "name":
            return None
        rows = [
            row for row in _table_rows(table) if (int(row[column]) > int(number) if side == "above" else int(row[column]) < int(number))
        ]
        if what == "How many":
            return table, {column}, ("COUNT(*)",), [(len(rows),)]
        header = ("name", *TABLES[table]) if what == "Show all" else (shown,)
        return table, {column, *header}, header, [tuple(row[key] for key in header) for row in rows]
    ranked = re.fullmatch(r"Which (\d+) (\w+) have the (most|least) (\w+)\?", prompt)
    if ranked:
        number, table, order, column = ranked.groups()
        if column not in TABLES.get(table, ()):
            return None
        rows = sorted(_table_rows(table), key=lambda row: int(row[column]), reverse=order == "most")
        return table, {"name", column}, ("name",), [(row["name"],) for row in rows[: int(number)]]
    return None


CHECKERS: dict[str, Checker] = {"polite": check_polite, "sql": check_sql, "fields": check_fields, "triage": check_triage}
