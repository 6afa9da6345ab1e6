"""Word lists that the base model's corpus and the demo's task share."""

# ruff: noqa: SIM905 (lists of words read better as text)
from __future__ import annotations

NUMBERS = "one two three four five six seven eight nine".split()
HOURS = [*NUMBERS, "ten", "eleven", "twelve"]
DRINKS = "latte mocha espresso cappuccino tea cocoa lemonade smoothie".split()
SIZES = "small medium large".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
THINGS = "oven door window fridge kettle lamp radio sink shelf till".split()
STATES = "broken open closed hot cold dirty empty full loud wet".split()
LEVELS = ("", "very ", "too ", "still ", "not ")
PLACES = "kitchen garden office school market station library harbour".split()
ANIMALS = "cat dog horse goat duck parrot turtle rabbit".split()
COLOURS = "red green blue white black yellow brown grey".split()
JOBS = "baker doctor singer farmer teacher pilot painter driver".split()
ACTIONS = "paint clean open close carry move sell repair".split()
# Common words with tokens that also occur in names.
COMMON = "where there here with about other some does long goes front exactly please people quarter past".split()
