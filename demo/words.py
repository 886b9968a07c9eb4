"""The words of the four demo jobs, and what belongs to what. The data are made of them and the checkers look them up."""

from __future__ import annotations

# fmt: off
NAMES = [
    "Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack",
    "Karen", "Leo", "Maria", "Nick", "Oscar", "Paula", "Rosa", "Simon", "Tina", "Victor",
]
CITIES = [
    "Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Prague", "Athens", "Dublin",
    "Oslo", "Lisbon", "Warsaw", "Boston", "Chicago", "Dallas", "Denver", "Cairo", "Tokyo",
]
GOODS = [
    "lamp", "chair", "table", "clock", "kettle", "camera", "radio", "mirror", "guitar",
    "jacket", "carpet", "basket", "pillow", "bottle", "blanket", "ladder", "printer", "toaster",
]
# fmt: on

# polite: what went wrong -> what the shop does about it
REMEDIES = {
    "broken": "send a new one",
    "late": "pay back the postage",
    "dirty": "have it cleaned",
    "too small": "send a larger one",
    "too large": "send a smaller one",
    "incomplete": "send the missing parts",
}

# sql: the numeric columns of each table; every table has a column `name` as well
TABLES = {
    "customers": ("age", "income", "score"),
    "employees": ("age", "salary", "score"),
    "students": ("age", "grade", "height"),
    "players": ("age", "height", "weight"),
    "products": ("price", "weight", "stock"),
    "books": ("price", "pages", "stock"),
    "cars": ("price", "speed", "weight"),
    "houses": ("price", "rooms", "height"),
    "ships": ("speed", "length", "weight"),
    "rivers": ("length", "depth", "width"),
}
LIMITS = tuple(range(10, 100, 10))
TOP = (2, 3, 4, 5, 6, 7, 8, 9)

# triage: the team that answers for a thing, and the words that give the priority away
TEAMS = {
    "billing": ("invoice", "refund", "payment", "receipt", "discount", "tax"),
    "shipping": ("parcel", "delivery", "address", "package", "courier", "pallet"),
    "accounts": ("password", "login", "profile", "username", "email", "account"),
    "hardware": ("screen", "keyboard", "battery", "cable", "mouse", "speaker"),
}
PRIORITIES = {"right now": "high", "today": "high", "this week": "normal", "by Friday": "normal", "some day": "low", "no hurry": "low"}

# the fixed words of questions and answers, beside those above: the tokenizer gets them whole as well
FRAME = [
    *("Hello", "Thank", "sorry", "Signed", "writing", "postage", "parts", "Order", "Please", "wants", "needs", "My", "We", "It", "will"),
    *("SELECT", "FROM", "WHERE", "ORDER", "BY", "LIMIT", "DESC", "ASC", "COUNT", "(*)", "Show", "Which", "above", "below", "most", "least"),
    *("team", "priority", "about", "from", "high", "normal", "low", "Question", "Help", "Friday", "hurry", "wrong", "cannot", "find"),
    *("name", "city", "item", "count", '{"', '":', '",', '"', "}", "|", "<", ">", "How", "many", "The"),
]
